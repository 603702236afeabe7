"""Messages that wait for a retry: run now, or cancelled."""

from collections.abc import Iterable

from oncely.core.record import Key
from oncely.web.decisions import WAITING, OperatorDecision
from oncely.web.marks import read_waiting_mark, waiting_mark
from oncely.web.pages.confirming import Chosen, DecisionPages, Outcome, Subject, named
from oncely.web.visit import MOST, Visit


def _keys(visit: Visit) -> Iterable[Key]:
    return dict.fromkeys(map(read_waiting_mark, visit.sent("record")[:MOST]))


def _choose(visit: Visit) -> Chosen:
    return Chosen([Subject(key, waiting_mark(key), named(key)) for key in _keys(visit)])


def _decide(visit: Visit, decided: OperatorDecision) -> Outcome:
    """Do it to those that wait still, and that no worker has taken."""
    keys = [*_keys(visit)]
    changed = decided.apply(visit.ledger, keys, by=visit.by, why=visit.field("why"))
    refused = [each.reason for each in changed.refused]
    return Outcome([*map(named, changed.done)], refused, changed.audit_error)


PAGES = DecisionPages(WAITING, "/waiting/change", "/waiting", "record", _choose, _decide)
