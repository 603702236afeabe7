"""Deferred messages that were refused: sent again, or discarded."""

from oncely import ops
from oncely.core.waiting import WaitingMessage
from oncely.web.decisions import UNSENT, OperatorDecision
from oncely.web.pages.confirming import MORE, Chosen, DecisionPages, Outcome, Subject
from oncely.web.pages.failed import number
from oncely.web.visit import MOST, Visit

_GONE = "it is not refused any more, or was sent or discarded meanwhile"


def _choose(visit: Visit) -> Chosen:
    """Those that were ticked, or all that were refused; and what has gone meanwhile."""
    if visit.sent("every"):
        every = ops.unsent_messages(visit.ledger, None, MOST, is_refused=True, with_bodies=False)
        return Chosen([*map(_subject, every.messages)], [MORE] if every.more else [])
    ids = {number(text): text for text in visit.sent("id")[:MOST]}
    found = ops.refused_numbered(visit.ledger, [*ids])
    gone = ids.keys() - {each.number for each in found}
    missing = [f"message {text}: {_GONE}" for id_, text in ids.items() if id_ in gone]
    return Chosen([*map(_subject, found)], missing)


def _decide(visit: Visit, decided: OperatorDecision) -> Outcome:
    """Do it to those that are refused still."""
    ids = [number(text) for text in visit.sent("id")[:MOST]]
    changed = decided.apply(visit.ledger, ids, by=visit.by, why=visit.field("why"))
    gone = [f"message {id_}: {_GONE}" for id_ in changed.missing]
    return Outcome([f"message {id_}" for id_ in changed.done], gone, changed.audit_error)


def _subject(message: WaitingMessage) -> Subject:
    label = f"message {message.number} to {message.destination}: {message.reason or 'no reason'}"
    return Subject(message.parent, str(message.number), label)


PAGES = DecisionPages(UNSENT, "/unsent/change", "/outbox", "id", _choose, _decide)
