"""Failed: dead letters, a list of them and one opened; and what operators decide of them, and of
deferred messages that were refused, which a form names by numbers, too.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from starlette.responses import Response, StreamingResponse

from oncely import ops
from oncely.core.errors import ConfigError
from oncely.core.errors_by_kind import headline
from oncely.core.message import Message
from oncely.core.shown import shown
from oncely.core.waiting import DeadLetter, WaitingMessage
from oncely.web import contents
from oncely.web.decisions import LETTERS, UNSENT, OperatorDecision
from oncely.web.pages.confirming import (
    MORE,
    NOTE_MISSING,
    Chosen,
    DecisionPages,
    Outcome,
    Subject,
    left_of_group,
    told,
)
from oncely.web.pages.lists import listed
from oncely.web.visit import MOST, Visit

_EDITABLE = 100_000
"""Characters of a body that a form is filled with."""
_GONE = "it is not there any more: a worker or somebody else was faster"
_UNSENT_GONE = "it is not refused any more, or was sent or discarded meanwhile"


def letters(visit: Visit) -> Response:
    """The dead letters of a consumer, or of all."""
    return listed(visit, "failed", "Failed", contents.failed, LETTERS.values(), "dead list")


def export(visit: Visit) -> Response:
    """All dead letters, or those of a consumer or a group, as people may see them: a JSON object a
    line, as `oncely dead export` has them.
    """
    letters = ops.letters_to_export(visit.ledger, visit.consumer, visit.query("group"))
    lines = (f"{json.dumps(_masked(visit, each))}\n" for each in letters)
    name = 'attachment; filename="dead-letters.jsonl"'
    kind = "application/x-ndjson"
    return StreamingResponse(lines, media_type=kind, headers={"content-disposition": name})


def letter(visit: Visit) -> Response:
    """One in full; as `oncely dead show --json` has it."""
    found = ops.letter(visit.ledger, _number(visit.query("id") or ""))
    shown_as = _masked(visit, found)
    return visit.page(
        "letter.html",
        letter=shown_as,
        editable=_editable(found, shown_as["body"]),
        has_record=bool(found.key.message_id),
        now=visit.ledger.now(),
        decisions=LETTERS.values(),
        command=f"oncely dead show {found.id} --json",
    )


def _number(text: str) -> int:
    """The number of a dead letter; one that none has for what is not a number."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else 0


def _masked(visit: Visit, letter: DeadLetter) -> dict[str, object]:
    """A dead letter with all that people may see of it."""
    seen = replace(letter, message=visit.site.mask(letter.message))
    return ops.letter_as_dict(seen, is_whole=True)


def _editable(letter: DeadLetter, seen: object) -> str | None:
    """The body for a form to begin with; None where people do not see it as it is, or a form
    cannot hold it: what is sent back would be another.
    """
    try:
        body = letter.message.body.decode()
    except UnicodeDecodeError:
        return None
    lines = body.replace("\r\n", "\n").replace("\t", " ").split("\n")
    holds = len(body) <= _EDITABLE and all(shown(line) == line for line in lines)
    return body if body == seen and holds else None


# ---- Decisions ---------------------------------------------------------------------------------


def _decide(what: str, gone: str, visit: Visit, decided: OperatorDecision) -> Outcome:
    """Do it to those that are still there: dead letters, or messages that are refused still."""
    ids = [_number(text) for text in visit.sent("id")[:MOST]]
    changed = decided.apply(visit.ledger, ids, by=visit.by, why=visit.field("why"))
    return _told(changed, what, gone)


def _told(changed: ops.Changed[int], what: str, gone: str) -> Outcome:
    missing = [f"{what} {id_}: {gone}" for id_ in changed.missing]
    return Outcome(told(changed, lambda id_: f"{what} {id_}"), missing, changed.audit_error)


def edit(visit: Visit) -> Response:
    """Let one be handled again with other content; what it was before is not kept."""
    if not visit.field("why").strip():
        raise ConfigError(NOTE_MISSING)
    letter = ops.letter(visit.ledger, _number(visit.field("id")))
    message, why = _edited(visit, letter), visit.field("why")
    changed = ops.retry_letters(visit.ledger, [letter.id], message=message, by=visit.by, why=why)
    return LETTER_PAGES.done(visit, LETTERS["retry"], _told(changed, "dead letter", _GONE))


def _edited(visit: Visit, letter: DeadLetter) -> Message:
    """As the form has it: a browser makes each end of a line CR LF."""
    edited = message = letter.message
    # Sent back as it was shown, the type is not changed: what was shown may be masked.
    if visit.field("type") != shown(str(_masked(visit, letter)["type"])):
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
    return Chosen(subjects, [*missing, *left_of_group(found_group)])


def _named_letters(visit: Visit, numbers: Sequence[str]) -> Chosen:
    ids = {_number(text): text for text in numbers}
    # Not the letters themselves: a thousand bodies may be too much to hold.
    found = {each.id: _subject(each) for each in ops.letters_numbered(visit.ledger, [*ids])}
    missing = [f"dead letter {text}: {_GONE}" for id_, text in ids.items() if id_ not in found]
    return Chosen([*found.values()], missing)


def _subject(letter: DeadLetter) -> Subject:
    shown = ops.letter_as_dict(letter)
    named = f"{shown['message_id'] or 'without an id'}, {headline(shown['reason'])}"
    label = f"dead letter {letter.id}: {named}"
    return Subject(letter.key, str(letter.id), label)


LETTER_PAGES = DecisionPages(
    LETTERS,
    "/letters/change",
    "/failed",
    "id",
    _choose_letters,
    partial(_decide, "dead letter", _GONE),
)


def _choose_unsent(visit: Visit) -> Chosen:
    """Those that were ticked, or all that were refused; and what has gone meanwhile."""
    if visit.sent("every"):
        every = ops.unsent_messages(visit.ledger, None, MOST, is_refused=True, with_bodies=False)
        return Chosen([*map(_unsent_subject, every.messages)], [MORE] if every.more else [])
    ids = {_number(text): text for text in visit.sent("id")[:MOST]}
    found = ops.refused_numbered(visit.ledger, [*ids])
    gone = ids.keys() - {each.number for each in found}
    missing = [f"message {text}: {_UNSENT_GONE}" for id_, text in ids.items() if id_ in gone]
    return Chosen([*map(_unsent_subject, found)], missing)


def _unsent_subject(message: WaitingMessage) -> Subject:
    reason = headline(message.reason or "no reason")
    label = f"message {message.number} to {message.destination}: {reason}"
    return Subject(message.parent, str(message.number), label)


UNSENT_PAGES = DecisionPages(
    UNSENT,
    "/unsent/change",
    "/outbox",
    "id",
    _choose_unsent,
    partial(_decide, "message", _UNSENT_GONE),
)
