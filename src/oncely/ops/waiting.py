"""Messages that have failed and wait to be tried again by themselves."""

from collections.abc import Sequence
from typing import Any, Unpack

from oncely.core.errors import ConfigError, RefusedError
from oncely.core.record import Key
from oncely.core.waiting import WaitingMessage, consumer_of, retries_of
from oncely.ledger.ledger import Ledger
from oncely.ops.auditing import Noted
from oncely.ops.decisions import Changed, change_keys
from oncely.ops.found import FoundMessages, first
from oncely.ops.known import check_known_at_all, check_waits
from oncely.ops.letters import body_fields, masked_fields


def waiting(
    ledger: Ledger, consumer: str | None = None, limit: int = 100, *, with_bodies: bool = True
) -> FoundMessages:
    """At most `limit` messages that wait to be tried again; without bodies each has an empty one.
    Raises as `dead_letters` does.
    """
    check_waits(ledger)
    queue = retries_of("*" if consumer is None else consumer)
    listed = ledger.mailbox.listed(queue, limit + 1, with_bodies=with_bodies)
    found = FoundMessages(*first(listed, limit))
    if not found.messages and consumer is not None:
        check_known_at_all(ledger, consumer, "waiting messages")
    return found


def waiting_key(ledger: Ledger, message_id: str, consumer: str | None = None) -> Key:
    """The key of the one message of that id that waits for a retry. Raises RefusedError where
    there is none, ConfigError where several consumers have one.
    """
    check_waits(ledger)
    names = {consumer_of(queue) for queue in ledger.mailbox.backlogs()} - {None}
    keys = [Key(name, message_id) for name in sorted(filter(None, names))]
    found = [
        key
        for key, message in ledger.mailbox.retries(keys).items()
        if consumer in (None, key.consumer) and not message.is_set_aside
    ]
    if not found:
        of = "" if consumer is None else f" ({consumer})"
        raise RefusedError(f"{message_id!r}{of} does not wait for a retry")
    if len(found) > 1:
        whose = ", ".join(key.consumer for key in found)
        raise ConfigError(f"{message_id!r} waits for {whose}; name one with --consumer")
    return found[0]


def run_now(ledger: Ledger, keys: Sequence[Key], **noted: Unpack[Noted]) -> Changed:
    """Make each of these waiting retries due at once; its attempts stay counted. Who did it
    and why is logged, and in the audit. One that a worker has in hand, or that does not wait, is
    refused.
    """
    check_waits(ledger)
    return change_keys(ledger, keys, "run_now", lambda key, _: ledger.run_now(key), **noted)


def cancel(ledger: Ledger, keys: Sequence[Key], **noted: Unpack[Noted]) -> Changed:
    """End each of these waiting retries: its message becomes a dead letter with the
    reason "cancelled by NAME". Noted, and refused, as by `run_now`.
    """
    check_waits(ledger)
    return change_keys(
        ledger, keys, "cancelled", lambda key, note: ledger.cancel(key, **note), **noted
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
