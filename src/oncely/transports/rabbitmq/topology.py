"""Queues and exchanges on the broker, and their declaration."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from oncely.core.errors import BrokerRefused
from oncely.transports.rabbitmq.connection import Channel, ChannelLost, Line
from oncely.transports.transport import dead_of

_ACCESS_REFUSED = 403
_NOT_FOUND = 404
_PRECONDITION_FAILED = 406
# Else a message that is redelivered too often is dropped: since RabbitMQ 4 after twenty times.
_NO_LIMIT = 2**31 - 1


class WrongQueueType(BrokerRefused):
    """A queue of that name has another type."""


def make_queue(line: Line, name: str, queue_type: str) -> None:
    """Create a queue if it is missing, and for a queue of ours its dead-letter queue.

    An existing queue with other arguments is used as it is, unless its type differs. Raises
    WrongQueueType for another type, and ChannelLost if the user may not create the queue.
    """
    # Both long before the first message: a node that is killed within a second after it created a
    # quorum queue forgets what it has confirmed there.
    if _declare(line, name, queue_type):
        _declare(line, dead_of(name), queue_type)


def waiting(line: Line, name: str) -> int:
    """How many messages wait in a queue; 0 if there is no queue."""
    try:
        return int(_declared(line, name).message_count)
    except ChannelLost as lost:
        if lost.code == _NOT_FOUND:
            return 0
        raise


def consumers(line: Line, name: str) -> int:
    """How many consumers a queue has, with former ones whose messages are not requeued yet."""
    return int(_declared(line, name).consumer_count)


def subscribe(line: Line, queue: str, exchange: str, types: Sequence[str]) -> None:
    """Bind the queue to a topic exchange by these types."""
    with _channel(line) as channel:
        channel.call(channel.raw.exchange_declare, exchange, "topic", durable=True)
        for type_ in types:
            channel.call(channel.raw.queue_bind, queue, exchange, routing_key=type_)


def check_exchange(line: Line, name: str) -> None:
    """Raises ChannelLost if there is no such exchange."""
    with _channel(line) as channel:
        channel.call(channel.raw.exchange_declare, name, passive=True)


@contextmanager
def _channel(line: Line) -> Iterator[Channel]:
    channel = Channel(line)
    yield channel
    channel.close()


def _declare(line: Line, name: str, queue_type: str) -> bool:
    """Declare the queue; return whether it has the arguments of our queues."""
    arguments: dict[str, Any] = {
        "x-queue-type": queue_type,
        "x-dead-letter-exchange": "",
        "x-dead-letter-routing-key": dead_of(name),
    }
    if queue_type == "quorum":
        arguments["x-delivery-limit"] = _NO_LIMIT
    try:
        _declared(line, name, arguments)
        return True
    except ChannelLost as lost:
        if lost.code == _PRECONDITION_FAILED and "'x-queue-type'" in lost.text:
            raise WrongQueueType(
                f"RabbitMQ: queue {name!r} exists and is of another type; "
                f"change ?queue_type= in the URL: {lost.text}"
            ) from lost
        if lost.code not in (_ACCESS_REFUSED, _PRECONDITION_FAILED):
            raise
        refusal = lost
    try:
        _declared(line, name)
        return False
    except ChannelLost as lost:
        # If the queue is missing, the error to report is that it may not be created.
        raise (refusal if lost.code == _NOT_FOUND else lost) from None


def _declared(line: Line, name: str, arguments: dict[str, Any] | None = None) -> Any:
    """The broker's answer to the declaration; without arguments the queue must exist."""
    is_passive = arguments is None
    with _channel(line) as channel:
        told = channel.call(
            channel.raw.queue_declare, name, passive=is_passive, durable=True, arguments=arguments
        )
    return told.method
