"""Kafka's own: others' records, offsets, groups and their rebalances, topics of events."""

import logging
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from datetime import UTC, datetime
from typing import Any

import pytest
from confluent_kafka import Consumer as Client
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from tests.conditions import LIMIT_S, wait_until
from tests.integration import raw_records
from tests.logs import events_in
from tests.processes import exit_of, forked
from tests.servers import HOST, free_port

import oncely
from oncely.core.errors import ConfigError, PublishRefused, TransportError
from oncely.core.message import Message
from oncely.core.verdicts import Ack, Reject, Requeue
from oncely.ledger.ledger import open_ledger
from oncely.outbox import Relay
from oncely.transports.open_transport import open_transport
from oncely.transports.transport import Delivery, Transport

_QUICK = "rdkafka.heartbeat.interval.ms=200&rdkafka.session.timeout.ms=6000"


class Broker:
    """A Kafka, and what other programs do there."""

    def __init__(self, url: str) -> None:
        self.url = f"{url}?{_QUICK}"
        self.settings: dict[str, Any] = {"bootstrap.servers": url.removeprefix("kafka://")}
        self.queue = f"jobs-{uuid.uuid4().hex[:12]}"
        """A topic that nobody else uses."""

    def create(self, name: str, partitions: int = 1, **settings: str) -> None:
        """Create a topic, whose settings have `_` for each dot."""
        config = {name.replace("_", "."): value for name, value in settings.items()}
        topic = NewTopic(name, partitions, config=config)
        client = AdminClient(self.settings)
        [made] = client.create_topics([topic]).values()
        made.result(LIMIT_S)

    def produce(self, topic: str, *records: dict[str, Any], **settings: str) -> None:
        """Publish records of another program's."""
        producer = Producer({"message.max.bytes": 2_000_000, **self.settings, **settings})
        if settings:
            producer.init_transactions(LIMIT_S)
            producer.begin_transaction()
        for record in records:
            producer.produce(topic, **record)
        if settings:
            producer.commit_transaction(LIMIT_S)
        assert producer.flush(LIMIT_S) == 0

    def committed(self, queue: str, partition: int = 0) -> int:
        """The offset that the queue's group has committed."""
        with closing(Client({**self.settings, "group.id": f"oncely-{queue}"})) as client:
            [place] = client.committed([TopicPartition(queue, partition)], timeout=LIMIT_S)
            return int(place.offset)


@pytest.fixture
def broker(kafka: str) -> Broker:
    """The Kafka that tests share."""
    return Broker(kafka)


@pytest.fixture
def late_transport(broker: Broker) -> Iterator[Transport]:
    """A transport that has made nothing yet."""
    with closing(open_transport(broker.url)) as transport:
        yield transport


@pytest.fixture
def transport(broker: Broker) -> Iterator[Transport]:
    """A transport that has made the queue."""
    with closing(open_transport(broker.url)) as transport:
        transport.subscribe(broker.queue, [])
        yield transport


def _received(transport: Transport, queue: str, number: int) -> list[Delivery]:
    deliveries: list[Delivery] = []
    while len(deliveries) < number:
        came = transport.receive(queue, number - len(deliveries), LIMIT_S)
        assert came, f"{len(deliveries)} of {number} came"
        deliveries += came
    return deliveries


def _ids(deliveries: Sequence[Delivery]) -> list[str]:
    return [delivery.message.id for delivery in deliveries]


def _publish(transport: Transport, queue: str, number: int) -> list[str]:
    ids = [str(n) for n in range(number)]
    transport.publish(queue, [Message(id_) for id_ in ids])
    return ids


# ---- Other publishers --------------------------------------------------------------------------


def test_plain_record(transport: Transport, broker: Broker) -> None:
    """What another program publishes comes out with all that it says about itself."""
    headers = [
        ("message-id", b"order-17"),
        ("type", b"order.placed"),
        ("source", b"shop"),
        ("content-type", b"text/plain"),
        ("tenant", b"a"),
        ("nothing", None),
    ]
    record = {"key": b"customer-9", "value": b"\x00\xff", "timestamp": 1_700_000_000_123}
    broker.produce(broker.queue, {**record, "headers": headers})
    [delivery] = _received(transport, broker.queue, 1)
    assert delivery.problem is None
    assert delivery.message == Message(
        "order-17",
        b"\x00\xff",
        "order.placed",
        {"tenant": "a", "nothing": ""},
        "shop",
        datetime(2023, 11, 14, 22, 13, 20, 123_000, tzinfo=UTC),
        "text/plain",
        "customer-9",
    )


def test_cloud_event(transport: Transport, broker: Broker) -> None:
    """A CloudEvent in binary mode has its id and its type, and can be read as one."""
    headers = {
        "ce_specversion": "1.0",
        "ce_id": "7",
        "ce_type": "order.placed",
        "ce_source": "shop",
    }
    broker.produce(broker.queue, {"value": b"{}", "headers": headers})
    [delivery] = _received(transport, broker.queue, 1)
    message = delivery.message
    assert (message.id, message.type, message.source) == ("7", "order.placed", "shop")
    assert Message.from_cloudevent(message.headers, message.body).type == "order.placed"


def test_id_in_another_header(broker: Broker) -> None:
    """A URL may name the header with the id, for what is received and published."""
    broker.create(broker.queue)
    broker.produce(broker.queue, {"value": b"", "headers": {"order-id": "o-1", "ce_id": "no"}})
    with closing(open_transport(f"{broker.url}&id=order-id")) as transport:
        transport.publish(broker.queue, [Message("o-2")])
        assert _ids(_received(transport, broker.queue, 2)) == ["o-1", "o-2"]


def test_headers_named_like_fields(transport: Transport, broker: Broker) -> None:
    """A header of the user's with the name of a field stays a header."""
    headers = {"type": "mine", "message-id": "no", "source": "", "content-type": "x"}
    for message in (Message("1", headers=headers), Message("2", type="t", headers=headers)):
        transport.publish(broker.queue, [message])
        [delivery] = _received(transport, broker.queue, 1)
        assert delivery.message == message


def test_unusual_records(broker: Broker, late_transport: Transport) -> None:
    """Whatever a record holds, it arrives, with its problem, and the next one, too."""
    broker.create(broker.queue, message_timestamp_after_max_ms=str(2**62))
    large = b"x" * 1_000_000
    records: list[dict[str, Any]] = [
        {"value": None, "key": b"gone", "headers": {"message-id": "tombstone"}},
        {"value": None, "key": None},
        {"value": b"1", "key": b"\xff\xfe", "headers": {"message-id": b"1", "h": b"\xff"}},
        {"value": b"2", "headers": {"message-id": b"\xff", "": "empty"}},
        {"value": large, "headers": {"message-id": "large"}},
        {"value": large + b"x", "headers": {"message-id": "larger"}},
        {"value": b"last", "headers": {"message-id": "last"}, "timestamp": 2**55},
    ]
    broker.produce(broker.queue, *records)
    transport = late_transport
    tombstone, bare, escaped, wrong, *others = _received(transport, broker.queue, len(records))
    assert (tombstone.message.id, tombstone.message.key) == ("tombstone", "gone")
    assert (tombstone.message.body, tombstone.problem) == (b"", None)
    assert tombstone.message.headers == {"kafka-tombstone": "true"}
    assert (bare.message.id, bare.message.key) == ("", None)
    assert escaped.message.key == r"\xff\xfe"
    assert escaped.message.headers == {"h": r"\xff"}
    assert (wrong.message.id, wrong.problem) == (r"\xff", "the message id is not UTF-8")
    assert _ids(others) == ["large", "larger", "last"]
    assert [each.problem for each in others] == [
        None,
        "body of 1000001 bytes is over the limit of 1000000",
        None,
    ]
    # Each can be rejected, and is in the dead letters as it came.
    deliveries = [tombstone, bare, escaped, wrong, *others]
    transport.acknowledge([(delivery, Reject("no")) for delivery in deliveries])
    dead = f"{broker.queue}.dead"
    client = Client({**broker.settings, "group.id": "any", "auto.offset.reset": "earliest"})
    with closing(client):
        client.subscribe([dead])
        letters = client.consume(len(records), timeout=LIMIT_S)
    assert [letter.value() for letter in letters] == [record["value"] for record in records]
    assert letters[2].key() == b"\xff\xfe"
    assert dict(letters[3].headers() or ())["message-id"] == b"\xff"


def test_bad_name_of_a_header(transport: Transport, broker: Broker) -> None:
    """A header whose name is not UTF-8 is a problem of its record alone."""
    raw_records.publish(broker.settings["bootstrap.servers"], broker.queue, b"\xff\xfe")
    transport.publish(broker.queue, [Message("next")])
    wrong, following = _received(transport, broker.queue, 2)
    assert wrong.problem == "the name of a header is not UTF-8"
    assert (wrong.message.body, following.message.id) == (b"raw", "next")
    transport.acknowledge([(wrong, Requeue()), (following, Ack())])
    [again] = _received(transport, broker.queue, 1)
    transport.acknowledge([(again, Reject("no"))])
    [letter] = _received(transport, f"{broker.queue}.dead", 1)
    assert letter.message.body == b"raw"


def test_bad_records_and_a_consumer(broker: Broker, sqlite_ledger_url: str) -> None:
    """Nothing ends the consumer: a record without an id and one that always fails are dead letters,
    and what a producer has published twice is handled once.
    """
    broker.create(broker.queue)
    good = {"value": b"{}", "headers": {"message-id": "good"}}
    poison = {"value": b"{", "headers": {"message-id": "poison"}}
    broker.produce(broker.queue, {"value": b"no id"}, poison, good, good)
    handled = []

    def handle(message: Message) -> None:
        message.json()
        handled.append(message.id)

    with closing(open_ledger(sqlite_ledger_url)) as ledger:
        consumer = oncely.Consumer(broker.url, broker.queue).idempotent(ledger, "shop").tries(2)
        report = consumer.backoff("10ms").consume(handle, drain=True)
        assert handled == ["good"]
        assert (report.handled, report.duplicates, report.dead_lettered) == (1, 1, 2)
        reasons = {letter.message.id: letter.reason for letter in ledger.dead("shop")}
    assert "missing id" in reasons[""] or "empty id" in reasons[""]
    assert "not JSON" in reasons["poison"] or "JSON" in reasons["poison"]
    assert broker.committed(broker.queue) == 4


# ---- Offsets -----------------------------------------------------------------------------------


def test_partial_window(broker: Broker, transport: Transport) -> None:
    """An offset is committed when all before it are acknowledged, in whatever order."""
    _publish(transport, broker.queue, 6)
    deliveries = _received(transport, broker.queue, 6)
    transport.acknowledge([(deliveries[n], Ack()) for n in (4, 0, 2)])
    transport.close()
    assert broker.committed(broker.queue) == 1
    again = _received(transport, broker.queue, 5)
    assert _ids(again) == ["1", "2", "3", "4", "5"]
    transport.acknowledge([(again[n], Ack()) for n in (1, 0, 2, 3)])
    wait_until(lambda: broker.committed(broker.queue) == 5)
    # Requeued from memory, the last is not passed.
    transport.acknowledge([(again[4], Requeue())])
    [last] = _received(transport, broker.queue, 1)
    assert not transport.is_drained(broker.queue)
    transport.acknowledge([(last, Ack())])
    wait_until(lambda: broker.committed(broker.queue) == 6)
    assert transport.is_drained(broker.queue)


def test_ends_of_transactions(broker: Broker, transport: Transport) -> None:
    """What only the broker sees after the last record does not keep a queue from being drained."""
    record = {"value": b"1", "headers": {"message-id": "1"}}
    broker.produce(broker.queue, record, **{"transactional.id": broker.queue})
    [delivery] = _received(transport, broker.queue, 1)
    transport.acknowledge([(delivery, Ack())])
    wait_until(lambda: transport.is_drained(broker.queue))
    wait_until(lambda: broker.committed(broker.queue) == 2)


def test_prefetch(broker: Broker) -> None:
    """No more than `prefetch` are unacknowledged; what is acknowledged makes room for others."""
    with closing(open_transport(f"{broker.url}&prefetch=3")) as transport:
        ids = _publish(transport, broker.queue, 20)
        taken: list[str] = []
        while len(taken) < len(ids):
            deliveries = _received(transport, broker.queue, 3 if len(taken) < 18 else 2)
            assert transport.receive(broker.queue, 10, 0.3) == []
            taken += _ids(deliveries)
            transport.acknowledge([(delivery, Ack()) for delivery in deliveries])
        assert taken == ids
        wait_until(lambda: transport.is_drained(broker.queue))


def test_long_handler(broker: Broker) -> None:
    """A handler may take longer than `max.poll.interval.ms`: the member stays in its group."""
    interval_s = 1.0
    options = (
        f"&rdkafka.max.poll.interval.ms={interval_s * 1_000:.0f}&rdkafka.session.timeout.ms=1000"
    )
    url = broker.url.replace("&rdkafka.session.timeout.ms=6000", options)
    with closing(open_transport(url)) as holder, closing(open_transport(url)) as other:
        _publish(holder, broker.queue, 1)
        [delivery] = _received(holder, broker.queue, 1)
        began = time.monotonic()
        while time.monotonic() < began + 3 * interval_s:
            assert other.receive(broker.queue, 1, interval_s / 2) == []
        holder.acknowledge([(delivery, Ack())])
        wait_until(lambda: broker.committed(broker.queue) == 1)


# ---- Groups ------------------------------------------------------------------------------------

_PROTOCOLS = ("rdkafka.partition.assignment.strategy=range", "", "rdkafka.group.protocol=consumer")


@pytest.mark.parametrize("protocol", _PROTOCOLS, ids=("eager", "cooperative", "consumer"))
def test_rebalance(broker: Broker, protocol: str, caplog: pytest.LogCaptureFixture) -> None:
    """Partitions that are given up take their deliveries with them: they are delivered to their new
    holder, and verdicts of the old one are late. What was acknowledged before is committed.
    """
    caplog.set_level(logging.INFO, "oncely")
    is_new = "protocol" in protocol
    url = f"{broker.url.partition('?')[0]}?{'' if is_new else _QUICK}&{protocol}"
    url = url.replace("?&", "?").rstrip("&")
    broker.create(broker.queue, 4)
    with ExitStack() as opened:
        first, second = (opened.enter_context(closing(open_transport(url))) for _ in range(2))
        keys = {f"k{n}" for n in range(40)}
        first.publish(
            broker.queue, [Message(f"{key}-{n}", key=key) for n in (0, 1) for key in keys]
        )
        held = _received(first, broker.queue, 80)
        # Of each key the first: in every partition some are left.
        done = [delivery for delivery in held if delivery.message.id.endswith("-0")]
        left = [delivery for delivery in held if delivery.message.id.endswith("-1")]
        first.acknowledge([(delivery, Ack()) for delivery in done])
        moved = [*second.receive(broker.queue, 100, LIMIT_S)]
        assert moved
        assert {each.message.id for each in moved} <= {each.message.id for each in left}
        caplog.clear()
        first.acknowledge([(delivery, Ack()) for delivery in left])
        assert "settled_too_late" in events_in(caplog)
        taken = {first: [*left], second: moved}

        def go_on() -> bool:
            for transport in (first, second):
                came = transport.receive(broker.queue, 100, 0.1)
                taken[transport] += came
                transport.acknowledge([(delivery, Ack()) for delivery in came])
            return first.is_drained(broker.queue) and second.is_drained(broker.queue)

        second.acknowledge([(delivery, Ack()) for delivery in moved])
        wait_until(go_on)
        both = [*taken[first], *taken[second]]
        assert {each.message.id for each in both} >= {each.message.id for each in left}


def test_rebalance_while_paused(broker: Broker) -> None:
    """A partition that was paused, and is assigned to the same process again, goes on."""
    url = f"{broker.url}&prefetch=3&rdkafka.partition.assignment.strategy=range"
    broker.create(broker.queue, 2)
    with ExitStack() as opened:
        both = [opened.enter_context(closing(open_transport(url))) for _ in range(2)]
        ids = {str(n) for n in range(40)}
        both[0].publish(broker.queue, [Message(id_, key=id_) for id_ in ids])
        # They are not acknowledged: they keep it paused until the other one comes.
        _received(both[0], broker.queue, 3)
        taken: set[str] = set()

        def are_drained() -> bool:
            for transport in both:
                came = transport.receive(broker.queue, 100, 0.2)
                taken.update(_ids(came))
                transport.acknowledge([(delivery, Ack()) for delivery in came])
            return all(transport.is_drained(broker.queue) for transport in both)

        wait_until(are_drained)
        assert taken <= ids


def test_group(broker: Broker) -> None:
    """Each group gets all messages."""
    with ExitStack() as opened:
        groups = [f"{broker.queue}-{n}" for n in range(2)]
        transports = [
            opened.enter_context(closing(open_transport(f"{broker.url}&group={group}")))
            for group in groups
        ]
        ids = _publish(transports[0], broker.queue, 5)
        for transport in transports:
            assert not transport.is_drained(broker.queue)
            deliveries = _received(transport, broker.queue, 5)
            assert _ids(deliveries) == ids
            transport.acknowledge([(delivery, Ack()) for delivery in deliveries])
            wait_until(lambda transport=transport: transport.is_drained(broker.queue))  # type: ignore[misc]


# ---- Publishing --------------------------------------------------------------------------------


def test_refused_for_content(broker: Broker, transport: Transport) -> None:
    """A record that the broker refuses does not take those of its batch with it."""
    broker.create(f"{broker.queue}-compacted", cleanup_policy="compact")
    messages = [Message("1", key="a"), Message("2"), Message("3", key="b")]
    with pytest.raises(PublishRefused) as raised:
        transport.publish(f"{broker.queue}-compacted", messages)
    assert [*raised.value.refused] == [1]
    assert _ids(_received(transport, f"{broker.queue}-compacted", 2)) == ["1", "3"]
    broker.create(f"{broker.queue}-small", max_message_bytes="1000")
    many = [Message(str(n), b"x" * (2_000 if n == 7 else 100)) for n in range(20)]
    with pytest.raises(PublishRefused, match=r"message 7: '.*-small': ") as raised:
        transport.publish(f"{broker.queue}-small", many)
    assert [*raised.value.refused] == [7]
    assert len(_received(transport, f"{broker.queue}-small", 19)) == 19


def test_deleted_topic(broker: Broker) -> None:
    """A topic that is deleted is created again for who publishes again."""
    with closing(open_transport(f"{broker.url}&confirm_timeout=2s")) as transport:
        transport.publish(broker.queue, [Message("1")])
        client = AdminClient(broker.settings)
        [deleted] = client.delete_topics([broker.queue], operation_timeout=LIMIT_S).values()
        deleted.result(LIMIT_S)

        def is_published() -> bool:
            try:
                transport.publish(broker.queue, [Message("2")])
            except PublishRefused:
                raise
            except TransportError:
                return False
            return True

        wait_until(is_published)
        assert _ids(_received(transport, broker.queue, 1)) == ["2"]


def test_not_a_topic(transport: Transport) -> None:
    """A name that no topic can have says so, and what to write."""
    for name in ("a:b", "é", "..", "a b"):
        with pytest.raises(ConfigError, match="cannot be a topic's name on Kafka; write "):
            transport.publish(name, [Message("1")])


def test_events(broker: Broker) -> None:
    """Events are in topics of their types, which groups read that subscribe to them."""
    kind = broker.queue.replace("-", ".")
    with (
        closing(open_transport(broker.url)) as shop,
        closing(open_transport(broker.url)) as audit,
    ):
        shop.subscribe(broker.queue, [f"{kind}.placed"])
        shop.publish(f"events:{kind}.placed", [Message("1"), Message("2", type="own")])
        with pytest.raises(PublishRefused, match="there is no topic"):
            shop.publish(f"events:{kind}.paid", [Message("3")])
        shop.publish(broker.queue, [Message("4")])
        deliveries = _received(shop, broker.queue, 3)
        types = {each.message.id: each.message.type for each in deliveries}
        assert types == {"1": f"{kind}.placed", "2": "own", "4": ""}
        shop.acknowledge([(deliveries[0], Ack()), (deliveries[1], Ack())])
        assert not shop.is_drained(broker.queue)
        audit.subscribe(f"{broker.queue}-audit", [f"{kind}.*", "#"])
        assert sorted(_ids(_received(audit, f"{broker.queue}-audit", 2))) == ["1", "2"]


def test_relay(broker: Broker, transport: Transport, sqlite_ledger_url: str) -> None:
    """A relay publishes to Kafka what was sent in a ledger, with its key."""
    with closing(open_ledger(sqlite_ledger_url)) as ledger:

        def handle(message: Message) -> None:
            message.send(broker.queue, Message("out", b"{}", key="k"))

        oncely.publish(transport, f"{broker.queue}-in", Message("in"))
        consumer = oncely.Consumer(broker.url, f"{broker.queue}-in").idempotent(ledger, "shop")
        consumer.consume(handle, drain=True)
        Relay(ledger, transport).drain(threading.Event())
    [delivery] = _received(transport, broker.queue, 1)
    assert (delivery.message.id, delivery.message.key) == ("out", "k")


# ---- A broker that is away ---------------------------------------------------------------------


def test_nobody_there(broker: Broker) -> None:
    """A cluster that cannot be reached is a TransportError, for whoever asks."""
    with closing(open_transport(f"kafka://{HOST}:{free_port()}?confirm_timeout=5s")) as transport:
        for call in (
            lambda: transport.subscribe("orders", []),
            lambda: transport.receive("orders", 1, 0.1),
            lambda: transport.publish("orders", [Message("1")]),
        ):
            with pytest.raises(TransportError, match=r"^Kafka: "):
                call()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_fork(broker: Broker, transport: Transport) -> None:
    """A forked child has clients of its own, and no say in what its parent holds."""
    _publish(transport, broker.queue, 1)
    [held] = _received(transport, broker.queue, 1)

    def publish() -> None:
        transport.acknowledge([(held, Reject("not mine"))])
        transport.publish(broker.queue, [Message("child's")])
        transport.close()

    assert exit_of(forked(publish)) == 0
    [other] = _received(transport, broker.queue, 1)
    assert other.message.id == "child's"
    transport.acknowledge([(held, Requeue()), (other, Ack())])
    assert _ids(_received(transport, broker.queue, 1)) == ["0"]
    client = AdminClient(broker.settings)
    assert f"{broker.queue}.dead" not in client.list_topics(timeout=LIMIT_S).topics


def test_closing_while_receiving(broker: Broker) -> None:
    """A receiver that waits, in a group that has nothing for it, returns when it is closed."""
    with closing(open_transport(broker.url)) as transport, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(transport.receive, broker.queue, 1, LIMIT_S)
        wait_until(lambda: broker.queue in transport._session.intakes)  # type: ignore[attr-defined]
        transport.close()
        assert waiting.result(LIMIT_S) == []
