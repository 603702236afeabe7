"""The Transport protocol: all that a broker has to do for consumers and relays."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from oncely.core.errors import MessageError
from oncely.core.message import Message, check_message
from oncely.core.verdicts import Verdict

Clock = Callable[[], float]
"""Seconds, from any moment on."""


@dataclass(slots=True, eq=False)
class Delivery:
    """One arrival of a message. It is held, for nobody else, until it is settled."""

    message: Message
    queue: str
    count: int
    """How often the broker has delivered the message, this time included; always 1 where
    `Features.counts_deliveries` is False."""
    tag: Any
    """By which the transport knows it again."""


@dataclass(frozen=True, slots=True)
class DeadLettered:
    """A message that was set aside."""

    message: Message
    queue: str
    """Where it was received, and goes back to when it is tried again."""
    reason: str
    count: int
    """As in Delivery, of the last one."""
    tag: Any


class Features(NamedTuple):
    """What a transport can do: the conformance suite tests what is declared here."""

    delays: bool
    """Delay is kept to; where it is not, such a delivery comes again at once."""
    ordered: bool
    """One receiver is given messages in the order in which they were published, but for those
    that come again."""
    counts_deliveries: bool
    max_bytes: int | None
    """A message with a longer body is refused; None: no such limit is known."""
    visibility_s: float | None
    """What is not settled for so long is delivered again; None: it is when its receiver's
    connection is lost."""


class Limits(NamedTuple):
    """What the URL of a transport may set."""

    visibility_s: float = 60.0
    max_bytes: int = 1 << 20


class Transport(Protocol):
    """A connection to a broker. Holds no rule of processing: it brings and takes messages.

    A message comes out as it was put in, each time, but for its claim, which does not travel.
    Every method raises TransportError when the broker cannot be reached or fails. All are safe
    to call from many threads.
    """

    features: Features

    def receive(self, queue: str, max_messages: int, wait_s: float) -> Sequence[Delivery]:
        """What is waiting, at most `max_messages`; waits at most `wait_s` for the first.

        Of any number of receivers only one is given a message, until that delivery is settled or
        `Features.visibility_s` is over. Returns nothing as soon as the transport is closed.
        """

    def settle(self, verdicts: Sequence[tuple[Delivery, Verdict]]) -> None:
        """Do to each delivery of this transport as its verdict says.

        What comes too late is dropped, and logged: the delivery was settled before, or the
        message may have gone to another receiver since, because its time was over or the
        connection lost. After TransportError nobody knows which are settled; to settle all again
        does no harm.
        """

    def publish(self, queue: str, messages: Sequence[Message]) -> None:
        """Put messages into a queue; returns when every one is stored durably.

        Raises PublishRefused where the broker does not take some of them; all others are stored
        then. After TransportError of any other kind nobody knows which are stored: to publish
        all again loses none.
        """

    def subscribe(self, queue: str, types: Sequence[str]) -> None:
        """Let the queue be there, and be given messages of these types, where the broker routes
        messages by their types; elsewhere they are published to a queue by its name, and nothing
        is done. Types are topics: `*` stands for a word between dots, `#` for any number.
        """

    def is_drained(self, queue: str) -> bool:
        """Whether nothing is waiting, delayed, or received and not settled.

        What other transports have received counts where the broker tells.
        """

    def dead_letters(self, queue: str, limit: int = 100) -> Sequence[DeadLettered]:
        """What was set aside out of this queue, in that order, and is still there."""

    def retry(self, letters: Sequence[DeadLettered]) -> int:
        """Put dead letters back into their queues, as messages never delivered; return how many
        were still there.
        """

    def close(self) -> None:
        """Give back what is received and not settled, and the connection; a later call opens it
        again.
        """


def refusals(messages: Sequence[Message], max_bytes: int) -> Mapping[int, str]:
    """Which messages are not to be published, by their place among all, and why."""
    reasons = ((place, _refusal(message, max_bytes)) for place, message in enumerate(messages))
    return {place: reason for place, reason in reasons if reason is not None}


def _refusal(message: Message, max_bytes: int) -> str | None:
    # A wrong type would come to light at the consumer. Whether an id may be missing is for the
    # consumer's policy to say.
    try:
        check_message(message, needs_id=False)
    except MessageError as error:
        return str(error)
    if len(message.body) > max_bytes:
        return f"body of {len(message.body)} bytes is over the limit of {max_bytes}"
    return None
