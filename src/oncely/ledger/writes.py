"""Commands as callers give them, and answers as callers get them."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

from oncely.core.commands import (
    Command,
    Extend,
    Granted,
    Handled,
    Held,
    Outcome,
    Refused,
    Release,
    WriteOutcome,
    Written,
)
from oncely.core.durations import Duration, lease_seconds
from oncely.core.errors import FencedError, MessageError, RefusedError
from oncely.core.message import Message, check_message
from oncely.core.record import Claim, Key, Record, State
from oncely.core.waiting import WaitingMessage


class Write(NamedTuple):
    """A command of a claim's holder, and the messages that are kept or removed in its commit."""

    command: Held
    kept: Sequence[WaitingMessage] = ()
    is_over: bool = False
    """Whether the waiting retry of the message is removed."""
    removed: Sequence[WaitingMessage] = ()
    """Messages to remove from queues of the same database, as far as they are still held."""

    @property
    def has_rows(self) -> bool:
        """Whether anything is kept or removed."""
        return bool(self.kept or self.is_over or self.removed)


def to_extend(claims: Sequence[Claim], lease: Duration) -> Sequence[Command]:
    """The commands that renew these leases. Raises ConfigError for what is not one."""
    lease_s = lease_seconds(lease)
    return [Extend(claim, lease_s) for claim in claims]


def to_give_back(outcome: Outcome) -> Command | None:
    """The command that gives back a claim whose asker has gone; None where there is no claim."""
    if isinstance(outcome, Granted | Handled):
        return Release(outcome.claim)
    return None


def json_value(value: Any) -> Any:
    """`value` as it will be read back. Raises MessageError where it is not JSON."""
    if value is None:
        return None
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise MessageError(f"this cannot be kept as JSON: {error}") from error


def sent_message(content: Any, message_id: str, key: str | None = None) -> Message:
    """The message to send: `content` itself where it is a Message, else one with it as the body.
    Raises MessageError where that is unusable.
    """
    if isinstance(content, Message):
        return check_message(content if key is None else replace(content, key=key))
    return check_message(Message(message_id, _body(content), key=key))


def _body(content: Any) -> bytes:
    if isinstance(content, bytes):
        return content
    text = content if isinstance(content, str) else json.dumps(json_value(content))
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise MessageError("body with a lone surrogate") from error


def raise_if_fenced(outcome: WriteOutcome) -> Written:
    """The outcome of a write that was stored. Raises FencedError where it was not."""
    if isinstance(outcome, Written):
        return outcome
    newest = "gone" if outcome.record is None else f"at fence {outcome.record.fence}"
    raise FencedError(f"the claim is not the newest: its record is {newest}")


def raise_if_refused(key: Key, outcome: Outcome, refusal: str) -> Record | None:
    """The record as it was written. Raises RefusedError, whose text ends with `refusal`."""
    if isinstance(outcome, Refused):
        state = "not in the ledger" if outcome.record is None else outcome.record.state.word
        raise RefusedError(f"{key.message_id!r} ({key.consumer}) is {state}: {refusal}")
    return cast(Written, outcome).record


def renewed(claim: Claim, outcome: WriteOutcome, state: State | None = None) -> Claim:
    """The claim as it is now; `state` is what a write makes of its record, if it changes that.
    Raises FencedError where nothing was written.
    """
    written = raise_if_fenced(outcome)
    if written.version is None:
        return claim
    if written.record is not None:
        # It was there before. Of a record that is handled by now, nothing else may be believed: a
        # heartbeat that asks once more would give it a lease.
        state = written.record.state
    return claim._replace(version=written.version, state=state or claim.state)
