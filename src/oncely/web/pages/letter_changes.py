"""What a form names by numbers: dead letters, and deferred messages that were refused."""

from collections.abc import Sequence
from dataclasses import replace

from starlette.responses import Response

from oncely import ops
from oncely.core.errors import ConfigError
from oncely.core.message import Message
from oncely.core.shown import shown
from oncely.core.waiting import DeadLetter, WaitingMessage
from oncely.web.decisions import LETTERS, UNSENT, OperatorDecision
from oncely.web.pages.confirming import MORE, NOTE_MISSING, Chosen, DecisionPages, Outcome, Subject
from oncely.web.pages.failed import masked, number
from oncely.web.visit import MOST, Visit

_GONE = "it is not there any more: a worker or somebody else was faster"
_UNSENT_GONE = "it is not refused any more, or was sent or discarded meanwhile"


def _decide_letters(visit: Visit, decided: OperatorDecision) -> Outcome:
    return _told(_decided(visit, decided), "dead letter", _GONE)


def _decide_unsent(visit: Visit, decided: OperatorDecision) -> Outcome:
    """Do it to those that are refused still."""
    return _told(_decided(visit, decided), "message", _UNSENT_GONE)


def _decided(visit: Visit, decided: OperatorDecision) -> ops.Changed[int]:
    ids = [number(text) for text in visit.sent("id")[:MOST]]
    changed: ops.Changed[int]
    changed = decided.apply(visit.ledger, ids, by=visit.by, why=visit.field("why"))
    return changed


def _told(changed: ops.Changed[int], what: str, gone: str) -> Outcome:
    missing = [f"{what} {id_}: {gone}" for id_ in changed.missing]
    return Outcome([f"{what} {id_}" for id_ in changed.done], missing, changed.audit_error)


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
    return LETTER_PAGES.done(visit, LETTERS["retry"], _told(changed, "dead letter", _GONE))


def _edited(visit: Visit, letter: DeadLetter) -> Message:
    """As the form has it: a browser makes each end of a line CR LF."""
    edited = message = letter.message
    # Sent back as it was shown, the type is not changed: what was shown may be masked.
    if visit.field("type") != shown(str(masked(visit, letter)["type"])):
        edited = replace(edited, type=visit.field("type"))
    if not message.id:
        edited = replace(edited, id=visit.field("message_id"))
    if not visit.sent("replaces"):
        return edited
    body = visit.field("body").replace("\r\n", "\n").encode()
    return edited if body == message.body.replace(b"\r\n", b"\n") else replace(edited, body=body)


def _choose_letters(visit: Visit) -> Chosen:
    """Those that were ticked, or all of a list; and what has gone meanwhile."""
    consumer = visit.field("consumer") or None
    if visit.sent("every"):
        found = ops.dead_letters(visit.ledger, consumer, MOST, with_bodies=False)
        return Chosen([*map(_subject, found.letters)], [MORE] if found.more else [])
    if not visit.field("group"):
        return _named_letters(visit, visit.sent("id")[:MOST])
    found_group = ops.letter_group(visit.ledger, visit.field("group"), consumer)
    numbers = [str(id_) for id_ in found_group.groups[0].ids]
    subjects, missing = _named_letters(visit, numbers[:MOST])
    looked_at = f"any after the first {found_group.looked_at:,} dead letters"
    if len(numbers) > MOST:
        missing = [*missing, MORE]
    elif found_group.more:
        missing = [*missing, f"{looked_at}: decide again for the rest"]
    return Chosen(subjects, missing)


def _named_letters(visit: Visit, numbers: Sequence[str]) -> Chosen:
    ids = {number(text): text for text in numbers}
    # Not the letters themselves: a thousand bodies may be too much to hold.
    found = {each.id: _subject(each) for each in ops.letters_numbered(visit.ledger, [*ids])}
    missing = [f"dead letter {text}: {_GONE}" for id_, text in ids.items() if id_ not in found]
    return Chosen([*found.values()], missing)


def _subject(letter: DeadLetter) -> Subject:
    shown = ops.letter_as_dict(letter)
    label = f"dead letter {letter.id}: {shown['message_id'] or 'without an id'}, {shown['reason']}"
    return Subject(letter.key, str(letter.id), label)


LETTER_PAGES = DecisionPages(
    LETTERS, "/letters/change", "/failed", "id", _choose_letters, _decide_letters
)


def _choose_unsent(visit: Visit) -> Chosen:
    """Those that were ticked, or all that were refused; and what has gone meanwhile."""
    if visit.sent("every"):
        every = ops.unsent_messages(visit.ledger, None, MOST, is_refused=True, with_bodies=False)
        return Chosen([*map(_unsent_subject, every.messages)], [MORE] if every.more else [])
    ids = {number(text): text for text in visit.sent("id")[:MOST]}
    found = ops.refused_numbered(visit.ledger, [*ids])
    gone = ids.keys() - {each.number for each in found}
    missing = [f"message {text}: {_UNSENT_GONE}" for id_, text in ids.items() if id_ in gone]
    return Chosen([*map(_unsent_subject, found)], missing)


def _unsent_subject(message: WaitingMessage) -> Subject:
    label = f"message {message.number} to {message.destination}: {message.reason or 'no reason'}"
    return Subject(message.parent, str(message.number), label)


UNSENT_PAGES = DecisionPages(
    UNSENT, "/unsent/change", "/outbox", "id", _choose_unsent, _decide_unsent
)
