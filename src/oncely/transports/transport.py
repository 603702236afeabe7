"""The Transport protocol: what consumers and relays need of a broker."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

from oncely._util.event_log import EventLog
from oncely.core.destination import Destination, EventsOf
from oncely.core.errors import MessageError
from oncely.core.message import Message, check_message
from oncely.core.verdicts import Acknowledgement, Reject

_log = EventLog(__name__)

T = TypeVar("T")

OURS = "x-oncely-"
"""The prefix of oncely's own headers at brokers, which are not part of a message."""
Clock = Callable[[], float]
"""A monotonic clock, in seconds."""


@dataclass(slots=True, eq=False)
class Delivery:
    """One arrival of a message. No other receiver is given the message until it is acknowledged."""

    message: Message
    queue: str
    count: int
    """How often the broker has delivered the message, this time included; always 1 if
    `Features.counts_deliveries` is False."""
    tag: Any
    """The transport's own identity of the delivery."""
    problem: str | None = None
    """Why the message cannot be handled: its body is too large, or its id cannot be read. `message`
    holds as much of it as could be read."""
    is_again: bool = False
    """Whether the message was delivered before, or may have been, as far as the broker tells; it
    may tell that also where it counts nothing."""


class Features(NamedTuple):
    """What a transport can do: the conformance suite tests what is declared here."""

    ordered: bool
    """One receiver gets messages in the order in which they were published, except for
    redeliveries."""
    counts_deliveries: bool
    max_bytes: int | None
    """A message with a longer body is refused, or has a `problem`; None if no limit is known."""
    visibility_s: float | None
    """A delivery that is not acknowledged for so long is redelivered; None: only when its
    receiver's connection is lost."""
    topics: bool = False
    """Queues are topics, and so are types of events: names are letters, digits, `.`, `_` and `-`,
    and only events of types that were subscribed to by name can be published."""


class Limits(NamedTuple):
    """The limits that the URL of a transport may set."""

    visibility_s: float = 60.0
    max_bytes: int = 1 << 20


class Transport(Protocol):
    """A connection to a broker: it receives and publishes messages, and holds no processing rule.

    A message is received as it was published, each time, without its claim. Every method raises
    TransportError if the broker fails or cannot be reached. All methods are thread-safe.
    """

    features: Features

    def receive(self, queue: str, max_messages: int, wait_s: float) -> Sequence[Delivery]:
        """Receive waiting messages, at most `max_messages`; waits at most `wait_s` for the first.

        Of any number of receivers only one gets a message, until the delivery is acknowledged or
        `Features.visibility_s` is over. Returns an empty sequence as soon as the transport is
        closed. A missing queue is created.
        """

    def acknowledge(self, verdicts: Sequence[tuple[Delivery, Acknowledgement]]) -> None:
        """Acknowledge each delivery of this transport by its verdict, also if others fail.

        A verdict that comes too late is dropped, and logged: the delivery was acknowledged
        before, or another receiver may have the message, as its time was over or the connection
        was lost. After TransportError it is not known which are acknowledged; it is safe to
        acknowledge all again.
        Rejected messages go to the queue `NAME.dead`, unless the queue was created with another
        dead-letter exchange.
        """

    def publish(
        self, destination: str, messages: Sequence[Message], *, create: bool = True
    ) -> None:
        """Publish messages; returns when every one is stored durably.

        A destination is the name of a queue, `exchange:NAME/routing.key` if the broker has
        exchanges, or `events:TYPE`: all queues that have subscribed to that type. A message
        without a type gets that type. With `create` a missing queue is created.

        Raises ConfigError for a wrong destination. Raises PublishRefused if some messages are
        refused, for their content or because the destination leads nowhere; all others are stored
        then. After any other TransportError it is not known which are stored: publish all again,
        so that none is lost.
        """

    def subscribe(self, queue: str, types: Sequence[str], *, alone: bool = False) -> None:
        """Create the queue if it is missing, and bind it to the events of these types. Types are
        topics: `*` is one word between dots, `#` any number of words. A receiver that is `alone`
        waits some seconds, if necessary, for the unacknowledged messages of one that is gone.
        """

    def is_drained(self, queue: str) -> bool:
        """Whether no message is waiting, or received and not acknowledged.

        Messages that other transports have received count if the broker reports them.
        """

    def close(self) -> None:
        """Close the connection; unacknowledged messages are redelivered. A later call opens the
        connection again.
        """


@runtime_checkable
class LagReporter(Protocol):
    """A transport whose broker tells how far consumers are behind, which nobody sees otherwise."""

    def lags(self, queue: str) -> Mapping[str, int]:
        """How many messages wait, or are not acknowledged, by the names that people know them by,
        of what the receivers of a queue read. Raises TransportError.
        """


def typed(message: Message, destination: Destination) -> Message:
    """The message as it is published to that destination."""
    if isinstance(destination, EventsOf) and not message.type:
        return replace(message, type=destination.type)
    return message


def dead_of(queue: str) -> str:
    """The queue of rejected messages."""
    return f"{queue}.dead"


def log_rejected(verdicts: Sequence[tuple[Delivery, Acknowledgement]]) -> None:
    """Log rejected deliveries: the reason is stored nowhere else."""
    for delivery, verdict in verdicts:
        if isinstance(verdict, Reject):
            told = {"message_id": delivery.message.id, "queue": delivery.queue}
            _log.warning(
                "message '%(message_id)s' of queue '%(queue)s' was rejected: %(reason)s",
                extra={"event": "rejected", **told, "reason": verdict.reason},
            )


def log_late(count: int) -> None:
    """Log that deliveries were acknowledged when somebody else could have them."""
    _log.info(
        "%(count)s deliveries were acknowledged too late: another receiver may have got them",
        extra={"event": "acknowledged_too_late", "count": count},
        stacklevel=2,
    )


def contents_of(
    messages: Sequence[Message],
    destination: Destination,
    max_bytes: int,
    content_of: Callable[[Message], T],
) -> tuple[dict[int, T], dict[int, str]]:
    """What to publish for messages, and why others cannot be published, by their place among all.
    `content_of` may raise MessageError.
    """
    contents, refused = dict[int, T](), dict[int, str]()
    for index, message in enumerate(messages):
        try:
            # The consumer would find a wrong type. Whether an id may be missing is a matter of the
            # consumer's policy.
            check_message(message, needs_id=False)
            if reason := too_large(message.body, max_bytes):
                refused[index] = reason
            else:
                contents[index] = content_of(typed(message, destination))
        except MessageError as error:
            refused[index] = str(error)
    return contents, refused


def check_header(name: str) -> None:
    """Raise MessageError if a header of a message has the name of one of oncely's own."""
    if name.lower().startswith(OURS):
        raise MessageError(f"header {name!r}: names that begin with {OURS} are for oncely only")


def too_large(body: bytes, max_bytes: int) -> str | None:
    """Why a body is too large, if it is."""
    if len(body) > max_bytes:
        return f"body of {len(body)} bytes is over the limit of {max_bytes}"
    return None
