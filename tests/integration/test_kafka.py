"""Kafka passes the suite of transports; others' records, offsets, groups and their rebalances."""

import ctypes
import logging
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from datetime import UTC, datetime
from pathlib import Path
from threading import Event
from time import monotonic
from typing import Any

import confluent_kafka
import pytest
from confluent_kafka import Consumer as Client
from confluent_kafka import KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourceType,
)
from prometheus_client import CollectorRegistry
from tests.conditions import LIMIT_S, wait_until
from tests.conformance.test_transports import BrokersClock
from tests.logs import events_in
from tests.processes import exit_of, forked
from tests.servers import HOST, create_topic, free_port

from oncely import Consumer, ops
from oncely.core.errors import ConfigError, PublishRefused, TransportError
from oncely.core.message import Message
from oncely.core.verdicts import Ack, Reject, Requeue
from oncely.ledger.ledger import open_ledger
from oncely.metrics import Metrics
from oncely.testing import TransportSuite
from oncely.testing.delivery_suite import ids_of, nothing_comes, received
from oncely.transports.kafka import intake, kafka_transport
from oncely.transports.open_transport import open_transport
from oncely.transports.transport import Delivery, Transport

_QUICK = "heartbeat.interval.ms=200&session.timeout.ms=6000"


class TestKafka(TransportSuite):
    """The suite on Kafka, with topics of one partition."""

    @pytest.fixture
    def clock(self) -> BrokersClock:
        return BrokersClock()

    @pytest.fixture
    def connect(self, kafka_url: str) -> Iterator[Callable[[], Transport]]:
        with ExitStack() as opened:
            yield lambda: opened.enter_context(closing(open_transport(kafka_url)))


class Broker:
    """A Kafka, a topic there that nobody else uses, and what other programs do."""

    def __init__(self, url: str, opened: ExitStack) -> None:
        self.url, self.queue = f"{url}?{_QUICK}", f"jobs-{uuid.uuid4().hex[:12]}"
        self.settings: dict[str, Any] = {"bootstrap.servers": url.removeprefix("kafka://")}
        self._opened = opened

    def open(self, options: str = "") -> Transport:
        """A transport, until the test ends."""
        return self._opened.enter_context(closing(open_transport(f"{self.url}&{options}")))

    def create(self, partitions: int = 1, **settings: str) -> None:
        """Create the topic."""
        create_topic(self.settings["bootstrap.servers"], self.queue, partitions, **settings)

    def produce(self, *records: dict[str, Any], **settings: str) -> None:
        """Publish records of another program's, in a transaction if settings name one."""
        producer = Producer({"message.max.bytes": 2_000_000, **self.settings, **settings})
        if settings:
            producer.init_transactions(LIMIT_S)
            producer.begin_transaction()
        for record in records:
            producer.produce(self.queue, **record)
        if settings:
            producer.commit_transaction(LIMIT_S)
        assert producer.flush(LIMIT_S) == 0

    def received(self, transport: Transport, number: int) -> list[Delivery]:
        """So many deliveries."""
        return received(transport, number, queue=self.queue)

    def published(self, transport: Transport, number: int) -> list[Delivery]:
        """So many messages, published and received."""
        transport.publish(self.queue, [Message(str(n), key=f"k{n}") for n in range(number)])
        return self.received(transport, number)

    def committed(self) -> int:
        """The offset that the queue's group has committed in the first partition."""
        with closing(Client({**self.settings, "group.id": f"oncely-{self.queue}"})) as client:
            [place] = client.committed([TopicPartition(self.queue, 0)], timeout=LIMIT_S)
            return int(place.offset)

    def drain(self, *transports: Transport) -> list[str]:
        """The ids that these receive, and acknowledge, until nothing is left."""
        taken: list[str] = []

        def is_drained() -> bool:
            for transport in transports:
                came = transport.receive(self.queue, 100, 0.1)
                taken.extend(ids_of(came))
                transport.acknowledge([(delivery, Ack()) for delivery in came])
            return all(transport.is_drained(self.queue) for transport in transports)

        wait_until(is_drained)
        return taken


@pytest.fixture
def broker(kafka: str) -> Iterator[Broker]:
    """The Kafka that tests share."""
    with ExitStack() as opened:
        yield Broker(kafka, opened)


# ---- Records -----------------------------------------------------------------------------------

_FIELDS = [
    *(("message-id", b"o-17"), ("type", b"placed"), ("source", b"shop"), ("tenant", b"a")),
    *(("content-type", b"text/plain"), ("nothing", None)),
]
_EVENT = {"ce_specversion": "1.0", "ce_id": "7", "ce_type": "placed", "ce_source": "shop"}
_USERS = {"tenant": "a", "nothing": ""}
_AT = datetime(2023, 11, 14, 22, 13, 20, 123_000, tzinfo=UTC)


@pytest.mark.parametrize(
    ("options", "headers", "expected"),
    [
        ("", _FIELDS, Message("o-17", b"{}", "placed", _USERS, "shop", _AT, "text/plain", "c-9")),
        ("", _EVENT, Message('["shop","7"]', b"{}", "placed", _EVENT, "shop", _AT, key="c-9")),
        ("id=ce_id", {"ce_id": "7", "message-id": "no"}, None),
    ],
    ids=["fields", "event", "id"],
)
def test_records(broker: Broker, options: str, headers: Any, expected: Message | None) -> None:
    """What another program publishes comes out with all that it says about itself."""
    transport = broker.open(options)
    transport.subscribe(broker.queue, [])
    broker.produce(
        {"key": b"c-9", "value": b"{}", "timestamp": 1_700_000_000_123, "headers": headers}
    )
    [delivery] = broker.received(transport, 1)
    assert delivery.problem is None
    if expected is not None:
        assert delivery.message == expected
    else:
        transport.publish(broker.queue, [Message("8")])
        assert [delivery.message.id, *ids_of(broker.received(transport, 1))] == ["7", "8"]


def test_headers_named_like_fields(broker: Broker) -> None:
    """A header of the user's with the name of a field stays a header."""
    headers = {"type": "mine", "message-id": "no", "source": "", "content-type": "x"}
    messages = [Message("1", headers=headers), Message("2", type="t", headers=headers)]
    transport = broker.open()
    transport.publish(broker.queue, messages)
    assert [each.message for each in broker.received(transport, 2)] == messages


def test_unusual_records(broker: Broker) -> None:
    """Whatever a record holds, it arrives, with its problem, and is a dead letter as it came."""
    broker.create(1, **{"message.timestamp.after.max.ms": str(2**62)})
    large = b"x" * 1_000_000
    records: list[dict[str, Any]] = [
        {"value": None, "key": b"gone", "headers": {"message-id": "tombstone"}},
        {"value": None, "key": None},
        {"value": b"1", "key": b"\xff\xfe", "headers": {"message-id": b"1", "h": b"\xff"}},
        {"value": b"2", "headers": {"message-id": b"\xff", "": "empty"}},
        {"value": b"3", "headers": {**_EVENT, "ce_source": ""}},
        {"value": large, "headers": {"message-id": "large"}},
        {"value": large + b"x", "headers": {"message-id": "larger"}},
        {"value": b"last", "headers": {"message-id": "last"}, "timestamp": 2**55},
    ]
    broker.produce(*records)
    transport = broker.open()
    deliveries = broker.received(transport, len(records))
    tombstone, bare, escaped, *_ = (delivery.message for delivery in deliveries)
    assert tombstone == Message(
        "tombstone", headers={"kafka-tombstone": "true"}, time=tombstone.time, key="gone"
    )
    assert (bare.id, bare.key) == ("", None)
    assert (escaped.key, escaped.headers) == (r"\xff\xfe", {"h": r"\xff"})
    assert ids_of(deliveries[3:]) == [r"\xff", "", "large", "larger", "last"]
    problems = [delivery.problem or "" for delivery in deliveries]
    assert problems[3:7] == [
        "the message id is not UTF-8",
        "empty source",
        "",
        "body of 1000001 bytes is over the limit of 1000000",
    ]
    assert not any(problems[:3] + problems[7:])
    transport.acknowledge([(delivery, Reject("no")) for delivery in deliveries])
    letters = received(transport, len(records), queue=f"{broker.queue}.dead")
    assert [each.message for each in letters] == [each.message for each in deliveries]
    assert [each.tag.record[:2] for each in letters] == [each.tag.record[:2] for each in deliveries]


def test_bad_name_of_a_header(broker: Broker) -> None:
    """A header whose name is not UTF-8 is a problem of its record alone."""
    transport = broker.open()
    transport.subscribe(broker.queue, [])
    produce_raw(broker, b"\xff\xfe")
    transport.publish(broker.queue, [Message("next")])
    wrong, following = broker.received(transport, 2)
    assert wrong.problem == "the name of a header is not UTF-8"
    assert (wrong.message.body, following.message.id) == (b"raw", "next")
    transport.acknowledge([(wrong, Requeue()), (following, Ack())])
    [again] = broker.received(transport, 1)
    transport.acknowledge([(again, Reject("no"))])
    [letter] = received(transport, 1, queue=f"{broker.queue}.dead")
    assert letter.message.body == b"raw"


def produce_raw(broker: Broker, header: bytes) -> None:
    """Publish a record that Python's client cannot publish, by the librdkafka which it brings."""
    [file] = Path(confluent_kafka.__file__).parents[1].glob("confluent_kafka.libs/librdkafka-*")
    library = ctypes.CDLL(str(file))
    for name in ("conf_new", "new", "headers_new"):
        getattr(library, f"rd_kafka_{name}").restype = ctypes.c_void_p
    conf = ctypes.c_void_p(library.rd_kafka_conf_new())
    servers = broker.settings["bootstrap.servers"].encode()
    library.rd_kafka_conf_set(conf, b"bootstrap.servers", servers, None, 0)
    client = ctypes.c_void_p(library.rd_kafka_new(0, conf, None, 0))
    headers = ctypes.c_void_p(library.rd_kafka_headers_new(1))
    library.rd_kafka_header_add(headers, header, len(header), b"x", 1)
    # Topic (1), value (4) and headers (10), up to a 0.
    value = (4, b"raw", ctypes.c_size_t(3))
    topic = (1, broker.queue.encode())
    assert library.rd_kafka_producev(client, *topic, *value, 10, headers, 0) == 0
    assert library.rd_kafka_flush(client, 60_000) == 0


# ---- Offsets -----------------------------------------------------------------------------------


def test_partial_window(broker: Broker) -> None:
    """An offset is committed when all before it are acknowledged, in whatever order."""
    transport = broker.open()
    deliveries = broker.published(transport, 6)
    transport.acknowledge([(deliveries[n], Ack()) for n in (4, 0, 2)])
    transport.close()
    assert broker.committed() == 1
    again = broker.received(transport, 5)
    assert ids_of(again) == ["1", "2", "3", "4", "5"]
    transport.acknowledge([(again[n], Ack()) for n in (1, 0, 2)])
    wait_until(lambda: broker.committed() == 4)
    # Requeued from memory, and in their order, the last are not passed.
    transport.acknowledge([(delivery, Requeue()) for delivery in again[3:]])
    last = broker.received(transport, 2)
    assert ids_of(last) == ["4", "5"]
    assert not transport.is_drained(broker.queue)
    transport.acknowledge([(delivery, Ack()) for delivery in last])
    assert transport.is_drained(broker.queue)
    wait_until(lambda: broker.committed() == 6)


def test_ends_of_transactions(broker: Broker) -> None:
    """What only the broker sees after the last record does not keep a queue from being drained."""
    broker.create()
    broker.produce({"value": b"1"}, **{"transactional.id": broker.queue})
    transport = broker.open()
    [delivery] = broker.received(transport, 1)
    transport.acknowledge([(delivery, Ack())])
    wait_until(lambda: transport.is_drained(broker.queue))
    wait_until(lambda: broker.committed() == 2)


def test_new_coordinator(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a queue is drained is asked again of a broker that is about to know; not for ever."""
    transport = broker.open()
    broker.published(transport, 1)
    ask, loading = AdminClient.list_consumer_group_offsets, [14, 15, 16]

    def asked(*given: Any, **options: Any) -> Any:
        if loading:
            raise KafkaException(KafkaError(loading.pop()))
        return ask(*given, **options)

    monkeypatch.setattr(AdminClient, "list_consumer_group_offsets", asked)
    assert not transport.is_drained(broker.queue)
    loading += [14] * 1_000_000
    monkeypatch.setattr(kafka_transport, "_ASK_S", 0.2)
    with pytest.raises(TransportError, match="oordinator load in progress"):
        transport.is_drained(broker.queue)


def test_prefetch(broker: Broker) -> None:
    """No more than `prefetch` are unacknowledged; what is acknowledged makes room for others."""
    transport, taken = broker.open("prefetch=3"), list[str]()
    deliveries = broker.published(transport, 3)
    transport.publish(broker.queue, [Message(str(n)) for n in range(3, 20)])
    while deliveries:
        assert nothing_comes(transport, queue=broker.queue)
        taken += ids_of(deliveries)
        transport.acknowledge([(delivery, Ack()) for delivery in deliveries])
        deliveries = broker.received(transport, min(3, 20 - len(taken)))
    assert taken == [str(n) for n in range(20)]
    assert transport.is_drained(broker.queue)


def test_large_messages(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many of them `prefetch` allows, a process holds only so many bytes."""
    monkeypatch.setattr(intake, "_HELD_BYTES", 300_000)
    # What librdkafka has fetched arrives at once: a message at a time.
    fetching = "max.partition.fetch.bytes=1000&queued.max.messages.kbytes=1"
    transport = broker.open(f"{fetching}&fetch.queue.backoff.ms=10")
    for number in range(12):
        transport.publish(broker.queue, [Message(str(number), b"x" * 100_000)])
    taken = list[str]()
    while len(taken) < 12:
        deliveries = broker.received(transport, 1)
        while come := transport.receive(broker.queue, 12, 2):
            deliveries += come
        assert len(deliveries) <= 6
        taken += ids_of(deliveries)
        transport.acknowledge([(delivery, Ack()) for delivery in deliveries])
    assert taken == [str(n) for n in range(12)]


def test_long_handler(broker: Broker) -> None:
    """A handler may take longer than `max.poll.interval.ms`: the member stays in its group."""
    options = "max.poll.interval.ms=6000"
    holder, other = broker.open(options), broker.open(options)
    [delivery] = broker.published(holder, 1)
    for _ in range(18):
        assert not other.receive(broker.queue, 1, 0.5)
    holder.acknowledge([(delivery, Ack())])
    wait_until(lambda: broker.committed() == 1)


# ---- Groups ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    ["partition.assignment.strategy=range", "", "group.protocol=consumer"],
    ids=["eager", "cooperative", "consumer"],
)
def test_rebalance(broker: Broker, options: str, caplog: pytest.LogCaptureFixture) -> None:
    """Partitions that are given up take their deliveries with them: they are delivered to their new
    holder, and verdicts of the old one are late. What was acknowledged before is committed.
    """
    caplog.set_level(logging.INFO, "oncely")
    if "protocol" in options:
        # There, the broker says how often.
        broker.url = broker.url.partition("?")[0] + "?"
    broker.create(4)
    options += "&auto.commit.interval.ms=3600000"  # Never, but when it is given up.
    first, second = broker.open(options), broker.open(options)
    held = broker.published(first, 80)
    # In every partition the first ones are done, and some are left.
    done = [delivery for delivery in held if int(delivery.message.id) < 40]
    left = [delivery for delivery in held if delivery not in done]
    first.acknowledge([(delivery, Ack()) for delivery in done])
    moved = second.receive(broker.queue, 100, LIMIT_S)
    assert moved
    assert {*ids_of(moved)} <= {*ids_of(left)}
    first.acknowledge([(delivery, Ack()) for delivery in left])
    assert "acknowledged_too_late" in events_in(caplog)
    second.acknowledge([(delivery, Ack()) for delivery in moved])
    first.close()
    assert {*broker.drain(second)} <= {*ids_of(left)}


def test_rebalance_while_paused(broker: Broker) -> None:
    """A partition that was paused, and is assigned to the same process again, goes on."""
    broker.create(2)
    both = [broker.open("prefetch=3&partition.assignment.strategy=range") for _ in range(2)]
    # They are not acknowledged: they keep it paused until the other one comes.
    broker.published(both[0], 3)
    ids = {str(n) for n in range(3, 40)}
    both[0].publish(broker.queue, [Message(id_, key=id_) for id_ in ids])
    assert {*broker.drain(*both)} >= ids


def test_groups(broker: Broker) -> None:
    """Each group gets all messages."""
    one, other = (broker.open(f"group={broker.queue}-{n}") for n in range(2))
    ids = ids_of(broker.published(one, 5))
    assert not other.is_drained(broker.queue)
    assert broker.drain(other) == ids
    assert not one.is_drained(broker.queue)


# ---- Dead letters ------------------------------------------------------------------------------


def test_refused_dead_letter(broker: Broker) -> None:
    """A dead letter that its topic does not take is delivered again; what else was acknowledged is
    done.
    """
    transport, topic = broker.open(), f"{broker.queue}.dead"
    create_topic(broker.settings["bootstrap.servers"], topic, 1, **{"max.message.bytes": "1000"})
    transport.publish(broker.queue, [Message("1"), Message("2", b"x" * 2_000), Message("3")])
    rejected, larger, done = broker.received(transport, 3)
    with pytest.raises(TransportError, match=r"^dead letters: .* too large"):
        transport.acknowledge([(rejected, Reject("no")), (larger, Reject("no")), (done, Ack())])

    def is_taken() -> bool:
        [again] = broker.received(transport, 1)
        with suppress(TransportError):
            transport.acknowledge([(again, Reject("no"))])
            return True
        return False

    assert not is_taken()
    assert not transport.is_drained(broker.queue)
    wider = ConfigEntry("max.message.bytes", "9000", incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[wider])
    client = AdminClient(broker.settings)
    [altered] = client.incremental_alter_configs([resource]).values()
    altered.result(LIMIT_S)
    wait_until(is_taken)
    assert transport.is_drained(broker.queue)
    letters = received(transport, 2, queue=topic)
    assert ids_of(letters) == ["1", "2"]
    assert nothing_comes(transport, queue=topic)


def test_no_topic_for_dead_letters(broker: Broker, caplog: pytest.LogCaptureFixture) -> None:
    """Where no topic can have their name, a consumer says so, goes on, and takes no whole core."""
    broker.queue = f"{broker.queue}-".ljust(249, "x")
    broker.create()
    broker.produce({"value": b"1", "headers": {"message-id": b"\xff"}})
    broker.open().publish(broker.queue, [Message("2")])
    handled, consumer = Event(), Consumer(broker.url, broker.queue)
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(consumer.consume, lambda _: handled.set())
        wait_until(lambda: running.done() or events_in(caplog).count("rejected") > 1)
        assert handled.is_set()
        begun, before = monotonic(), events_in(caplog).count("rejected")
        wait_until(lambda: monotonic() > begun + 2)
        consumer.stop()
        running.result(LIMIT_S)
    assert 1 <= events_in(caplog).count("rejected") - before <= 4
    assert "acknowledging_failed" in events_in(caplog)


# ---- Publishing --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "value", "refused"),
    [
        ("cleanup.policy", "compact", Message("7")),
        ("max.message.bytes", "1000", Message("7", b"x" * 2_000, key="k")),
    ],
)
def test_refused_for_content(broker: Broker, setting: str, value: str, refused: Message) -> None:
    """A record that the broker refuses does not take those of its batch with it."""
    broker.create(1, **{setting: value})
    messages = [Message(str(n), b"x" * 100, key="k") for n in range(20)]
    messages[7] = refused
    transport = broker.open()
    with pytest.raises(PublishRefused, match=f"message 7: '{broker.queue}': ") as raised:
        transport.publish(broker.queue, messages)
    assert [*raised.value.refused] == [7]
    assert {*ids_of(broker.received(transport, 19))} == {str(n) for n in range(20)} - {"7"}


@pytest.mark.parametrize("limit", ["messages=2", "kbytes=1"])
def test_full_buffer(broker: Broker, limit: str) -> None:
    """What does not fit into librdkafka's buffer waits there for room; a message that never fits is
    refused.
    """
    transport = broker.open(f"queue.buffering.max.{limit}")
    transport.publish(broker.queue, [Message(str(n), b"x" * 400) for n in range(20)])
    larger = [Message("20"), Message("21", b"x" * 2_000), Message("22")]
    if "kbytes" in limit:
        with pytest.raises(PublishRefused, match=r"message 1: .* too large") as raised:
            transport.publish(broker.queue, larger)
        assert [*raised.value.refused] == [1]
    else:
        transport.publish(broker.queue, larger)
    count = 22 if "kbytes" in limit else 23
    assert len({*ids_of(broker.received(transport, count))}) == count


def test_deleted_topic(broker: Broker) -> None:
    """A topic that is deleted is created again for who publishes again."""
    transport = broker.open("message.timeout.ms=2000")
    transport.publish(broker.queue, [Message("1")])
    client = AdminClient(broker.settings)
    [deleted] = client.delete_topics([broker.queue], operation_timeout=LIMIT_S).values()
    deleted.result(LIMIT_S)

    def is_published() -> bool:
        with suppress(TransportError):
            transport.publish(broker.queue, [Message("2")])
            return True
        return False

    wait_until(is_published)
    assert ids_of(broker.received(transport, 1)) == ["2"]


def test_events(broker: Broker) -> None:
    """Events are in topics of their types, which groups read that subscribe to them."""
    kind, shop, audit = broker.queue.replace("-", "."), broker.open(), broker.open()
    shop.subscribe(broker.queue, [f"{kind}.placed"])
    shop.publish(f"events:{kind}.placed", [Message("1"), Message("2", type="own")])
    with pytest.raises(PublishRefused, match=f"there is no topic '{kind}.paid'"):
        shop.publish(f"events:{kind}.paid", [Message("3")])
    shop.publish(broker.queue, [Message("4")])
    deliveries = broker.received(shop, 3)
    types = {each.message.id: each.message.type for each in deliveries}
    assert types == {"1": f"{kind}.placed", "2": "own", "4": ""}
    shop.acknowledge([(each, Ack()) for each in deliveries if each.message.id != "2"])
    assert not shop.is_drained(broker.queue)
    audit.subscribe(f"{broker.queue}-audit", [f"{kind}.*", "#"])
    assert sorted(ids_of(received(audit, 2, queue=f"{broker.queue}-audit"))) == ["1", "2"]


@pytest.mark.parametrize("name", ["a:b", "é", "..", "a b"])
def test_not_a_topic(broker: Broker, name: str) -> None:
    """A name that no topic can have says so, and what to write."""
    with pytest.raises(ConfigError, match=r"destination: .* write "):
        broker.open().publish(name, [Message("1")])


# ---- Brokers and processes that are away -------------------------------------------------------


def test_nobody_there() -> None:
    """A cluster that cannot be reached is a TransportError."""
    with closing(open_transport(f"kafka://{HOST}:{free_port()}")) as transport:
        with pytest.raises(TransportError, match=r"^Kafka: .*onnection refused"):
            transport.receive("orders", 1, 0.1)
        with pytest.raises(TransportError, match=r"^Kafka: .*onnection refused"):
            transport.publish("orders", [Message("1")])


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_fork(broker: Broker) -> None:
    """A forked child has clients of its own, and no say in what its parent holds."""
    transport = broker.open()
    [held] = broker.published(transport, 1)

    def publish() -> None:
        transport.acknowledge([(held, Reject("not mine"))])
        transport.publish(broker.queue, [Message("child's")])
        transport.close()

    assert exit_of(forked(publish)) == 0
    [other] = broker.received(transport, 1)
    assert other.message.id == "child's"
    transport.acknowledge([(held, Requeue()), (other, Ack())])
    assert ids_of(broker.received(transport, 1)) == ["0"]
    topics = AdminClient(broker.settings).list_topics(timeout=LIMIT_S).topics
    assert f"{broker.queue}.dead" not in topics


# ---- How far consumers are behind --------------------------------------------------------------


def test_lag(broker: Broker, tmp_path: Path) -> None:
    """Status, metrics and dashboard know what a living consumer has not handled: in all partitions,
    also those of others.
    """
    broker.create(partitions=2)
    transport, registry, go = broker.open(), CollectorRegistry(), Event()
    messages = [Message(str(number), key=str(number)) for number in range(9)]
    transport.publish(broker.queue, messages)
    consumer = Consumer(broker.url, broker.queue).window(1)
    with (
        closing(open_ledger(f"sqlite:///{tmp_path / 'l.db'}")) as ledger,
        ThreadPoolExecutor(1) as thread,
    ):
        ledger.migrate()
        Metrics(registry).watch(ledger)
        name = f"kafka:{broker.queue}"

        def told() -> object:
            ledger.recorder.tell()
            sample = registry.get_sample_value("oncely_broker_lag", {"queue": name})
            queues = ops.status(ledger).queues
            return queues[name].waiting if queues and queues[name].waiting == sample else None

        consuming = consumer.idempotent(ledger, "billing").consume
        running = thread.submit(consuming, lambda _: go.wait(LIMIT_S))
        wait_until(lambda: told() == 9)
        go.set()
        wait_until(lambda: told() == 0)
        consumer.stop()
        running.result()
        ledger.recorder.tell()
        assert not ops.status(ledger).queues
