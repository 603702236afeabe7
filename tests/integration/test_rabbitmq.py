"""RabbitMQ's own: other publishers' messages, prefetch, acknowledgements in bulk, topics."""

import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, datetime
from threading import Event

import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel
from pika.channel import Channel

from oncely.core.errors import ConfigError, PublishRefused
from oncely.core.message import Message
from oncely.core.verdicts import Ack, DeadLetter, Delay, Requeue
from oncely.transports.open_transport import open_transport
from oncely.transports.rabbitmq.connection import Line
from oncely.transports.rabbitmq.messages import content_of
from oncely.transports.rabbitmq.publishing import Publisher
from oncely.transports.transport import Delivery, Transport

_DEADLINE_S = 30.0
_QUEUE = "orders"


class Broken(pika.BasicProperties):
    """Properties that pika itself cannot read: a header that is a time after all."""

    def encode(self) -> list[bytes]:
        name = b"\x01x"
        table = name + b"T" + b"\x80" + bytes(7)
        return [b"\x20\x00", len(table).to_bytes(4, "big"), table]


@pytest.fixture
def transport(rabbitmq_url: str) -> Iterator[Transport]:
    """A transport on a vhost of its own, that has made its queue."""
    with closing(open_transport(rabbitmq_url)) as transport:
        transport.receive(_QUEUE, 1, 0)
        yield transport


@pytest.fixture
def channel(rabbitmq_url: str) -> Iterator[BlockingChannel]:
    """A channel of another program's, in the same vhost."""
    with closing(pika.BlockingConnection(pika.URLParameters(rabbitmq_url))) as connection:
        yield connection.channel()


def _received(transport: Transport, number: int, *, at_most: int = 100) -> list[Delivery]:
    deliveries: list[Delivery] = []
    while len(deliveries) < number:
        wanted = min(at_most, number - len(deliveries))
        came = transport.receive(_QUEUE, wanted, _DEADLINE_S)
        assert came, f"{len(deliveries)} of {number} came"
        deliveries += came
    return deliveries


def _ids(deliveries: Sequence[Delivery]) -> list[str]:
    return [delivery.message.id for delivery in deliveries]


def _publish(transport: Transport, number: int) -> list[str]:
    ids = [str(n) for n in range(number)]
    transport.publish(_QUEUE, [Message(id_) for id_ in ids])
    return ids


# ---- Other publishers --------------------------------------------------------------------------


def test_plain_message(transport: Transport, channel: BlockingChannel) -> None:
    """What another program publishes comes out with all that it says about itself."""
    properties = pika.BasicProperties(
        message_id="order-17",
        type="order.placed",
        app_id="shop",
        content_type="text/plain",
        timestamp=1_700_000_000,
        headers={"tenant": "a", "n": 3, "list": [1, "b"], "raw": b"\xff", "nothing": None},
    )
    channel.basic_publish("", _QUEUE, b"\x00\xff", properties)
    [delivery] = _received(transport, 1)
    assert delivery.message == Message(
        "order-17",
        b"\x00\xff",
        "order.placed",
        {"tenant": "a", "n": "3", "list": '[1, "b"]', "raw": "�", "nothing": ""},
        "shop",
        datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC),
        "text/plain",
    )


def test_bare_message(transport: Transport, channel: BlockingChannel) -> None:
    """What says nothing about itself comes out without an id: the consumer refuses it."""
    channel.basic_publish("", _QUEUE, b"{}")
    [delivery] = _received(transport, 1)
    assert delivery.message == Message("", b"{}")


@pytest.mark.parametrize(
    "properties",
    [
        pytest.param(Broken(), id="unreadable"),
        pytest.param(pika.BasicProperties(timestamp=2**63), id="no time"),
        pytest.param(
            pika.BasicProperties(headers={"x-oncely-count": "many", "x-oncely-time": "noon"}),
            id="not ours",
        ),
        pytest.param(
            pika.BasicProperties(headers={"x-delivery-count": 99}), id="a count that is no count"
        ),
    ],
)
def test_broken_message(
    transport: Transport, channel: BlockingChannel, properties: pika.BasicProperties
) -> None:
    """A message that cannot be understood comes out as far as it can, and stops nothing."""
    channel.basic_publish("", _QUEUE, b"broken", properties)
    _publish(transport, 1)
    broken, whole = _received(transport, 2)
    assert (broken.message, broken.count) == (Message("", b"broken"), 1)
    assert whole.message == Message("0")
    transport.settle([(broken, DeadLetter("missing id")), (whole, Ack())])
    [letter] = transport.dead_letters(_QUEUE)
    assert letter.message.body == b"broken"


def test_nothing_is_taken_off(transport: Transport, channel: BlockingChannel) -> None:
    """Delayed, dead and tried again, a message keeps what only its publisher understands."""
    sent = pika.BasicProperties(
        message_id="1", correlation_id="c", reply_to="r", headers={"n": 3}, priority=4
    )
    channel.basic_publish("", _QUEUE, b"{}", sent)
    [delivery] = _received(transport, 1)
    transport.settle([(delivery, Delay(0.01))])
    [delivery] = _received(transport, 1)
    assert delivery.count == 2
    transport.settle([(delivery, DeadLetter("no"))])
    transport.retry(transport.dead_letters(_QUEUE))
    transport.close()
    sent.delivery_mode = 2
    assert _gotten(channel) == (sent, b"{}")


def _gotten(channel: BlockingChannel) -> tuple[pika.BasicProperties, bytes]:
    """What another program gets out of the queue; a channel that is closed gives back in time."""
    for _ in range(1_000):
        method, properties, body = channel.basic_get(_QUEUE, auto_ack=True)
        if method is not None and properties is not None:
            headers = dict(properties.headers or {})
            headers.pop("x-delivery-count", None)
            properties.headers = headers
            return properties, body or b""
    raise AssertionError("nothing there")


def test_dead_letter_of_another(transport: Transport, channel: BlockingChannel) -> None:
    """What others have put aside there can be listed and tried again."""
    transport.publish(f"{_QUEUE}.dead", [Message("1")])
    [letter] = transport.dead_letters(_QUEUE)
    assert (letter.message, letter.queue, letter.reason) == (Message("1"), _QUEUE, "unknown")
    assert transport.retry([letter]) == 1
    assert _ids(_received(transport, 1)) == ["1"]
    assert transport.dead_letters(_QUEUE) == []


def test_queue_of_dead_letters_is_made_ahead(
    transport: Transport, channel: BlockingChannel
) -> None:
    """It is there, and on the broker's disk, before there is a dead letter."""
    transport.receive(_QUEUE, 1, 0)
    channel.queue_declare(f"{_QUEUE}.dead", passive=True)


# ---- What AMQP has no room for -----------------------------------------------------------------


def test_long_fields(transport: Transport) -> None:
    """Fields that are too long for AMQP's properties come out whole."""
    message = Message("ü" * 255, b"", "t" * 300, {"h": "x" * 10_000}, "s" * 300, key="k" * 300)
    transport.publish(_QUEUE, [message])
    [delivery] = _received(transport, 1)
    assert delivery.message == message


def test_headers_that_send_copies(transport: Transport, channel: BlockingChannel) -> None:
    """`CC` and `BCC` are a message's like others: RabbitMQ makes nothing of ours, and sends those
    that another has asked for once.
    """
    message = Message("1", headers={"CC": "boss", "BCC": "all", "Cc": "x"})
    transport.publish(_QUEUE, [message])
    [delivery] = _received(transport, 1)
    assert delivery.message == message
    channel.queue_declare("copies", durable=True)
    copying = pika.BasicProperties(message_id="2", headers={"CC": ["copies"]})
    channel.basic_publish("", _QUEUE, b"", copying)
    for _ in range(2):
        [delivery] = _received(transport, 1)
        assert delivery.message.headers == {"CC": '["copies"]'}
        transport.settle([(delivery, Delay(0.01))])
    assert channel.queue_declare("copies", passive=True).method.message_count == 1


@pytest.mark.parametrize(
    ("headers", "said"),
    [
        ({"n" * 256: ""}, "AMQP cannot hold"),
        ({"a": "\udfff"}, "AMQP cannot hold"),
        ({str(n): "x" for n in range(20_000)}, "over the limit"),
        ({"X-Oncely-Count": "7"}, "for oncely only"),
    ],
    ids=["long name", "surrogate", "many", "ours"],
)
def test_refused_headers(transport: Transport, headers: dict[str, str], said: str) -> None:
    """Headers that the broker would end the connection for are refused, the others are stored."""
    with pytest.raises(PublishRefused, match=said) as raised:
        transport.publish(_QUEUE, [Message("1", headers=headers), Message("2")])
    assert list(raised.value.refused) == [0]
    assert _ids(_received(transport, 1)) == ["2"]


def test_unroutable(rabbitmq_url: str) -> None:
    """A message that no queue takes is refused, and the others are not."""
    line = Line(pika.URLParameters(rabbitmq_url))
    contents = [content_of(Message(str(n))) for n in range(3)]
    refused = Publisher(line).publish("nowhere", contents)
    line.close()
    assert refused == dict.fromkeys(range(3), "no queue takes it: NO_ROUTE")


# ---- Settling in bulk, prefetch -----------------------------------------------------------------


def test_acknowledged_out_of_order(transport: Transport, rabbitmq_url: str) -> None:
    """Whatever the order, what is acknowledged is, and nothing besides."""
    ids = _publish(transport, 30)
    deliveries = _received(transport, 30)
    transport.settle([(d, Ack()) for n, d in enumerate(deliveries) if n % 3])
    transport.settle([(d, Ack()) for d in reversed(deliveries[:9])])
    transport.settle([(deliveries[9], Requeue()), (deliveries[12], Ack())])
    transport.close()
    left = [id_ for n, id_ in enumerate(ids) if n % 3 == 0 and n >= 9 and n != 12]
    assert sorted(_ids(_received(transport, len(left)))) == sorted(left)


class _Told:
    """What RabbitMQ is told to be acknowledged: each time the number, and whether all before it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.acks: list[tuple[int, bool]] = []
        self.twice = Event()
        monkeypatch.setattr(Channel, "basic_ack", self._ack)

    def _ack(self, delivery_tag: int = 0, multiple: bool = False) -> None:
        self.acks.append((delivery_tag, multiple))
        if len(self.acks) == 2:
            self.twice.set()


def test_what_is_ahead_is_told_with_what_follows(
    transport: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One word for many, although their first came last."""
    _publish(transport, 30)
    deliveries = _received(transport, 30)
    told = _Told(monkeypatch)
    transport.settle([(delivery, Ack()) for delivery in deliveries[1:]])
    transport.settle([(deliveries[0], Ack())])
    assert told.acks == [(30, True)]


def test_what_is_ahead_is_told_alone(transport: Transport, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not wait for what is not settled for long."""
    _publish(transport, 3)
    deliveries = _received(transport, 3)
    told = _Told(monkeypatch)
    transport.settle([(delivery, Ack()) for delivery in deliveries[1:]])
    assert told.twice.wait(10)
    assert told.acks == [(2, False), (3, False)]


def test_prefetch(transport: Transport, rabbitmq_url: str) -> None:
    """One takes no more than its prefetch ahead of what its receivers hold, who may hold more."""
    transport.close()
    with closing(open_transport(f"{rabbitmq_url}?prefetch=2")) as slow:
        ids = _publish(slow, 6)
        first = _received(slow, 1)
        # Two are with it: one is held, one is ahead.
        others = _received(transport, 4)
        transport.settle([(delivery, Requeue()) for delivery in others])
        transport.close()
        rest = _received(slow, 5)
        assert sorted(_ids([*first, *rest])) == ids
        slow.settle([(delivery, Ack()) for delivery in (*first, *rest)])
        assert slow.is_drained(_QUEUE)


# ---- Topics ------------------------------------------------------------------------------------


def test_as_many_ahead_as_are_asked_for(transport: Transport, rabbitmq_url: str) -> None:
    """Who asks for few leaves the others to who asks for many."""
    _publish(transport, 400)
    assert len(_received(transport, 1, at_most=1)) == 1
    with closing(open_transport(rabbitmq_url)) as other:
        assert len(_received(other, 390)) == 390


def test_sent_ahead_from_the_start(transport: Transport, channel: BlockingChannel) -> None:
    """Also for who asks for many, and settles all before the next call."""
    _publish(transport, 400)
    transport.close()
    transport.receive(_QUEUE, 100, 10)
    _becomes(channel, "message_count", 100)


def test_receivers_that_ask_together(transport: Transport, channel: BlockingChannel) -> None:
    """However many ask for more at the same time, the broker has one consumer in the end."""
    _publish(transport, 400)
    with ThreadPoolExecutor(4) as receivers:
        taken = list(receivers.map(lambda _: _received(transport, 100, at_most=1), range(4)))
    transport.settle([(delivery, Ack()) for deliveries in taken for delivery in deliveries])
    # One that is cancelled counts until what it was given is settled.
    _becomes(channel, "consumer_count", 1)


def _becomes(channel: BlockingChannel, name: str, number: int) -> None:
    until = time.monotonic() + 10
    while (found := getattr(channel.queue_declare(_QUEUE, passive=True).method, name)) != number:
        assert time.monotonic() < until, found
        time.sleep(0.01)


def test_subscribe(transport: Transport, channel: BlockingChannel) -> None:
    """What is published to the exchange under a type that was asked for comes into the queue."""
    for _ in range(2):
        transport.subscribe(_QUEUE, ["order.placed", "payment.*"])
    for type_ in ("order.placed", "order.cancelled", "payment.made"):
        properties = pika.BasicProperties(message_id=type_)
        channel.basic_publish("oncely", type_, b"{}", properties)
    assert sorted(_ids(_received(transport, 2))) == ["order.placed", "payment.made"]
    assert transport.receive(_QUEUE, 1, 0.05) == []


def test_without_pika(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where pika is missing, one is told what to type."""
    for name in [name for name in sys.modules if name.startswith("oncely.transports.rabbitmq")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pika", None)
    with pytest.raises(ConfigError, match=r"pip install 'oncely\[rabbitmq\]'"):
        open_transport("amqp://localhost")
