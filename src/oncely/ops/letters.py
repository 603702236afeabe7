"""Dead letters: looked at, and changed."""

import sys
from base64 import b64encode
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Unpack

from oncely._util.event_log import EventLog
from oncely.core.errors import (
    NAMES,
    ConfigError,
    MessageError,
    RefusedError,
    is_secret,
    mask_passwords,
)
from oncely.core.message import Message
from oncely.core.waiting import DeadLetter
from oncely.ledger.ledger import Ledger
from oncely.ops.auditing import Note, Noted, about, audited, change_each
from oncely.ops.found import first
from oncely.ops.known import check_known_at_all, check_waits

_log = EventLog(__name__)

_LETTER = "dead letter %(dead_letter)s: message '%(message_id)s' of '%(consumer)s'"
_SENTENCES = {
    "dead_letter_retried": f"%(by)s has {_LETTER} handled again",
    "dead_letter_discarded": f"%(by)s has removed {_LETTER}",
}

LETTERS_DISCARDED = "dead_letter_discarded"
"""The action in the audit."""
_READ_TOGETHER = 50


class FoundLetters(NamedTuple):
    """Dead letters, in the order that was asked for."""

    letters: Sequence[DeadLetter]
    more: bool
    """Whether there are others, left out because of the limit."""


def dead_letters(
    ledger: Ledger,
    consumer: str | None = None,
    limit: int = 100,
    *,
    newest: bool = False,
    with_bodies: bool = True,
) -> FoundLetters:
    """At most `limit` dead letters, in the order in which they came; or the `newest` first, for
    which all are read. Without bodies each has an empty one: a list needs none, and they may be
    large. Raises ConfigError for a consumer that the ledger does not know, and where the store
    keeps no messages.
    """
    every = every_dead_letter(ledger, consumer, with_bodies=with_bodies)
    return FoundLetters(*first(reversed(deque(every, limit + 1)) if newest else every, limit))


def every_dead_letter(
    ledger: Ledger, consumer: str | None = None, *, with_bodies: bool = True
) -> Iterator[DeadLetter]:
    """All, in the order in which they came, read page by page. Raises as `dead_letters` does."""
    check_waits(ledger)
    is_none = True
    for letter in ledger.mailbox.dead(consumer, sys.maxsize, with_bodies=with_bodies):
        is_none = False
        yield letter
    if is_none and consumer is not None:
        check_known_at_all(ledger, consumer, "dead letters")


def letter(ledger: Ledger, id_: int) -> DeadLetter:
    """The dead letter of that number. Raises RefusedError where there is none."""
    check_waits(ledger)
    found = ledger.mailbox.dead_numbered([id_])
    if not found:
        raise RefusedError(f"there is no dead letter {id_}")
    return found[0]


def letters_numbered(ledger: Ledger, ids: Sequence[int]) -> Iterator[DeadLetter]:
    """The dead letters of these numbers that there are, in their order."""
    check_waits(ledger)
    for start in range(0, len(ids), _READ_TOGETHER):
        # Few at a time: they are read with their bodies.
        some = ids[start : start + _READ_TOGETHER]
        found = {letter.id: letter for letter in ledger.mailbox.dead_numbered(some)}
        yield from (found[id_] for id_ in some if id_ in found)


@dataclass(frozen=True, slots=True)
class LettersChanged:
    """What became of the dead letters that were named by their numbers."""

    done: Sequence[int]
    missing: Sequence[int]
    """Those that do not exist, or not any more."""
    by: str
    why: str
    """Who and why, as they were noted: cut, and with passwords masked."""
    audit_error: str | None = None
    """Why the counts are not in the audit, where they could not be kept there."""


def retry_letters(
    ledger: Ledger, ids: Sequence[int], *, message: Message | None = None, **noted: Unpack[Noted]
) -> LettersChanged:
    """Let each be handled again, at once, its attempts from zero; who did it, when and why is kept
    with its record, logged, and in the audit. `message` replaces the content of a single one.

    Raises ConfigError for a message that is unusable, or has another id.
    """

    def retry(id_: int, note: Mapping[str, str]) -> int:
        try:
            return ledger.retry_dead(id_, message, **note)
        except MessageError as error:
            raise ConfigError(f"dead letter {id_}: {error}") from error

    action = "dead_letter_retried" if message is None else "dead_letter_edited"
    return _change(ledger, ids, action, "dead_letter_retried", retry, **noted)


def discard_letters(ledger: Ledger, ids: Sequence[int], **noted: Unpack[Noted]) -> LettersChanged:
    """Remove each; who did it and why is logged, and in the audit. Their records stay."""

    def discard(id_: int, _: Mapping[str, str]) -> int:
        return ledger.discard_dead(id_)

    return _change(ledger, ids, LETTERS_DISCARDED, LETTERS_DISCARDED, discard, **noted)


def _change(
    ledger: Ledger,
    ids: Sequence[int],
    action: str,
    event: str,
    change: Callable[[int, Mapping[str, str]], int],
    *,
    by: str,
    why: str = "",
    on_each: Callable[[int], None] = lambda _: None,
) -> LettersChanged:
    note, numbers = Note.of(by, why), list(dict.fromkeys(ids))
    # Whose they are, of those that exist.
    keys = {letter.id: letter.key for letter in letters_numbered(ledger, numbers)}
    if not keys:
        return LettersChanged([], numbers, *note)

    def change_one(id_: int) -> None:
        # Somebody else may have retried or discarded it meanwhile.
        if id_ not in keys or not change(id_, note._asdict()):
            raise RefusedError(f"there is no dead letter {id_}")
        facts = {"dead_letter": id_, **keys[id_]._asdict()}
        _log.info(_SENTENCES[event], extra={"event": event, **facts, **note._asdict()})

    with audited(ledger, action, note, about([*keys.values()]), len(numbers)) as tally:
        done, missing = change_each(numbers, change_one, tally, on_each)
    return LettersChanged(done, [id_ for id_, _ in missing], *note, tally.audit_error)


def letter_as_dict(
    letter: DeadLetter, *, is_whole: bool = False, masked: bool = True
) -> dict[str, Any]:
    """A dead letter as JSON; where it `is_whole`, with its headers, body and error. Times are
    seconds since 1970. What looks like a password is `masked`.
    """
    message = letter.message
    fields = {
        "id": letter.id,
        "consumer": letter.key.consumer,
        "message_id": letter.key.message_id or message.id,
        "type": message.type,
        "source": message.source,
        "time": None if message.time is None else message.time.timestamp(),
        "key": message.key,
        "content_type": message.content_type,
        "attempts": letter.attempts,
        "first_seen": letter.first_seen,
        "last_seen": letter.last_seen,
        "reason": letter.reason,
    }
    if is_whole:
        fields |= {
            "headers": dict(message.headers),
            **body_fields(message.body),
            "error": letter.error,
        }
    return masked_fields(fields) if masked else fields


def body_fields(body: bytes) -> dict[str, str | None]:
    """A body as JSON has it: as text, or where it is none, as base64."""
    try:
        return {"body": body.decode(), "body_base64": None}
    except UnicodeDecodeError:
        return {"body": None, "body_base64": b64encode(body).decode()}


def masked_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """The same, with what looks like a password masked, but for what names the message."""
    found = {
        name: mask_passwords(value) if isinstance(value, str) and name not in NAMES else value
        for name, value in fields.items()
    }
    if "headers" in fields:
        found["headers"] = {
            name: "***" if is_secret(name) else mask_passwords(text)
            for name, text in fields["headers"].items()
        }
    return found
