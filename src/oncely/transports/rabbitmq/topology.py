"""The queues that one queue of ours is made of on the broker, and their declaration."""

from bisect import bisect_left
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from oncely.core.errors import BrokerRefused
from oncely.transports.rabbitmq.connection import Channel, ChannelLost, Line, Reply

_ACCESS_REFUSED = 403
_NOT_FOUND = 404
_PRECONDITION_FAILED = 406
# What comes again too often would else be dropped, from RabbitMQ 4 on after twenty times.
_NO_LIMIT = 2**31 - 1
_SPANS_S = (10, 1_000)
"""Messages that are delayed for no longer than one of these wait apart from the others, lest they
stand behind them."""


class Queue(NamedTuple):
    """A queue, as it is declared."""

    name: str
    arguments: dict[str, Any]


class Topology(NamedTuple):
    """What queues are called, and how they are made."""

    queue_type: str

    def main(self, name: str) -> Queue:
        """Where messages wait."""
        limit = {"x-delivery-limit": _NO_LIMIT} if self.queue_type == "quorum" else {}
        return Queue(name, {"x-queue-type": self.queue_type, **limit})

    def dead(self, name: str) -> Queue:
        """Where its dead letters are."""
        return self.main(f"{name}.dead")

    def delays(self, name: str) -> tuple[Queue, ...]:
        """Where messages are that are delayed, for shorter and for longer times."""
        return tuple(self.main(f"{name}.delay.{span}") for span in (*_SPANS_S, "longer"))

    def delay(self, name: str, delay_s: float) -> Queue:
        """Where a message is that is delayed for so long."""
        return self.delays(name)[bisect_left(_SPANS_S, delay_s)]


def declare(line: Line, queue: Queue) -> int:
    """See to it that a queue is there; return how many messages wait in it.

    One that somebody has made with other arguments is taken as it is, but for its type. Raises
    BrokerRefused for another type.
    """
    try:
        return _declared(line, queue, passive=False)
    except ChannelLost as lost:
        if lost.code == _PRECONDITION_FAILED and "'x-queue-type'" in lost.text:
            raise BrokerRefused(
                f"RabbitMQ: queue {queue.name!r} exists and is of another type; "
                f"change ?queue_type= in the URL: {lost.text}"
            ) from lost
        if lost.code not in (_ACCESS_REFUSED, _PRECONDITION_FAILED):
            raise
        refusal = lost
    try:
        return _declared(line, queue, passive=True)
    except ChannelLost as lost:
        # That it is not there is no news: it may not be made.
        raise (refusal if lost.code == _NOT_FOUND else lost) from None


def waiting(line: Line, name: str) -> int:
    """How many messages wait in a queue; none in one that is not there."""
    try:
        return _declared(line, Queue(name, {}), passive=True)
    except ChannelLost as lost:
        if lost.code == _NOT_FOUND:
            return 0
        raise


def subscribe(line: Line, queue: str, exchange: str, types: Sequence[str]) -> None:
    """Have what is published to a topic exchange under one of these types come into the queue."""
    channel = Channel(line)
    raw = channel.raw
    channel.ask(lambda reply: raw.exchange_declare(exchange, "topic", durable=True, callback=reply))
    for type_ in types:
        channel.ask(partial(_bind, raw, queue, exchange, type_))
    channel.close()


def _bind(raw: Any, queue: str, exchange: str, type_: str, reply: Reply) -> None:
    raw.queue_bind(queue, exchange, routing_key=type_, callback=reply)


def _declared(line: Line, queue: Queue, *, passive: bool) -> int:
    channel = Channel(line)
    told = channel.ask(
        lambda reply: channel.raw.queue_declare(
            queue.name, passive=passive, durable=True, arguments=queue.arguments, callback=reply
        )
    )
    channel.close()
    return int(told.method.message_count)
