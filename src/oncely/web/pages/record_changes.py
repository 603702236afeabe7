"""Records and waiting retries: what operators decide of them, one or many."""

import time
from collections.abc import Iterable, Sequence

from oncely import ops
from oncely.core.errors import RefusedError, StoreError, mask_passwords
from oncely.core.record import Key, Record
from oncely.web.contents import read_record_mark, read_waiting_mark, record_mark, waiting_mark
from oncely.web.decisions import RECORDS, WAITING, OperatorDecision
from oncely.web.pages.confirming import MORE, Chosen, DecisionPages, Outcome, Subject, named
from oncely.web.visit import MOST, Visit

_PROBING_S = 30.0
"""After that no further probe is begun: a browser, or a proxy, does not wait for ever."""
_FASTER = "it has changed since it was shown: a worker or somebody else was faster"


def _decide(visit: Visit, decided: OperatorDecision) -> Outcome:
    """Do it to those that are as they were shown."""
    records, changed_before = _unchanged(visit)
    if decided.needs_probe:
        return _probed(visit, records, changed_before)
    changed = decided.apply(visit.ledger, records, by=visit.by, why=visit.field("why"))
    refused = [*changed_before, *(refusal.reason for refusal in changed.refused)]
    return Outcome([*map(named, changed.done)], refused, changed.audit_error)


def _probed(visit: Visit, records: Sequence[Record], left_out: Sequence[str]) -> Outcome:
    """Ask about one after another, while there is time."""
    done: list[str] = []
    refused = [*left_out]
    audit_error: str | None = None
    until = time.monotonic() + _PROBING_S
    for record in records:
        changed, said = None, "not asked, as the others took too long: choose it again"
        if time.monotonic() <= until:
            changed, said = _probed_one(visit, record)
        is_decided = changed is not None and changed.done
        (done if is_decided else refused).append(f"{named(record.key)}: {said}")
        if changed is not None:
            audit_error = audit_error or changed.audit_error
    return Outcome(done, refused, audit_error)


def _probed_one(visit: Visit, record: Record) -> tuple[ops.Changed[Key] | None, str]:
    """What a probe has changed, and what came of it in words."""
    probe = visit.site.probes.get(record.key.consumer)
    if probe is None:
        return None, "its consumer has no probe here"
    try:
        found = ops.probe(visit.ledger, record, probe, by=visit.by, why=visit.field("why"))
    except (RefusedError, StoreError) as error:
        # Others may be decided already: the page has to name them.
        return None, mask_passwords(str(error))
    said = found.finding.replace("_", " ")
    reasons = [found.error or "", *(refusal.reason for refusal in found.changed.refused)]
    lines = [reason.splitlines()[0] for reason in reasons if reason]
    return found.changed, ": ".join([said, *lines])


def _choose(visit: Visit) -> Chosen:
    if visit.sent("every"):
        # All in doubt, of the list that was shown.
        consumer = visit.field("consumer") or None
        selection = ops.Selection(consumer=consumer, states=[ops.IN_DOUBT])
        records, more = ops.select(visit.ledger, selection, MOST)
        left_out = [MORE] if more else []
    else:
        records, left_out = _unchanged(visit)
    now = visit.ledger.now()
    subjects = [
        Subject(each.key, record_mark(each), f"{named(each.key)}: {ops.word_for(each, now)}")
        for each in records
    ]
    return Chosen(subjects, left_out)


def _unchanged(visit: Visit) -> tuple[Sequence[Record], list[str]]:
    """The named records that are as they were shown, and what to say of the others."""
    shown = dict(map(read_record_mark, visit.sent("record")[:MOST]))
    found = visit.ledger.find_many(shown)
    unchanged = {key: each for key, each in found.items() if each.version == shown[key]}
    return (
        [unchanged[key] for key in shown if key in unchanged],
        [f"{named(key)}: {_FASTER}" for key in shown if key not in unchanged],
    )


RECORD_PAGES = DecisionPages(RECORDS, "/records/change", "/in-doubt", "record", _choose, _decide)


def _retries(visit: Visit) -> Iterable[Key]:
    return dict.fromkeys(map(read_waiting_mark, visit.sent("record")[:MOST]))


def _choose_retries(visit: Visit) -> Chosen:
    return Chosen([Subject(key, waiting_mark(key), named(key)) for key in _retries(visit)])


def _decide_retries(visit: Visit, decided: OperatorDecision) -> Outcome:
    """Do it to those that wait still, and that no worker has taken."""
    keys = [*_retries(visit)]
    changed = decided.apply(visit.ledger, keys, by=visit.by, why=visit.field("why"))
    refused = [each.reason for each in changed.refused]
    return Outcome([*map(named, changed.done)], refused, changed.audit_error)


RETRY_PAGES = DecisionPages(
    WAITING, "/waiting/change", "/waiting", "record", _choose_retries, _decide_retries
)
