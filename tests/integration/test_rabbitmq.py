"""RabbitMQ's own: other publishers' messages, prefetch, acknowledgements in bulk, topology."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, datetime
from urllib.parse import urlsplit

import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import ChannelClosedByBroker
from tests import amqp
from tests.amqp import Raw
from tests.conditions import LIMIT_S, wait_until
from tests.integration.adapting import channel_to
from tests.servers import Rabbitmq

from oncely.consumer import Consumer
from oncely.core.errors import PublishRefused, TransportError
from oncely.core.message import Message
from oncely.core.verdicts import Ack, Reject, Requeue
from oncely.testing import at_once
from oncely.transports.open_transport import open_transport
from oncely.transports.rabbitmq.rabbitmq_transport import RabbitmqTransport
from oncely.transports.transport import Delivery, Transport

_QUEUE = "orders"


@pytest.fixture
def transport(rabbitmq_url: str) -> Iterator[Transport]:
    """A transport on a vhost of its own, that has made its queue."""
    with closing(open_transport(rabbitmq_url)) as transport:
        transport.receive(_QUEUE, 1, 0)
        yield transport


@pytest.fixture
def channel(rabbitmq_url: str) -> Iterator[BlockingChannel]:
    """A channel of another program's, in the same vhost."""
    with channel_to(rabbitmq_url) as channel:
        yield channel


def _received(transport: Transport, number: int) -> list[Delivery]:
    deliveries: list[Delivery] = []
    while len(deliveries) < number:
        came = transport.receive(_QUEUE, number - len(deliveries), LIMIT_S)
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
        {"tenant": "a", "n": "3", "list": '[1, "b"]', "raw": "\\xff", "nothing": ""},
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
        Raw(amqp.DOUBLE, amqp.FLOAT, amqp.MILLISECONDS, amqp.NESTED),
        Raw(amqp.NO_TIME, amqp.nested(40)),
        Raw(message_id=b"\xff"),
        pika.BasicProperties(message_id="1", timestamp=1_700_000_000_000),
        pika.BasicProperties(headers={"x-oncely-time": "noon", "x-delivery-count": 99}),
    ],
    ids=["numbers", "deep", "id", "timestamp", "not ours"],
)
def test_what_others_write(
    transport: Transport, channel: BlockingChannel, properties: pika.BasicProperties
) -> None:
    """No header or property of another client ends the connection, or keeps others from coming."""
    for _ in range(2):
        channel.basic_publish("", _QUEUE, b"strange", properties)
    _publish(transport, 1)
    strange, _, whole = _received(transport, 3)
    assert (strange.message.body, strange.count) == (b"strange", 1)
    assert (whole.message, whole.problem) == (Message("0"), None)
    transport.acknowledge([(strange, Reject("no"))])
    [letter] = transport.receive(f"{_QUEUE}.dead", 1, LIMIT_S)
    assert letter.message.body == b"strange"


def test_all_properties(transport: Transport, channel: BlockingChannel) -> None:
    """What AMQP has and messages do not comes in headers, and goes out again where it can."""
    sent = pika.BasicProperties(
        message_id="1",
        correlation_id="c",
        reply_to="r",
        content_encoding="gzip",
        priority=4,
        expiration="600000",
        user_id="oncely",
        timestamp=2**63,
    )
    channel.basic_publish("", _QUEUE, b"{}", sent)
    [delivery] = _received(transport, 1)
    assert delivery.message.headers == {
        "amqp-content-encoding": "gzip",
        "amqp-priority": "4",
        "amqp-correlation-id": "c",
        "amqp-reply-to": "r",
        "amqp-expiration": "600000",
        "amqp-user-id": "oncely",
        "amqp-timestamp": str(2**63),
    }
    transport.publish("another", [delivery.message])
    _, again, _ = channel.basic_get("another", auto_ack=True)
    assert again is not None
    assert (again.correlation_id, again.reply_to, again.content_encoding, again.priority) == (
        ("c", "r", "gzip", 4)
    )
    transport.publish("another", [delivery.message])
    [delivery_again] = transport.receive("another", 1, LIMIT_S)
    assert delivery_again.message == delivery.message


def test_too_large_on_receipt(rabbitmq_url: str, transport: Transport) -> None:
    """A body over the receiver's limit comes with its problem, and stops nobody."""
    with closing(open_transport(f"{rabbitmq_url}?max_bytes=10")) as strict:
        transport.publish(_QUEUE, [Message("1", b"x" * 11), Message("2", b"x" * 10)])
        transport.close()
        large, fitting = _received(strict, 2)
        assert large.problem == "body of 11 bytes is over the limit of 10"
        assert large.message == Message("1", b"x" * 11)
        assert (fitting.message.id, fitting.problem) == ("2", None)


def test_queue_of_dead_letters_is_made_ahead(
    transport: Transport, channel: BlockingChannel
) -> None:
    """It is there, and on the broker's disk, before there is a dead letter."""
    for made in (transport.subscribe, transport.publish):
        queue = f"by-{made.__name__}"
        made(queue, [])
        if made == transport.publish:
            transport.publish(queue, [Message("1")])
        channel.queue_declare(f"{queue}.dead", passive=True)
    channel.queue_declare(f"{_QUEUE}.dead", passive=True)


def test_queue_of_another(transport: Transport, channel: BlockingChannel) -> None:
    """A queue that is there is taken as it is, with its own dead-letter exchange."""
    channel.queue_declare("graves")
    arguments = {
        "x-queue-type": "quorum",
        "x-dead-letter-exchange": "",
        "x-dead-letter-routing-key": "graves",
    }
    channel.queue_declare("theirs", durable=True, arguments=arguments)
    transport.publish("theirs", [Message("1")])
    [delivery] = transport.receive("theirs", 1, LIMIT_S)
    transport.acknowledge([(delivery, Reject("no"))])
    _becomes(channel, "message_count", 1, "graves")
    with pytest.raises(ChannelClosedByBroker):
        channel.queue_declare("theirs.dead", passive=True)


def test_queues_may_not_be_made(
    rabbitmq: Rabbitmq, rabbitmq_url: str, transport: Transport, channel: BlockingChannel
) -> None:
    """A user who may make none is told which is missing; what is there can be used, and no other
    destination is held up.
    """
    url = rabbitmq_url.replace("//oncely:secret@", "//clerk:secret@")
    vhost = urlsplit(rabbitmq_url).path.removeprefix("/")
    rabbitmq.add_user("clerk", "secret", vhost, "^$", "^(amq.default)?$", ".*")
    try:
        channel.exchange_declare("private", "topic")
        with closing(open_transport(url)) as clerk:
            with pytest.raises(TransportError, match=r"ACCESS_REFUSED.*'missing'"):
                clerk.receive("missing", 1, 0)
            for destination in ("missing", "exchange:private/key"):
                with pytest.raises(PublishRefused, match="ACCESS_REFUSED"):
                    clerk.publish(destination, [Message("1")])
            clerk.publish(_QUEUE, [Message("2")])
            transport.close()
            assert [d.message.id for d in clerk.receive(_QUEUE, 1, LIMIT_S)] == ["2"]
    finally:
        rabbitmq.delete_user("clerk")


# ---- What AMQP has no room for -----------------------------------------------------------------


def test_long_fields(transport: Transport) -> None:
    """Fields that are too long for AMQP's properties come out whole; `CC` and `BCC` are headers
    like others, of which RabbitMQ makes nothing.
    """
    headers = {"h": "x" * 10_000, "CC": "boss", "BCC": "all", "Cc": "x"}
    message = Message("ü" * 255, b"", "t" * 300, headers, "s" * 300, key="k" * 300)
    transport.publish(_QUEUE, [message])
    [delivery] = _received(transport, 1)
    assert delivery.message == message


@pytest.mark.parametrize(
    ("headers", "said"),
    [
        ({"n" * 256: ""}, "longer than the 255 bytes"),
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


def test_unroutable(transport: Transport, channel: BlockingChannel) -> None:
    """What an exchange passes on to no queue is refused, by its place; all else is stored."""
    channel.exchange_declare("shop", "direct")
    channel.queue_bind(_QUEUE, "shop", "sold")
    transport.publish("exchange:shop/sold", [Message("1")])
    for destination in ("exchange:shop/lost", "events:lost", "exchange:none/sold"):
        with pytest.raises(PublishRefused, match=f"'{destination}': ") as raised:
            transport.publish(destination, [Message("2"), Message("2")])
        assert list(raised.value.refused) == [0, 1]
    assert _ids(_received(transport, 1)) == ["1"]


def test_refused_beside_others(transport: Transport) -> None:
    """Who publishes to what is not there disturbs nobody who publishes at the same time."""

    def publish(publisher: int) -> None:
        for n in range(30):
            if publisher % 2:
                with pytest.raises(PublishRefused, match="no exchange 'none'"):
                    transport.publish("exchange:none/key", [Message("lost")])
            else:
                transport.publish(_QUEUE, [Message(f"{publisher}-{n}")])

    at_once(4, publish)
    # What was on its way when the channel was closed has been published again.
    ids = set()
    while not transport.is_drained(_QUEUE):
        deliveries = transport.receive(_QUEUE, 100, 0.05)
        ids.update(_ids(deliveries))
        transport.acknowledge([(delivery, Ack()) for delivery in deliveries])
    assert ids == {f"{publisher}-{n}" for publisher in (0, 2) for n in range(30)}


def test_full_queue(transport: Transport, channel: BlockingChannel) -> None:
    """What a full queue refuses is told, and other queues are not held up."""
    full = {"x-queue-type": "classic", "x-max-length": 2, "x-overflow": "reject-publish"}
    channel.queue_declare("full", durable=True, arguments=full)
    transport.publish("full", [Message("1"), Message("2")])
    with ThreadPoolExecutor(1) as pool:
        refused = pool.submit(transport.publish, "full", [Message("3")])
        transport.publish(_QUEUE, [Message("4")])
        with pytest.raises(PublishRefused, match=r"'full': .*is full"):
            refused.result()


def test_queue_deleted_between_publishes(transport: Transport, channel: BlockingChannel) -> None:
    """A queue that is remembered as made, and was deleted, is made again."""
    transport.publish("another", [Message("1")])
    channel.queue_delete("another")
    transport.publish("another", [Message("2")])
    assert _ids(transport.receive("another", 1, LIMIT_S)) == ["2"]


# ---- Acknowledging in bulk, prefetch -----------------------------------------------------------


def test_acknowledged_out_of_order(transport: Transport, rabbitmq_url: str) -> None:
    """Whatever the order, what is acknowledged is, and nothing besides."""
    ids = _publish(transport, 30)
    deliveries = _received(transport, 30)
    transport.acknowledge([(d, Ack()) for n, d in enumerate(deliveries) if n % 3])
    transport.acknowledge([(d, Ack()) for d in reversed(deliveries[:9])])
    transport.acknowledge([(deliveries[9], Requeue()), (deliveries[12], Ack())])
    transport.close()
    left = [id_ for n, id_ in enumerate(ids) if n % 3 == 0 and n >= 9 and n != 12]
    assert sorted(_ids(_received(transport, len(left)))) == sorted(left)


@pytest.mark.parametrize("prefetch", [1, 2])
def test_prefetch(transport: Transport, rabbitmq_url: str, prefetch: int) -> None:
    """One is given no more than its prefetch before it acknowledges: others have the rest."""
    transport.close()
    with closing(open_transport(f"{rabbitmq_url}?prefetch={prefetch}")) as slow:
        ids = _publish(slow, 6)
        first = _received(slow, prefetch)
        assert slow.receive(_QUEUE, 6, 0.2) == []
        others = _received(transport, 6 - prefetch)
        assert _ids([*first, *others]) == ids
        transport.acknowledge([(delivery, Ack()) for delivery in others])
        slow.acknowledge([(delivery, Ack()) for delivery in first])
        assert slow.is_drained(_QUEUE)


# ---- Topics ------------------------------------------------------------------------------------


def _becomes(channel: BlockingChannel, name: str, number: int, queue: str = _QUEUE) -> None:
    wait_until(lambda: getattr(channel.queue_declare(queue, passive=True).method, name) == number)


def test_subscribe(transport: Transport, channel: BlockingChannel) -> None:
    """What is published to the exchange under a type that was asked for comes into the queue."""
    for _ in range(2):
        transport.subscribe(_QUEUE, ["order.placed", "payment.*"])
    for type_ in ("order.placed", "order.cancelled", "payment.made"):
        properties = pika.BasicProperties(message_id=type_)
        channel.basic_publish("oncely", type_, b"{}", properties)
    assert sorted(_ids(_received(transport, 2))) == ["order.placed", "payment.made"]
    assert transport.receive(_QUEUE, 1, 0.05) == []


# ---- Queues for one consumer at a time ---------------------------------------------------------


@pytest.mark.parametrize("is_second", [False, True])
@pytest.mark.parametrize("queue_type", ["quorum", "classic"])
def test_drained_with_a_single_active_consumer(
    rabbitmq_url: str, channel: BlockingChannel, queue_type: str, is_second: bool
) -> None:
    """A queue with a single active consumer is drained as any other, also where another consumer
    is the active one: from a quorum queue the broker lets nobody get single messages.
    """
    arguments = {"x-queue-type": queue_type, "x-single-active-consumer": True}
    channel.queue_declare(_QUEUE, durable=True, arguments=arguments)
    if is_second:
        # The broker sends all to it, and counts none of them.
        channel.basic_consume(_QUEUE, lambda *_: None, auto_ack=True)
    url = f"{rabbitmq_url}?queue_type={queue_type}"
    with closing(open_transport(url)) as transport:
        _publish(transport, 5)
        report = Consumer(url, _QUEUE).consume(lambda _: None, drain=True)
        assert report.handled == (0 if is_second else 5)
        wait_until(lambda: transport.is_drained(_QUEUE))
        assert isinstance(transport, RabbitmqTransport)
        intake = transport._session.intake(_QUEUE)
        for _ in range(3):
            transport.is_drained(_QUEUE)
        assert transport._session.intake(_QUEUE) is intake


@pytest.mark.parametrize("queue_type", ["quorum", "classic"])
def test_drained_beside_an_exclusive_consumer(
    rabbitmq_url: str, channel: BlockingChannel, queue_type: str
) -> None:
    """Where another consumer has a queue for itself, it is drained as soon as nothing waits."""
    url = f"{rabbitmq_url}?queue_type={queue_type}"
    with closing(open_transport(url)) as transport:
        _publish(transport, 2)
        channel.basic_qos(prefetch_count=1)
        channel.basic_consume(_QUEUE, lambda *_: None, exclusive=True)
        _becomes(channel, "message_count", 1)
        assert not transport.is_drained(_QUEUE)
        channel.basic_ack(0, multiple=True)
        _becomes(channel, "message_count", 0)
        assert Consumer(url, _QUEUE).consume(lambda _: None, drain=True).received == 0
