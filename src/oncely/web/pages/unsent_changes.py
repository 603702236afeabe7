"""Deferred messages that were refused: sent again, or discarded."""

from collections.abc import Sequence

from starlette.responses import Response

from oncely import ops
from oncely.core.waiting import WaitingMessage
from oncely.web.decisions import UNSENT, decision
from oncely.web.pages.confirming import MORE, Outcome, Subject, confirm_page, done_page, lacks_note
from oncely.web.pages.failed import number
from oncely.web.visit import MOST, Visit

_PATHS = ("/unsent/change", "/outbox")
_GONE = "it is not refused any more, or was sent or discarded meanwhile"


def confirm(visit: Visit) -> Response:
    """Show what would be done, to how many."""
    found, missing = _chosen(visit)
    decided = decision(UNSENT, visit.field("decision"))
    return confirm_page(visit, decided, [*map(_subject, found)], _PATHS, left_out=missing)


def change(visit: Visit) -> Response:
    """Do it to those that are refused still."""
    decided = decision(UNSENT, visit.field("decision"))
    ids = [number(text) for text in visit.sent("id")[:MOST]]
    error = lacks_note(visit, decided, len(ids))
    if error:
        found, missing = _chosen(visit)
        subjects = [*map(_subject, found)]
        return confirm_page(visit, decided, subjects, _PATHS, left_out=missing, error=error)
    changed = decided.apply(visit.ledger, ids, by=visit.by, why=visit.field("why"))
    gone = [f"message {id_}: {_GONE}" for id_ in changed.missing]
    done = [f"message {id_}" for id_ in changed.done]
    return done_page(visit, decided, Outcome(done, gone, changed.audit_error), _PATHS[1])


def _chosen(visit: Visit) -> tuple[Sequence[WaitingMessage], Sequence[str]]:
    """Those that were ticked, or all that were refused; and what has gone meanwhile."""
    if visit.sent("every"):
        every = ops.unsent_messages(visit.ledger, None, MOST, is_refused=True, with_bodies=False)
        return every.messages, [MORE] if every.more else []
    ids = {number(text): text for text in visit.sent("id")[:MOST]}
    found = ops.refused_numbered(visit.ledger, [*ids])
    gone = ids.keys() - {each.number for each in found}
    return found, [f"message {text}: {_GONE}" for id_, text in ids.items() if id_ in gone]


def _subject(message: WaitingMessage) -> Subject:
    label = f"message {message.number} to {message.destination}: {message.reason or 'no reason'}"
    return Subject(message.parent, str(message.number), label)
