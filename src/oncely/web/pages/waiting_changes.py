"""Messages that wait for a retry: run now, or cancelled."""

from starlette.responses import Response

from oncely.core.record import Key
from oncely.web.decisions import WAITING, decision
from oncely.web.marks import read_waiting_mark, waiting_mark
from oncely.web.pages.confirming import Outcome, Subject, confirm_page, done_page, lacks_note
from oncely.web.visit import MOST, Visit

_PATHS = ("/waiting/change", "/waiting")


def confirm(visit: Visit) -> Response:
    """Show what would be done, to how many."""
    return confirm_page(visit, decision(WAITING, visit.field("decision")), _chosen(visit), _PATHS)


def change(visit: Visit) -> Response:
    """Do it to those that wait still, and that no worker has taken."""
    decided, chosen = decision(WAITING, visit.field("decision")), _chosen(visit)
    error = lacks_note(visit, decided, len(chosen))
    if error:
        return confirm_page(visit, decided, chosen, _PATHS, error=error)
    keys = [each.key for each in chosen]
    changed = decided.apply(visit.ledger, keys, by=visit.by, why=visit.field("why"))
    refused = [each.reason for each in changed.refused]
    outcome = Outcome([*map(_label, changed.done)], refused, changed.audit_error)
    return done_page(visit, decided, outcome, _PATHS[1])


def _chosen(visit: Visit) -> list[Subject]:
    keys = dict.fromkeys(map(read_waiting_mark, visit.sent("record")[:MOST]))
    return [Subject(key, waiting_mark(key), _label(key)) for key in keys]


def _label(key: Key) -> str:
    return f"{key.message_id!r} ({key.consumer})"
