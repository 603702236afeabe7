"""Turn: one message on its way through the lifecycle, whoever drives it."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple

from oncely.core.commands import Command, Outcome
from oncely.core.message import Message
from oncely.core.policy import Finding
from oncely.core.record import Key
from oncely.core.verdicts import Counted, Ending, Phase
from oncely.core.waiting import QueuedRow, WaitingMessage
from oncely.lifecycle.held_message import HeldMessage, Untracked
from oncely.lifecycle.results import JSON, Serializer


class Kept(NamedTuple):
    """What a duplicate gets: its handler does not run."""

    result: Any
    """As JSON."""
    may_send: bool = False
    """Whether an earlier run may have left messages to be sent."""


Begun = HeldMessage | Untracked | Kept


@dataclass(slots=True)
class Asked:
    """A message to handle, and what the ledger keeps of it."""

    message_id: str | None
    fingerprint: str | None = None
    """Compared with that of a later delivery under the same id, where both have one."""
    message: Message | None = None
    """As the handler is given it; None where that is not known."""
    metadata: Mapping[str, Any] | None = None
    """Kept with the record, where this creates it."""


class Turn:
    """What is known of a message so far. Until a value is known, the class has its default."""

    key: Key | None = None
    """The key of its record; None where it runs untracked."""
    token: int | None = None
    """The token to ask with, where another process may have to ask in place of this one."""
    command: Command | None = None
    """What the ledger is asked about it: the same in every repetition."""
    outcome: Outcome | None = None
    """What the ledger has answered."""
    begun: Begun | None = None
    """The processing under which the handler runs; or what a duplicate gets."""
    refusal: Exception | None = None
    """Why the handler does not run; or why its end is not stored."""
    phase: Phase = Phase.WAITING
    result: Any = None
    """What is kept of its handler's result, as JSON."""
    serializer: Serializer = JSON
    """What keeps it."""
    error: BaseException | None = None
    """What the handler raised; or what a middleware raised, where the handler did not run."""
    finding: Finding | None = None
    """What a probe has found out about it."""
    ending: Ending | None = None
    """What follows, once the turn has ended."""
    taken: WaitingMessage | None = None
    """The retry that was taken from the ledger, where it was one."""
    queued: QueuedRow | None = None
    """The row that was taken from a queue in a store, where it was one."""
    deliveries: int = 1
    """How often the message was delivered: the attempts of one that is not tracked."""

    def __init__(self, asked: Asked) -> None:
        self.asked = asked

    @property
    def sent_at(self) -> float | None:
        """When the message was sent, in seconds since 1970; None where that is not known."""
        message = self.asked.message
        return None if message is None else seconds_since_1970(message.time)

    def probed(self) -> Message | None:
        """The message to give to a probe, where it is known."""
        return self.asked.message

    @property
    def is_asking(self) -> bool:
        """Whether the ledger has yet to answer."""
        return self.command is not None and self.begun is None and self.refusal is None

    @property
    def held(self) -> HeldMessage | None:
        """The message with its claim, where one was granted."""
        begun = self.begun
        return begun if isinstance(begun, HeldMessage) else None

    @property
    def may_have_sent(self) -> bool:
        """Whether its handler, in this run or an earlier one, may have left messages to be sent."""
        if isinstance(self.begun, Kept):
            return self.begun.may_send
        is_handled = self.ending is not None and self.ending.counted is Counted.HANDLED
        return is_handled and self.held is not None and bool(self.held.end())

    def start_over(self) -> None:
        """Forget what has happened in a transaction that was rolled back."""
        self.begun = self.refusal = self.result = self.error = self.ending = None
        # A new token: a claim that is stored after all must not be granted once more.
        self.command = self.outcome = self.finding = self.token = None
        self.phase = Phase.WAITING


def seconds_since_1970(time: datetime | None) -> float | None:
    """When a message was sent, where that is known."""
    if time is None:
        return None
    # Without a time zone it is what most producers write: UTC.
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
