"""Messages that wait in a ledger: to be tried again, to be sent, and in its queues."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, Unpack

from oncely._util.event_log import EventLog
from oncely.core.errors import mask_passwords
from oncely.core.record import Key
from oncely.core.waiting import OUTBOX, WaitingMessage, consumer_of, queue_named, retries_of
from oncely.ledger.ledger import Ledger
from oncely.ops.auditing import AuditCounts, Changed, Note, Noted, Refusal, about, audited
from oncely.ops.decisions import change_keys
from oncely.ops.groups import MOST_GROUPED, FoundGroups, groups_of
from oncely.ops.known import check_known_at_all, check_waits, first
from oncely.ops.letters import body_fields, masked_fields
from oncely.ops.next_steps import relay_step

_log = EventLog(__name__)

_SENTENCES = {
    "unsent_retried": "%(by)s retries a message for '%(destination)s', of '%(message_id)s'",
    "unsent_discarded": "%(by)s has discarded a message for '%(destination)s', of '%(message_id)s'",
}

_GONE = "it is not refused, or not there any more"
MOST_UNSENT = 10_000
"""So many waiting messages, and so many refused ones, are looked at."""


class FoundMessages(NamedTuple):
    """Messages that wait, in the order in which they came."""

    messages: Sequence[WaitingMessage]
    more: bool
    """Whether there are others, left out because of the limit."""


@dataclass(frozen=True, slots=True)
class Unsent:
    """The unsent messages of one destination."""

    destination: str
    waiting: int
    refused: int
    """Set aside, for people: a relay does not send them."""
    reason: str | None
    """Why the last of them was refused."""
    oldest: float | None
    """Since when the oldest of all waits, in seconds since 1970."""


class FoundUnsent(NamedTuple):
    """The unsent messages, by destination."""

    destinations: Sequence[Unsent]
    more: bool
    """Whether there are others, which are in no count because of the limit."""


def unsent(ledger: Ledger, most: int = MOST_UNSENT) -> FoundUnsent:
    """What waits to be sent and what was refused, for each destination: of at most `most` each.
    Raises ConfigError where the store keeps no messages.
    """
    found = [
        _listed(ledger, OUTBOX, most, is_refused=is_refused, with_bodies=False)
        for is_refused in (False, True)
    ]
    groups: dict[str, list[WaitingMessage]] = {}
    for message in chain.from_iterable(each.messages for each in found):
        groups.setdefault(message.destination, []).append(message)
    destinations = []
    for name, messages in sorted(groups.items()):
        refused = [each for each in messages if each.is_set_aside]
        since = (each.since for each in messages if each.since is not None)
        reason = mask_passwords(refused[-1].reason or "unknown") if refused else None
        waiting, oldest = len(messages) - len(refused), min(since, default=None)
        destinations.append(Unsent(name, waiting, len(refused), reason, oldest))
    return FoundUnsent(destinations, any(each.more for each in found))


def unsent_messages(
    ledger: Ledger,
    destination: str | None = None,
    limit: int = 100,
    *,
    is_refused: bool = False,
    with_bodies: bool = True,
) -> FoundMessages:
    """At most `limit` messages that wait to be sent, or that were refused; of one destination, for
    which all of these are read, or of all. Without bodies each has an empty one.
    """
    return _listed(
        ledger, OUTBOX, limit, destination, is_refused=is_refused, with_bodies=with_bodies
    )


def refused_numbered(ledger: Ledger, ids: Sequence[int]) -> Sequence[WaitingMessage]:
    """The messages of these numbers that were refused, in their order."""
    check_waits(ledger)
    found = {each.number: each for each in ledger.mailbox.unsent(ids) if each.is_set_aside}
    return [found[id_] for id_ in ids if id_ in found]


def queued(ledger: Ledger, queue: str, limit: int = 100) -> FoundMessages:
    """At most `limit` messages that wait in the queue of that name in the ledger."""
    return _listed(ledger, queue_named(queue), limit)


def _listed(
    ledger: Ledger,
    queue: str,
    limit: int,
    destination: str | None = None,
    *,
    is_refused: bool = False,
    with_bodies: bool = True,
) -> FoundMessages:
    check_waits(ledger)
    most = limit + 1 if destination is None else sys.maxsize
    listed = ledger.mailbox.listed(queue, most, is_set_aside=is_refused, with_bodies=with_bodies)
    fitting = (each for each in listed if destination in (None, each.destination))
    return FoundMessages(*first(fitting, limit))


def retry_unsent(ledger: Ledger, ids: Sequence[int], *, by: str, why: str = "") -> Changed[int]:
    """Let those that were refused be sent after all, their attempts from zero. Who did it and why
    is logged, and in the audit. What is not refused, or not there any more, is missing.
    """
    retry = ledger.mailbox.send_again_numbered
    return _change(ledger, ids, "unsent_retried", Note.of(by, why), retry, relay_step(ledger))


def retry_every_unsent(ledger: Ledger, *, by: str, why: str = "") -> AuditCounts:
    """As `retry_unsent`, all that were refused; one entry in the audit counts them."""
    if not ledger.mailbox.backlog().set_aside:
        return AuditCounts()
    note = Note.of(by, why)
    with audited(ledger, "unsent_retried", note, Key("", "")) as tally:
        tally.changed = ledger.mailbox.send_again()
        _log.info(
            "%(by)s retries all %(count)s refused messages",
            extra={"event": "all_unsent_retried", "count": tally.changed, **note._asdict()},
        )
    return tally


def discard_unsent(ledger: Ledger, ids: Sequence[int], *, by: str, why: str = "") -> Changed[int]:
    """Remove those that were refused, which are never sent then; a message of which they were the
    last is completed. Noted as by `retry_unsent`.
    """
    discard = ledger.mailbox.discard_unsent
    return _change(ledger, ids, "unsent_discarded", Note.of(by, why), discard, "it is never sent")


def _change(
    ledger: Ledger,
    ids: Sequence[int],
    event: str,
    note: Note,
    change: Callable[[Sequence[int]], Sequence[WaitingMessage]],
    next_step: str,
) -> Changed[int]:
    check_waits(ledger)
    numbers = list(dict.fromkeys(ids))
    keys = [each.parent for each in ledger.mailbox.unsent(numbers) if each.is_set_aside]
    if not keys:
        return Changed([], [Refusal(number, _GONE) for number in numbers], *note)
    with audited(ledger, event, note, about(keys), len(numbers)) as tally:
        changed = change(numbers)
        for each in changed:
            facts = {**each.parent._asdict(), "destination": each.destination}
            _log.info(_SENTENCES[event], extra={"event": event, **facts, **note._asdict()})
        tally.changed, tally.refused = len(changed), len(numbers) - len(changed)
    changed_numbers = {each.number for each in changed}
    done = [number for number in numbers if number in changed_numbers]
    missing = [Refusal(number, _GONE) for number in numbers if number not in changed_numbers]
    return Changed(done, missing, *note, tally.audit_error, dict.fromkeys(done, next_step))


def unsent_as_dict(message: WaitingMessage) -> dict[str, Any]:
    """A message that is to be sent, or waits in a queue, as JSON has it. Passwords are masked."""
    return {
        "id": message.number,
        "destination": message.destination or None,
        "consumer": message.parent.consumer or None,
        "message_id": message.parent.message_id or None,
        "own_id": message.id,
        "type": message.message.type,
        "attempts": message.attempts,
        "since": message.since,
        "due": message.due,
        "is_refused": message.is_set_aside,
        "reason": None if message.reason is None else mask_passwords(message.reason),
        "error": None if message.error is None else mask_passwords(message.error),
    }


# ---- To be tried again --------------------------------------------------------------------------


def waiting(
    ledger: Ledger, consumer: str | None = None, limit: int = 100, *, with_bodies: bool = True
) -> FoundMessages:
    """At most `limit` messages that wait to be tried again; without bodies each has an empty one.
    Raises as `dead_letters` does.
    """
    queue = retries_of("*" if consumer is None else consumer)
    found = _listed(ledger, queue, limit, with_bodies=with_bodies)
    if not found.messages and consumer is not None:
        check_known_at_all(ledger, consumer, "waiting messages")
    return found


def waiting_groups(
    ledger: Ledger, consumer: str | None = None, most: int = MOST_GROUPED
) -> FoundGroups[Key]:
    """The first `most` that wait to be tried again, grouped by consumer and error; their times are
    those at which they are due. Raises as `waiting` does.
    """
    found = waiting(ledger, consumer, most + 1, with_bodies=False).messages
    return groups_of(
        ((each.key, each.key.consumer, each.error or "", each.due or 0.0) for each in found), most
    )


def waiting_keys(ledger: Ledger, message_id: str, consumer: str | None = None) -> Sequence[Key]:
    """The keys of the messages of that id that wait for a retry, of `consumer` or of all."""
    names = {consumer_of(queue) for queue in ledger.mailbox.backlogs()} - {None}
    keys = [Key(name, message_id) for name in sorted(filter(None, names))]
    return [
        key
        for key, message in ledger.mailbox.retries(keys).items()
        if consumer in (None, key.consumer) and not message.is_set_aside
    ]


def discard_waiting(ledger: Ledger, keys: Sequence[Key], **noted: Unpack[Noted]) -> Changed[Key]:
    """End each of these waiting retries: its message becomes a dead letter with the reason
    "discarded by NAME". Who did it and why is logged, and in the audit. One that a worker has in
    hand, or that does not wait, is refused.
    """
    check_waits(ledger)
    return change_keys(
        ledger, keys, "discarded", lambda key, note: ledger.discard(key, **note), **noted
    )


def waiting_as_dict(
    message: WaitingMessage, now: float, *, is_whole: bool = False
) -> dict[str, Any]:
    """A message that waits for its retry, as JSON; with headers and body, passwords masked, if it
    is to be whole. `due_in_s` is negative where it is overdue at `now`.
    """
    due = now if message.due is None else message.due
    fields = {
        "consumer": message.key.consumer,
        "message_id": message.key.message_id,
        "type": message.message.type,
        "attempts": message.attempts,
        "since": message.since,
        "due": due,
        "due_in_s": due - now,
        "error": message.error,
    }
    if is_whole:
        content = message.message
        fields |= masked_fields({"headers": dict(content.headers), **body_fields(content.body)})
    return fields
