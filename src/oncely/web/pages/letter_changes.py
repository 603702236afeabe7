"""Dead letters: retried, edited, discarded."""

from collections.abc import Sequence
from dataclasses import replace

from starlette.responses import Response

from oncely import ops
from oncely.core.errors import ConfigError
from oncely.core.message import Message
from oncely.core.waiting import DeadLetter
from oncely.ops import LettersChanged
from oncely.web.decisions import LETTERS, OperatorDecision, decision
from oncely.web.pages.confirming import (
    MORE,
    NOTE_MISSING,
    Outcome,
    Subject,
    confirm_page,
    done_page,
    lacks_note,
)
from oncely.web.pages.failed import masked, number
from oncely.web.visit import MOST, Visit

_PATHS = ("/letters/change", "/failed")


def confirm(visit: Visit) -> Response:
    """Show what would be done, to how many."""
    decided = decision(LETTERS, visit.field("decision"))
    subjects, missing = _chosen(visit)
    return confirm_page(visit, decided, subjects, _PATHS, left_out=missing)


def change(visit: Visit) -> Response:
    """Do it."""
    decided = decision(LETTERS, visit.field("decision"))
    ids = [number(text) for text in visit.sent("id")[:MOST]]
    error = lacks_note(visit, decided, len(ids))
    if error:
        subjects, missing = _chosen(visit)
        return confirm_page(visit, decided, subjects, _PATHS, left_out=missing, error=error)
    changed = decided.apply(visit.ledger, ids, by=visit.by, why=visit.field("why"))
    return _done(visit, decided, changed)


def edit(visit: Visit) -> Response:
    """Let one be handled again with other content; what it was before is not kept."""
    if not visit.field("why").strip():
        raise ConfigError(NOTE_MISSING)
    letter = ops.letter(visit.ledger, number(visit.field("id")))
    changed = ops.retry_letters(
        visit.ledger,
        [letter.id],
        message=_edited(visit, letter),
        by=visit.by,
        why=visit.field("why"),
    )
    return _done(visit, LETTERS["retry"], changed)


def _edited(visit: Visit, letter: DeadLetter) -> Message:
    """As the form has it: a browser makes each end of a line CR LF."""
    edited = message = letter.message
    # Sent back as it was shown, the type is not changed: what was shown may be masked.
    if visit.field("type") != _in_a_field(str(masked(visit, letter)["type"])):
        edited = replace(edited, type=visit.field("type"))
    if not message.id:
        edited = replace(edited, id=visit.field("message_id"))
    if not visit.sent("replaces"):
        return edited
    body = visit.field("body").replace("\r\n", "\n").encode()
    return edited if body == message.body.replace(b"\r\n", b"\n") else replace(edited, body=body)


def _in_a_field(text: str) -> str:
    """As a browser sends it back from a field of one line."""
    return text.replace("\r", "").replace("\n", "")


def _done(visit: Visit, decided: OperatorDecision, changed: LettersChanged) -> Response:
    gone = [f"dead letter {id_}: {_GONE}" for id_ in changed.missing]
    done = [f"dead letter {id_}" for id_ in changed.done]
    outcome = Outcome(done, gone, changed.audit_error)
    return done_page(visit, decided, outcome, _PATHS[1])


_GONE = "it is not there any more: a worker or somebody else was faster"


def _chosen(visit: Visit) -> tuple[Sequence[Subject], Sequence[str]]:
    """Those that were ticked, or all of a list; and what has gone meanwhile."""
    if visit.sent("every"):
        consumer = visit.field("consumer") or None
        found = ops.dead_letters(visit.ledger, consumer, MOST, with_bodies=False)
        return [*map(_subject, found.letters)], _left(found.more)
    if visit.field("group"):
        consumer = visit.field("consumer") or None
        of_group = ops.letter_group(visit.ledger, visit.field("group"), consumer)
        numbers = [str(id_) for id_ in of_group.group.ids]
        subjects, missing = _named_letters(visit, numbers[:MOST])
        return subjects, [*missing, *_left_of_group(of_group, len(numbers))]
    return _named_letters(visit, visit.sent("id")[:MOST])


def _named_letters(visit: Visit, numbers: Sequence[str]) -> tuple[Sequence[Subject], Sequence[str]]:
    ids = {number(text): text for text in numbers}
    # Not the letters themselves: a thousand bodies may be too much to hold.
    found = {each.id: _subject(each) for each in ops.letters_numbered(visit.ledger, [*ids])}
    missing = [f"dead letter {text}: {_GONE}" for id_, text in ids.items() if id_ not in found]
    return [*found.values()], missing


def _left(more: bool) -> Sequence[str]:
    return [MORE] if more else []


def _left_of_group(found: ops.FoundGroup, count: int) -> Sequence[str]:
    """Who of a group has to wait for a second decision."""
    if count > MOST or not found.more:
        return _left(count > MOST)
    return [f"any after the first {found.looked_at:,} dead letters: decide again for the rest"]


def _subject(letter: DeadLetter) -> Subject:
    shown = ops.letter_as_dict(letter)
    label = f"dead letter {letter.id}: {shown['message_id'] or 'without an id'}, {shown['reason']}"
    return Subject(letter.key, str(letter.id), label)
