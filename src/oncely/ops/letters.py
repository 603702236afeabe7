"""Messages that wait in a ledger: dead letters, for people, and what is tried again by itself."""

import logging
import sys
from base64 import b64encode
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from oncely.core.errors import ConfigError, MessageError, RefusedError, describe, mask_passwords
from oncely.core.ids import MAX_ID_LENGTH
from oncely.core.message import Message
from oncely.core.waiting import DeadLetter, WaitingMessage
from oncely.ledger import Ledger
from oncely.ops.known import check_known_at_all

_log = logging.getLogger(__name__)

_NOWHERE = (
    "the ledger is in a store without transactions, where no messages wait: the broker has the "
    "dead letters, in the queue NAME.dead beside each queue NAME"
)


# ---- Looking -----------------------------------------------------------------------------------


class FoundLetters(NamedTuple):
    """Dead letters, in the order that was asked for."""

    letters: Sequence[DeadLetter]
    more: bool
    """Whether there are others, left out because of the limit."""


class FoundWaiting(NamedTuple):
    """Messages that wait to be tried again, in the order in which they came."""

    messages: Sequence[WaitingMessage]
    more: bool
    """Whether there are others, left out because of the limit."""


def dead_letters(
    ledger: Ledger, consumer: str | None = None, limit: int = 100, *, newest: bool = False
) -> FoundLetters:
    """At most `limit` dead letters, in the order in which they came; or the `newest`, those first,
    for which all are read. Raises ConfigError for a consumer that the ledger does not know, and
    where the broker has them.
    """
    if newest:
        found = [*deque(every_dead_letter(ledger, consumer), limit + 1)][::-1]
    else:
        found = [*islice(every_dead_letter(ledger, consumer), limit + 1)]
    return FoundLetters(found[:limit], len(found) > limit)


def every_dead_letter(ledger: Ledger, consumer: str | None = None) -> Iterator[DeadLetter]:
    """All, in the order in which they came, read page by page. Raises as `dead_letters` does."""
    _check_waits(ledger)
    is_none = True
    for letter in ledger.dead(consumer, sys.maxsize):
        is_none = False
        yield letter
    if is_none and consumer is not None:
        check_known_at_all(ledger, consumer, "dead letters")


def letter(ledger: Ledger, id_: int) -> DeadLetter:
    """The dead letter of that number. Raises RefusedError where there is none."""
    _check_waits(ledger)
    found = ledger.mailbox.dead_numbered([id_])
    if not found:
        raise RefusedError(f"there is no dead letter {id_}")
    return found[0]


def waiting(ledger: Ledger, consumer: str | None = None, limit: int = 100) -> FoundWaiting:
    """At most `limit` messages that wait to be tried again. Raises as `dead_letters` does."""
    _check_waits(ledger)
    found = [*ledger.waiting(consumer, limit + 1)]
    if not found and consumer is not None:
        check_known_at_all(ledger, consumer, "waiting messages")
    return FoundWaiting(found[:limit], len(found) > limit)


def _check_waits(ledger: Ledger) -> None:
    if not ledger.can_defer:
        raise ConfigError(_NOWHERE)


# ---- Changing ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LettersChanged:
    """What became of the dead letters that were named by their numbers."""

    done: Sequence[int]
    missing: Sequence[int]
    """Those that were not there, or not any more."""
    by: str
    why: str
    """Who and why, as they were noted: cut, and with passwords masked."""


def retry_letters(
    ledger: Ledger,
    ids: Sequence[int],
    *,
    message: Message | None = None,
    by: str,
    why: str = "",
    on_each: Callable[[int], None] = lambda _: None,
) -> LettersChanged:
    """Let each be handled again, at once, its attempts from zero; who did it, when and why is kept
    with its record, and logged. `message` replaces the content of a single one.

    `on_each` is told how many have had their turn. Raises ConfigError for a message that cannot
    be one, or has another id.
    """

    def retry(id_: int, **note: str) -> int:
        try:
            return ledger.retry_dead(id_, message, **note)
        except MessageError as error:
            raise ConfigError(f"dead letter {id_}: {error}") from error

    return _change(ledger, ids, "dead_letter_retried", (by, why), retry, on_each)


def discard_letters(
    ledger: Ledger,
    ids: Sequence[int],
    *,
    by: str,
    why: str = "",
    on_each: Callable[[int], None] = lambda _: None,
) -> LettersChanged:
    """Remove each; who did it and why is logged. Their records stay.

    `on_each` is told how many have had their turn.
    """

    def discard(id_: int, **_: str) -> int:
        return ledger.discard_dead(id_)

    return _change(ledger, ids, "dead_letter_discarded", (by, why), discard, on_each)


def _change(
    ledger: Ledger,
    ids: Sequence[int],
    event: str,
    note: tuple[str, str],
    change: Callable[..., int],
    on_each: Callable[[int], None],
) -> LettersChanged:
    _check_waits(ledger)
    by, why = describe(note[0], MAX_ID_LENGTH), describe(note[1])
    done: list[int] = []
    missing: list[int] = []
    for turn, id_ in enumerate(dict.fromkeys(ids), start=1):
        found = ledger.mailbox.dead_numbered([id_])
        # Somebody else may come in between.
        if found and change(id_, by=by, why=why):
            done.append(id_)
            key = found[0].key._asdict()
            _log.info(event, extra={"dead_letter": id_, **key, "by": by, "why": why})
        else:
            missing.append(id_)
        on_each(turn)
    return LettersChanged(done, missing, by, why)


# ---- As JSON -----------------------------------------------------------------------------------


def letter_as_dict(
    letter: DeadLetter, *, is_whole: bool = False, masked: bool = True
) -> dict[str, Any]:
    """A dead letter as JSON has it; with its headers, body and error where it is to be whole. Times
    are seconds since 1970. What looks like a password is `masked`.
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
        fields |= {"headers": dict(message.headers), **_body(message.body), "error": letter.error}
    return _masked(fields) if masked else fields


def waiting_as_dict(message: WaitingMessage, now: float) -> dict[str, Any]:
    """A message that waits to be tried again, as JSON has it; `due_in_s` is below zero where it is
    overdue at `now`.
    """
    due = now if message.due is None else message.due
    return {
        "consumer": message.key.consumer,
        "message_id": message.key.message_id,
        "type": message.message.type,
        "attempts": message.attempts,
        "since": message.since,
        "due": due,
        "due_in_s": due - now,
        "error": message.error,
    }


def _body(body: bytes) -> dict[str, str | None]:
    try:
        return {"body": body.decode(), "body_base64": None}
    except UnicodeDecodeError:
        return {"body": None, "body_base64": b64encode(body).decode()}


def _masked(fields: dict[str, Any]) -> dict[str, Any]:
    found = {
        name: mask_passwords(value) if isinstance(value, str) and name != "body_base64" else value
        for name, value in fields.items()
    }
    if "headers" in fields:
        found["headers"] = {name: _header(name, text) for name, text in fields["headers"].items()}
    return found


def _header(name: str, text: str) -> str:
    # With its name, which says what it is.
    return mask_passwords(f"{name}={text}").removeprefix(f"{name}=")
