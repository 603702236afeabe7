"""The Transport protocol: all that a broker has to do for consumers and relays."""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from oncely.core.binding import Binding
from oncely.core.destination import Destination, EventsOf, ExchangeNamed, destination_of
from oncely.core.errors import MessageError
from oncely.core.message import Message, check_message
from oncely.core.verdicts import Refuse, Settlement

_log = logging.getLogger(__name__)

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
    problem: str | None = None
    """Why what came is not a message that may be handled: its body is too large, or its id cannot
    be read. The message is there as well as it can be told."""


class Features(NamedTuple):
    """What a transport can do: the conformance suite tests what is declared here."""

    ordered: bool
    """One receiver is given messages in the order in which they were published, but for those
    that come again."""
    counts_deliveries: bool
    max_bytes: int | None
    """A message with a longer body is refused, or has a `problem`; None: no limit is known."""
    visibility_s: float | None
    """What is not settled for so long is delivered again; None: it is when its receiver's
    connection is lost."""
    exchange: str = ""
    """The topic exchange by which events come to queues, of a broker that does not tell what is
    bound to it; empty where `Transport.bindings` tells."""


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
        `Features.visibility_s` is over. Returns nothing as soon as the transport is closed. A
        queue that is missing is made.
        """

    def settle(self, verdicts: Sequence[tuple[Delivery, Settlement]]) -> None:
        """Do to each delivery of this transport as its verdict says, whatever becomes of others.

        What comes too late is dropped, and logged: the delivery was settled before, or the
        message may have gone to another receiver since, because its time was over or the
        connection lost. After TransportError nobody knows which are settled; to settle all again
        does no harm. What is rejected goes to the queue `NAME.dead`, unless somebody has made the
        queue with another dead-letter exchange.
        """

    def publish(
        self, destination: str, messages: Sequence[Message], *, create: bool = True
    ) -> None:
        """Publish messages; returns when every one is stored durably.

        A destination is the name of a queue, `exchange:NAME/routing.key` where the broker has
        exchanges, or `events:TYPE`: all queues that have subscribed to that type, which a message
        without a type gets as its own. A queue that is missing is made; unless told to `create`,
        nothing is. Raises ConfigError for what is no destination, and PublishRefused where some
        are not taken, because of what they are or because the destination leads nowhere; all
        others are stored then. After TransportError of any other kind nobody knows which are
        stored: to publish all again loses none.
        """

    def subscribe(self, queue: str, types: Sequence[str], *, alone: bool = False) -> None:
        """Let the queue be there, and be given the events of these types: topics, in which `*` is
        a word between dots, `#` any number. Who receives `alone` waits some seconds, if need be,
        for what one that is gone had not settled.
        """

    def unsubscribe(self, bindings: Collection[Binding]) -> None:
        """Let nothing more come into queues by these; what is there stays there. What is bound so
        no more, or never was, is not an error.
        """

    def bindings(self, queue: str) -> Sequence[Binding] | None:
        """By what events come into a queue; None where the broker does not tell."""

    def is_drained(self, queue: str) -> bool:
        """Whether nothing is waiting, or received and not settled.

        What other transports have received counts where the broker tells.
        """

    def close(self) -> None:
        """Give back what is received and not settled, and the connection; a later call opens it
        again.
        """


def parted(
    messages: Sequence[Message], destination: str, queues: Sequence[object], max_bytes: int
) -> tuple[Sequence[Message], Mapping[int, str]]:
    """Which of these the queues that a destination leads to are to take, as they are published
    there; and which are refused, by their places, and why.
    """
    target = destination_of(destination)
    if not queues:
        is_exchange = isinstance(target, ExchangeNamed)
        no = "there are no exchanges here" if is_exchange else "no queue takes it"
        return [], dict.fromkeys(range(len(messages)), f"{destination!r}: {no}")
    refused = refusals(messages, max_bytes)
    fit = (message for place, message in enumerate(messages) if place not in refused)
    return [typed(message, target) for message in fit], refused


def typed(message: Message, destination: Destination) -> Message:
    """The message as it is published there."""
    if isinstance(destination, EventsOf) and not message.type:
        return replace(message, type=destination.type)
    return message


def dead_of(queue: str) -> str:
    """The queue that what is rejected goes to."""
    return f"{queue}.dead"


def log_rejected(verdicts: Sequence[tuple[Delivery, Settlement]]) -> None:
    """Tell of what is rejected: the reason stands nowhere else."""
    for delivery, verdict in verdicts:
        if isinstance(verdict, Refuse):
            told = {"message_id": delivery.message.id, "queue": delivery.queue}
            _log.warning("rejected", extra={**told, "reason": verdict.reason})


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
    return too_large(message.body, max_bytes)


def too_large(body: bytes, max_bytes: int) -> str | None:
    """Why a body is too large, if it is."""
    if len(body) > max_bytes:
        return f"body of {len(body)} bytes is over the limit of {max_bytes}"
    return None
