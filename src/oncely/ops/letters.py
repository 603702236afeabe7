"""Dead letters: looked at, changed, and those that failed alike as one group."""

import sys
from base64 import b64encode
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice
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
from oncely.core.errors_by_kind import kind_of
from oncely.core.message import Message
from oncely.core.waiting import DeadLetter
from oncely.ledger.ledger import Ledger
from oncely.ops.auditing import Changed, Noted, change_each
from oncely.ops.groups import MOST_GROUPED, FoundGroups, group_id, groups_of, no_group
from oncely.ops.known import check_known_at_all, check_waits, first
from oncely.ops.next_steps import next_steps

_log = EventLog(__name__)

_LETTER = "dead letter %(dead_letter)s: message '%(message_id)s' of '%(consumer)s'"
_SENTENCES = {
    "dead_letter_retried": f"%(by)s retries {_LETTER}",
    "dead_letter_discarded": f"%(by)s has discarded {_LETTER}",
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


def retry_letters(
    ledger: Ledger, ids: Sequence[int], *, message: Message | None = None, **noted: Unpack[Noted]
) -> Changed[int]:
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


def discard_letters(ledger: Ledger, ids: Sequence[int], **noted: Unpack[Noted]) -> Changed[int]:
    """Remove each; who did it and why is logged, and in the audit. Their records stay."""
    action = LETTERS_DISCARDED
    return _change(ledger, ids, action, action, lambda id_, _: ledger.discard_dead(id_), **noted)


def _change(
    ledger: Ledger,
    ids: Sequence[int],
    action: str,
    event: str,
    change: Callable[[int, Mapping[str, str]], int],
    **noted: Unpack[Noted],
) -> Changed[int]:
    numbers = list(dict.fromkeys(ids))
    # Whose they are, of those that exist.
    keys = {letter.id: letter.key for letter in letters_numbered(ledger, numbers)}

    def change_one(id_: int, note: Mapping[str, str]) -> None:
        # Somebody else may have retried or discarded it meanwhile.
        if id_ not in keys or not change(id_, note):
            raise RefusedError(f"there is no dead letter {id_}")
        facts = {"dead_letter": id_, **keys[id_]._asdict()}
        _log.info(_SENTENCES[event], extra={"event": event, **facts, **note})

    changed = change_each(ledger, action, numbers, [*keys.values()], change_one, **noted)
    steps = next_steps(ledger, {keys[id_] for id_ in changed.done})
    told = {id_: steps[keys[id_]] for id_ in changed.done if keys[id_] in steps}
    return replace(changed, next_steps=told)


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


# ---- Groups --------------------------------------------------------------------------------------


def letter_groups(
    ledger: Ledger, consumer: str | None = None, most: int = MOST_GROUPED
) -> FoundGroups[int]:
    """The first `most` dead letters, grouped by consumer and error. Raises ConfigError as
    `dead_letters` does.
    """
    letters = every_dead_letter(ledger, consumer, with_bodies=False)
    return groups_of(
        ((each.id, each.key.consumer, each.reason, each.last_seen) for each in letters), most
    )


def letter_group(
    ledger: Ledger, id_: str, consumer: str | None = None, most: int = MOST_GROUPED
) -> FoundGroups[int]:
    """The one group of that id, among the first `most` dead letters. Raises RefusedError where
    there is none: all of it may have been retried.
    """
    return letter_groups(ledger, consumer, most).only(id_)


def letters_to_export(
    ledger: Ledger, consumer: str | None, group: str | None
) -> Iterator[DeadLetter]:
    """All dead letters, or those of a group, in the order in which they came, read page by page.
    Raises as `dead_letters` and `letter_group` do, at once: the first is read before a file is
    replaced, or a request answered.
    """
    letters = every_dead_letter(ledger, consumer)
    if group is not None:
        letters = _of_group(letters, group)
    return chain([*islice(letters, 1)], letters)


def _of_group(letters: Iterator[DeadLetter], id_: str) -> Iterator[DeadLetter]:
    is_none = True
    for letter in letters:
        if group_id(letter.key.consumer, kind_of(letter.reason)) == id_:
            is_none = False
            yield letter
    if is_none:
        raise no_group(id_)
