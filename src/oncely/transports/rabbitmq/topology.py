"""Queues and exchanges on the broker, and their declaration."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from oncely.core.binding import Binding
from oncely.core.errors import BrokerRefused
from oncely.transports.rabbitmq.connection import Channel, ChannelLost, Line
from oncely.transports.transport import dead_of

_ACCESS_REFUSED = 403
_NOT_FOUND = 404
_PRECONDITION_FAILED = 406
# What comes again too often would else be dropped, from RabbitMQ 4 on after twenty times.
_NO_LIMIT = 2**31 - 1


class WrongQueueType(BrokerRefused):
    """There is a queue of that name and of another type."""


def make_queue(line: Line, name: str, queue_type: str) -> None:
    """See to it that a queue is there and, where it is one of ours, that of its dead letters.

    One that somebody has made with other arguments is taken as it is, but for its type. Raises
    WrongQueueType for another type, and ChannelLost where it may not be made.
    """
    # Both long before there is a message: a node that is killed within a second after a quorum
    # queue was made forgets all that it has confirmed there.
    if _declare(line, name, queue_type):
        _declare(line, dead_of(name), queue_type)


def waiting(line: Line, name: str) -> int:
    """How many messages wait in a queue; none in one that is not there."""
    try:
        return int(_declared(line, name).message_count)
    except ChannelLost as lost:
        if lost.code == _NOT_FOUND:
            return 0
        raise


def consumers(line: Line, name: str) -> int:
    """How many consumers a queue has, or had whose messages are not yet back."""
    return int(_declared(line, name).consumer_count)


def subscribe(line: Line, queue: str, exchange: str, types: Sequence[str]) -> None:
    """Have what is published to a topic exchange under one of these types come into the queue."""
    with _channel(line) as channel:
        channel.call(channel.raw.exchange_declare, exchange, "topic", durable=True)
        for type_ in types:
            channel.call(channel.raw.queue_bind, queue, exchange, routing_key=type_)


def unbind(line: Line, binding: Binding) -> None:
    """Have nothing more come by it. The broker takes it for done where it, its queue or its
    exchange is gone.
    """
    queue, exchange, type_ = binding
    with _channel(line) as channel:
        channel.call(channel.raw.queue_unbind, queue, exchange, type_)


def check_exchange(line: Line, name: str) -> None:
    """Raises ChannelLost where there is no such exchange."""
    with _channel(line) as channel:
        channel.call(channel.raw.exchange_declare, name, passive=True)


@contextmanager
def _channel(line: Line) -> Iterator[Channel]:
    channel = Channel(line)
    yield channel
    channel.close()


def _declare(line: Line, name: str, queue_type: str) -> bool:
    """Whether it is as we make queues."""
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
        # That it is not there is no news: it may not be made.
        raise (refusal if lost.code == _NOT_FOUND else lost) from None


def _declared(line: Line, name: str, arguments: dict[str, Any] | None = None) -> Any:
    """What the broker tells of it; without arguments it has to be there."""
    is_passive = arguments is None
    with _channel(line) as channel:
        told = channel.call(
            channel.raw.queue_declare, name, passive=is_passive, durable=True, arguments=arguments
        )
    return told.method
