# ruff: noqa: S101 - asserts are what a conformance suite is made of.
"""TransportSuite: what a transport has to do, as tests to inherit."""

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta, timezone
from itertools import product

import pytest

from oncely.core.errors import ConfigError, PublishRefused
from oncely.core.message import Message
from oncely.core.verdicts import Ack, Reject, Requeue
from oncely.testing.delivery_suite import (
    DEADLINE_S,
    QUEUE,
    RECEIVERS,
    Connect,
    DeliverySuite,
    given,
    ids_of,
    nothing_comes,
    received,
)
from oncely.testing.tools import at_once
from oncely.transports.transport import Transport, dead_of

_FAR_EAST = timezone(timedelta(hours=8, minutes=45))
MESSAGES = (
    Message("1"),
    Message(
        "order-17",
        b'{"total": 3}',
        "order.placed",
        {"tenant": "a", "traceparent": "00-4bf92f35-00f067aa-01"},
        "https://shop.example/orders",
        datetime(2024, 2, 29, 23, 59, 59, 999_999, tzinfo=UTC),
        "application/cloudevents+json",
        "customer-9",
    ),
    Message("binary", bytes(range(256)), content_type="application/octet-stream"),
    Message("elsewhere", time=datetime(1969, 7, 20, 20, 17, tzinfo=_FAR_EAST)),
    Message("empty", b"", type="", headers={"": ""}, source="", content_type="", key=""),
    Message("🧾 é", "naïve 🧾".encode(), "тип", {"заголовок": "значение 🧾"}, "ü", key="ключ"),
    Message("' OR 1=1 --", b"x' --", "%", {"?": "\\", ":a": "'"}, "../", key="\t"),
)
"""Messages that must be received as they were published."""


class TransportSuite(DeliverySuite):
    """Conformance tests of a transport. Inherit this class, and define two fixtures.

    `connect`: a function that opens one more transport to a broker, always the same one, empty
    when a test begins; the fixture closes them in the end. `clock`: the clock that this broker
    reads, an object with `advance(seconds)`; where it cannot be moved, `advance` sleeps. What a
    broker does not do by its nature, its transport declares in `features`.
    """

    def test_every_field_comes_out(self, transport: Transport) -> None:
        """A message comes out as it was put in, field by field, with the queue and the count."""
        for message in MESSAGES:
            [delivery] = given(transport, message)
            assert delivery.message == message
            assert type(delivery.message.body) is bytes
            assert (delivery.queue, delivery.count) == (QUEUE, 1)

    def test_messages_share_nothing(self, transport: Transport) -> None:
        """What a producer or a handler does to the headers of its message, no other delivery
        shows.
        """
        headers = {"tenant": "a"}
        transport.publish(QUEUE, [Message("1", headers=headers)])
        headers["tenant"] = "b"
        [first] = received(transport, 1)
        assert first.message.headers == {"tenant": "a"}
        first.message.headers["tenant"] = "c"  # type: ignore[index]
        transport.acknowledge([(first, Requeue())])
        [again] = received(transport, 1)
        assert again.message.headers == {"tenant": "a"}
        again.message.headers["tenant"] = "d"  # type: ignore[index]
        transport.acknowledge([(again, Reject("no"))])
        [dead] = received(transport, 1, queue=dead_of(QUEUE))
        assert dead.message.headers == {"tenant": "a"}

    def test_order(self, transport: Transport) -> None:
        """Where order is declared, messages come in the order in which they were published."""
        if not transport.features.ordered:
            pytest.skip("this transport declares no order")
        for start in range(0, 30, 10):
            transport.publish(QUEUE, [Message(str(n)) for n in range(start, start + 10)])
        assert ids_of(received(transport, 30, at_most=7)) == [str(n) for n in range(30)]

    def test_at_most_so_many(self, transport: Transport) -> None:
        """No more are received at once than were asked for, and the rest can be received next."""
        transport.publish(QUEUE, [Message(str(n)) for n in range(5)])
        first = transport.receive(QUEUE, 3, DEADLINE_S)
        assert 1 <= len(first) <= 3
        rest = received(transport, 5 - len(first))
        assert {*ids_of(first), *ids_of(rest)} == {str(n) for n in range(5)}

    def test_many_at_once(self, transport: Transport) -> None:
        """A thousand messages are published, received and acknowledged at once; each comes once."""
        messages = [Message(str(n), b"x" * 1_000) for n in range(1_000)]
        transport.publish(QUEUE, messages)
        deliveries = received(transport, 1_000, at_most=1_000)
        assert {d.message.id: d.message for d in deliveries} == {m.id: m for m in messages}
        transport.acknowledge([(delivery, Ack()) for delivery in deliveries])
        assert transport.is_drained(QUEUE)

    def test_equal_messages_are_two(self, transport: Transport) -> None:
        """A message published twice is delivered twice: a broker does not find duplicates."""
        transport.publish(QUEUE, [Message("1")])
        transport.publish(QUEUE, [Message("1")])
        first, second = received(transport, 2)
        transport.acknowledge([(first, Ack())])
        assert not transport.is_drained(QUEUE)
        transport.acknowledge([(second, Ack())])
        assert transport.is_drained(QUEUE)

    def test_queues_are_apart(self, transport: Transport) -> None:
        """A message is in its own queue and in no other, whatever queues are called."""
        names = ("a", "A", "a.b", *(() if transport.features.topics else ("a:b", "é")))
        for name in names:
            transport.publish(name, [Message(f"in {name}")])
        for name in names:
            [delivery] = received(transport, 1, queue=name)
            assert (delivery.message.id, delivery.queue) == (f"in {name}", name)
            assert nothing_comes(transport, queue=name)

    def test_published_at_once(self, connect: Connect) -> None:
        """All messages that several transports publish at the same time arrive."""
        transports = [connect() for _ in range(RECEIVERS)]

        def publish(publisher: int) -> None:
            for n in range(20):
                messages = [Message(f"{publisher}-{n}-{m}") for m in range(5)]
                transports[publisher].publish(QUEUE, messages)

        at_once(RECEIVERS, publish)
        ids = ids_of(received(transports[0], RECEIVERS * 100))
        assert len(set(ids)) == RECEIVERS * 100

    def test_nothing(self, transport: Transport) -> None:
        """To publish or acknowledge nothing does nothing."""
        transport.publish(QUEUE, [])
        transport.acknowledge([])
        assert nothing_comes(transport)

    def test_too_large(self, transport: Transport) -> None:
        """Messages over the limit are refused, each with a reason; the others are stored."""
        limit = transport.features.max_bytes
        if limit is None:
            pytest.skip("this transport declares no limit")
        sizes = (1, limit + 1, limit, 2 * limit)
        with pytest.raises(PublishRefused, match="over the limit") as raised:
            transport.publish(QUEUE, [Message(str(size), b"x" * size) for size in sizes])
        assert list(raised.value.refused) == [1, 3]
        assert sorted(ids_of(received(transport, 2))) == sorted([str(1), str(limit)])
        assert nothing_comes(transport)

    def test_wrong_types(self, transport: Transport) -> None:
        """An invalid message is refused by publish, and does not reach a consumer."""
        text_body = Message("1", "text")  # type: ignore[arg-type]
        number = Message("2", headers={"n": 1})  # type: ignore[dict-item]
        with pytest.raises(PublishRefused) as raised:
            transport.publish(QUEUE, [text_body, number, Message("3")])
        assert list(raised.value.refused) == [0, 1]
        assert ids_of(received(transport, 1)) == ["3"]

    def test_missing_queue(self, transport: Transport) -> None:
        """A queue that is missing is made, or refused to who makes none, with its name."""
        for _ in range(2):
            with pytest.raises(PublishRefused, match="'orders': ") as raised:
                transport.publish(QUEUE, [Message("1"), Message("2")], create=False)
            assert list(raised.value.refused) == [0, 1]
        transport.publish(QUEUE, [Message("3")])
        transport.publish(QUEUE, [Message("4")], create=False)
        assert ids_of(received(transport, 2)) == ["3", "4"]

    def test_received_queue_is_there(self, transport: Transport) -> None:
        """Whoever receives makes the queue, for those who make none."""
        assert nothing_comes(transport)
        transport.publish(QUEUE, [Message("1")], create=False)
        assert ids_of(received(transport, 1)) == ["1"]

    def test_events(self, connect: Connect) -> None:
        """Events come into each queue that has subscribed to their type, and get it as theirs."""
        transport, other = connect(), connect()
        if transport.features.topics:
            pytest.skip("this transport declares that events are in topics")
        transport.subscribe(QUEUE, ["order.*", "order.placed"])
        transport.subscribe("another", ["#"])
        other.publish("events:order.placed", [Message("1"), Message("2", type="own")])
        other.publish("events:payment", [Message("3")])
        types = [(d.message.id, d.message.type) for d in received(transport, 2)]
        assert types == [("1", "order.placed"), ("2", "own")]
        assert ids_of(received(transport, 3, queue="another")) == ["1", "2", "3"]
        assert nothing_comes(transport)

    def test_leads_nowhere(self, transport: Transport) -> None:
        """A message that no queue takes is refused with its destination, and delays no other."""
        transport.subscribe(QUEUE, ["order.placed"])
        for destination, create in product(
            ("events:unknown", "exchange:missing/key"), (True, False)
        ):
            with pytest.raises(PublishRefused, match=f"'{destination}': ") as raised:
                transport.publish(destination, [Message("1"), Message("2")], create=create)
            assert list(raised.value.refused) == [0, 1]
        transport.publish(QUEUE, [Message("3")])
        assert ids_of(received(transport, 1)) == ["3"]

    def test_no_destination(self, transport: Transport) -> None:
        """A wrong destination is refused in one line, which says what to type."""
        for destination in ("", "exchange:orders", "events:", "n" * 256):
            with pytest.raises(ConfigError, match=r"destination: .*write ") as raised:
                transport.publish(destination, [Message("1")])
            assert "\n" not in str(raised.value)

    def test_empty_queue(self, transport: Transport) -> None:
        """On an empty queue, receive returns nothing, whether it waits or not."""
        for wait_s in (0.0, 0.05):
            assert list(transport.receive(QUEUE, 10, wait_s)) == []

    def test_waiting_for_the_first(self, connect: Connect) -> None:
        """Receive returns as soon as a message is published, with no more than are there."""
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(connect().receive, QUEUE, 10, 2 * DEADLINE_S)
            connect().publish(QUEUE, [Message("1")])
            assert ids_of(waiting.result(DEADLINE_S)) == ["1"]

    def test_waiting_for_what_is_held(self, connect: Connect) -> None:
        """Receive returns as soon as another receiver gives a message back."""
        holder = connect()
        [delivery] = given(holder, Message("1"))
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(connect().receive, QUEUE, 10, 2 * DEADLINE_S)
            holder.acknowledge([(delivery, Requeue())])
            # It may be sent to the one who gave it back, too.
            holder.close()
            assert ids_of(waiting.result(DEADLINE_S)) == ["1"]
