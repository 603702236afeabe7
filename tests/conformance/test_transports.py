"""Each kind of transport passes the suite; URLs; processes that share a queue, and die."""

import logging
import os
import random
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from tests.conformance.conftest import ledger_url_of
from tests.logs import events_in
from tests.processes import exit_of, forked
from tests.records import granted

from oncely._util import sqlite_files
from oncely.core.errors import ConfigError, PublishRefused, TransportError
from oncely.core.message import Message
from oncely.core.record import Key
from oncely.core.verdicts import Ack, Reject, Requeue
from oncely.ledger.ledger import open_ledger
from oncely.stores.memory_store import MemoryStore
from oncely.stores.sql import SqlStore
from oncely.stores.sql.engines import sqlite_engine
from oncely.testing import ManualClock, TransportSuite
from oncely.testing.delivery_suite import RedeliverySuite
from oncely.transports.open_transport import open_transport
from oncely.transports.store_transport import StoreTransport
from oncely.transports.transport import Delivery, Transport

_DEADLINE_S = 120.0
_KILLS = int(os.environ.get("ONCELY_TEST_KILLS", "3"))
_QUEUE = "orders"

Connect = Callable[[], Transport]
OpenSql = Callable[..., SqlStore]


class TestStoreTransport(TransportSuite):
    """The suite on StoreTransport, in memory."""

    @pytest.fixture
    def connect(self, clock: ManualClock) -> Connect:
        store = MemoryStore(clock)
        return lambda: StoreTransport(store)


class TestQueuesInSqlite(TransportSuite):
    """The suite on StoreTransport, in a file."""

    @pytest.fixture
    def connect(self, clock: ManualClock, tmp_path: Path) -> Iterator[Connect]:
        with ExitStack() as opened:
            yield lambda: opened.enter_context(
                closing(StoreTransport(SqlStore(sqlite_engine(tmp_path / "queue.db"), clock=clock)))
            )


class TestQueuesOnServers(RedeliverySuite):
    """What StoreTransport has statements for that hold messages, on servers."""

    @pytest.fixture(params=["postgresql", "mysql"])
    def connect(
        self, clock: ManualClock, request: pytest.FixtureRequest, open_sql: OpenSql
    ) -> Iterator[Connect]:
        url = ledger_url_of(request.param, request)
        with ExitStack() as opened:
            yield lambda: opened.enter_context(closing(StoreTransport(open_sql(url, clock))))


class BrokersClock:
    """The clock of a broker that nobody can move, and on which nothing here depends."""

    def advance(self, seconds: float) -> None:
        """It goes on by itself."""


class _OnRabbitmq:
    """The broker, and the kind of its queues."""

    options = ""

    @pytest.fixture
    def clock(self) -> BrokersClock:
        return BrokersClock()

    @pytest.fixture
    def connect(self, rabbitmq_url: str) -> Iterator[Connect]:
        with ExitStack() as opened:
            yield lambda: opened.enter_context(
                closing(open_transport(f"{rabbitmq_url}{self.options}"))
            )


class TestRabbitmqClassic(_OnRabbitmq, TransportSuite):
    """The suite on RabbitMQ with classic queues."""

    options = "?queue_type=classic"


class TestRabbitmqQuorum(_OnRabbitmq, RedeliverySuite):
    """What differs with quorum queues: they count deliveries."""


@pytest.fixture
def url(tmp_path: Path) -> str:
    """The URL of a SQLite file that does not exist yet."""
    return f"sqlite:///{tmp_path / 'queue.db'}"


@pytest.fixture
def transport(url: str) -> Iterator[Transport]:
    """A transport on the file at `url`."""
    with closing(open_transport(url)) as transport:
        yield transport


@pytest.fixture(params=["memory", "sqlite"])
def each(request: pytest.FixtureRequest, url: str) -> Iterator[Transport]:
    """A transport of each kind, by its URL."""
    of_its_own = f"memory://{request.node.name}"
    with closing(open_transport(url if request.param == "sqlite" else of_its_own)) as transport:
        yield transport


def _publish(transport: Transport, number: int) -> list[str]:
    ids = [str(n) for n in range(number)]
    transport.publish(_QUEUE, [Message(id_) for id_ in ids])
    return ids


def _ids(deliveries: Sequence[Delivery]) -> list[str]:
    return [delivery.message.id for delivery in deliveries]


# ---- URLs --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://guest:secret@localhost/", r'not of a known kind; write "sqlite:///queue.db"'),
        ("amqp://", 'names no broker; write "amqp://localhost"'),
        ("amqp://guest:secret@localhost:port/", "is not an address of a broker"),
        ("amqp://localhost?prefetch=0", "prefetch: '0' is not a whole number"),
        ("amqp://localhost?prefetch=65536", "prefetch: 65536 is more than 65535"),
        ("amqp://localhost?queue_type=stream", "queue_type: 'stream' is none of quorum, classic"),
        ("amqp://localhost?exchange=", "exchange: it has no name"),
        ("amqp://localhost?confirm_timeout=0s", 'confirm_timeout: .*write "30s"'),
        ("amqp://localhost?visibility=5m", "'visibility' is none of prefetch, queue_type"),
        ("amqps://localhost?cafile=missing.pem", "cafile: 'missing.pem' cannot be read"),
        ("amqps://localhost?keyfile=missing.key", "keyfile: 'missing.key' cannot be read"),
        ("amqp://localhost?certfile=client.pem", 'begin the URL with "amqps://"'),
        ("kafka://", 'names no broker; write "kafka://localhost:9092"'),
        ("kafka://u:secret@host:port", 'not an address of brokers; write "kafka://host:9092'),
        ("kafka://host/path", "not an address of brokers"),
        ("kafka://host?colour=blue", "there are id, prefetch, max_bytes, group"),
        ("kafka://host?prefetch=0", "prefetch: '0' is not a whole number"),
        ("kafka://host?colour=blue", 'property: "colour"'),
        ("kafka://host?fetch.min.bytes=many", '"fetch.min.bytes"'),
        ("kafka://u:secret@host?ssl.ca.location=missing.pem", "ssl.ca.location"),
        ("kafka://host?request.required.acks=1", "must be set to `all`"),
        ("kafka://host?acks=1", "acks: messages depend on it; leave it out"),
        ("queue.db", "not of a known kind"),
        ("", "not of a known kind"),
        ("memory", 'write "memory://name"'),
        ("memory://", 'write "memory://name"'),
        ("sqlite://", 'write "sqlite:///queue.db"'),
        ("sqlite:///", 'write "sqlite:///queue.db"'),
        ("sqlite://queue.db", 'write "sqlite:///queue.db"'),
        ("sqlite:///missing/queue.db", "its folder does not exist"),
        ("memory://q?visibility=30", 'visibility: .*write "30s"'),
        ("memory://q?visibility", "visibility: "),
        ("memory://q?visibility=0s", 'visibility: .*write "60s"'),
        ("memory://q?max_bytes=1k", "max_bytes: '1k' is not a whole number"),
        ("memory://q?max_bytes=0", "max_bytes: '0' is not a whole number"),
        ("sqlite:///queue.db?colour=blue", "'colour' is none of visibility, max_bytes, table"),
        ("sqlite:///queue.db?schema=shop", "schema: 'shop': only PostgreSQL"),
        ("postgresql://user:secret@localhost", "transport: .* names no database"),
        ("postgresql://u:secret@localhost/db?visibility=0s", 'visibility: .*write "60s"'),
        ("mysql://u:secret@localhost/db?table=a-b", "table: 'a-b' is not a name for a table"),
    ],
)
def test_wrong_url(url: str, said: str) -> None:
    """A wrong URL is one line that says what to type, and shows no password."""
    with pytest.raises(ConfigError, match=said) as raised:
        open_transport(url)
    assert "\n" not in str(raised.value)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("address", ["memory://limits", "sqlite:///limits.db"])
def test_limits_in_a_url(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A URL may set the visibility and the size limit."""
    monkeypatch.chdir(tmp_path)
    with closing(open_transport(f"{address}?visibility=1ms&max_bytes=3")) as transport:
        assert (transport.features.visibility_s, transport.features.max_bytes) == (0.001, 3)
        with pytest.raises(PublishRefused, match="4 bytes is over the limit of 3"):
            transport.publish(_QUEUE, [Message("1", b"1234"), Message("2", b"123")])
        for count in (1, 2):
            [delivery] = transport.receive(_QUEUE, 1, _DEADLINE_S)
            assert (delivery.message.id, delivery.count) == ("2", count)


def test_memory_by_name() -> None:
    """Those of one name share their queues, in all threads; those of another do not."""
    ids = _publish(open_transport("memory://one"), 3)
    assert open_transport("memory://another").is_drained(_QUEUE)
    assert _ids(open_transport("memory://one").receive(_QUEUE, 10, 0)) == ids


def test_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path is that of where the transport was opened, wherever the program goes."""
    monkeypatch.chdir(tmp_path)
    with closing(open_transport("sqlite:///queue.db")) as transport:
        monkeypatch.chdir("/")
        _publish(transport, 1)
    assert (tmp_path / "queue.db").exists()


# ---- Each, by its own clock ---------------------------------------------------------------------


def test_old_places(each: Transport) -> None:
    """What comes again stands where it stood before, whenever it was given back."""
    ids = _publish(each, 5)
    for delivery in reversed(each.receive(_QUEUE, 3, 0)):
        each.acknowledge([(delivery, Requeue())])
    assert _ids(each.receive(_QUEUE, 5, 0)) == ids


def test_late_settles_are_logged(each: Transport, caplog: pytest.LogCaptureFixture) -> None:
    """An acknowledgement that comes too late leaves a line in the log; one in time leaves none."""
    caplog.set_level(logging.INFO, "oncely")
    _publish(each, 1)
    caplog.clear()
    [delivery] = each.receive(_QUEUE, 1, 0)
    each.acknowledge([(delivery, Ack())])
    assert events_in(caplog) == []
    each.acknowledge([(delivery, Ack()), (delivery, Requeue())])
    assert [(vars(each)["event"], vars(each)["count"]) for each in caplog.records] == [
        ("acknowledged_too_late", 2)
    ]


# ---- One file ----------------------------------------------------------------------------------


def test_any_text_is_stored(transport: Transport) -> None:
    """Text that SQLite itself could not store comes out as it was put in."""
    message = Message("1", headers={"\udfff": "\0"})
    transport.publish(_QUEUE, [message])
    [delivery] = transport.receive(_QUEUE, 1, 0)
    assert delivery.message == message


def test_shared_with_a_ledger(transport: Transport, url: str, key: Key) -> None:
    """A ledger and a queue may be in one file."""
    _publish(transport, 3)
    with closing(open_ledger(url)) as ledger:
        ledger.migrate()
        ledger.complete(granted(ledger.claim(key)))
        assert ledger.problems() == []
    [*deliveries] = transport.receive(_QUEUE, 10, 0)
    transport.acknowledge([(delivery, Ack()) for delivery in deliveries])
    assert transport.is_drained(_QUEUE)


def test_settle_broken_off(transport: Transport) -> None:
    """What breaks off an acknowledgement undoes all of it; the deliveries can be repeated."""
    _publish(transport, 2)
    first, second = transport.receive(_QUEUE, 2, 0)
    with pytest.raises(UnicodeEncodeError):
        transport.acknowledge([(first, Ack()), (replace(second, queue="\ud800"), Reject("no"))])
    transport.acknowledge([(first, Ack()), (second, Requeue())])
    assert _ids(transport.receive(_QUEUE, 2, 0)) == ["1"]


def test_waiting_locks_nothing(transport: Transport, url: str) -> None:
    """Who waits at an empty queue needs no lock, and is not held up by one who has it."""
    assert transport.receive(_QUEUE, 1, 0) == []
    with _locked(url):
        assert transport.receive(_QUEUE, 1, 0.05) == []
        assert transport.is_drained(_QUEUE)


def test_locked_file(transport: Transport, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file locked beyond the busy timeout raises TransportError; afterwards all is well."""
    monkeypatch.setattr(sqlite_files, "BUSY_TIMEOUT_S", 0.05)
    _publish(transport, 1)
    with _locked(url):
        with pytest.raises(TransportError, match="locked"):
            _publish(transport, 1)
        with pytest.raises(TransportError, match="locked"):
            transport.receive(_QUEUE, 1, 0)
    [delivery] = transport.receive(_QUEUE, 1, 0)
    with _locked(url), pytest.raises(TransportError, match="locked"):
        transport.acknowledge([(delivery, Ack())])
    transport.acknowledge([(delivery, Ack())])
    assert transport.is_drained(_QUEUE)


def test_no_database(transport: Transport, tmp_path: Path) -> None:
    """A file that is no database raises TransportError, which names it; closing does not."""
    (tmp_path / "queue.db").write_bytes(b"this is no database, however long it may be" * 100)
    with pytest.raises(TransportError, match=r"queue\.db: file is not a database"):
        _publish(transport, 1)


@contextmanager
def _locked(url: str) -> Iterator[None]:
    """While another writes to the file."""
    with closing(sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield
        other.execute("ROLLBACK")


# ---- Processes ---------------------------------------------------------------------------------

_PUBLISH_FOR_EVER = """
import itertools, sys
import oncely
transport = oncely.open_transport(sys.argv[1])
for batch in itertools.count():
    transport.publish("orders", [oncely.Message(f"{sys.argv[2]}-{batch}-{n}") for n in range(20)])
    print(sys.argv[2], batch, flush=True)
"""
_CONSUME = """
import sys
import oncely
from oncely.core.verdicts import Ack
transport = oncely.open_transport(sys.argv[1])
while not transport.is_drained("orders"):
    deliveries = transport.receive("orders", 10, 0.1)
    ids = [delivery.message.id for delivery in deliveries]
    print("received", *ids, flush=True)
    transport.acknowledge([(delivery, Ack()) for delivery in deliveries])
    print("acknowledged", *ids, flush=True)
"""


def test_processes_share(transport: Transport, url: str) -> None:
    """Of several processes at once, one is given a message; all together are given all."""
    ids = _publish(transport, 2_000)
    started = [_started(_CONSUME, url) for _ in range(4)]
    outputs = [process.communicate(timeout=2 * _DEADLINE_S)[0] for process in started]
    assert [process.returncode for process in started] == [0] * 4
    assert sorted(id_ for output in outputs for id_ in _told(output, "acknowledged")) == sorted(ids)


@pytest.mark.in_turn("processes are killed")
def test_killed_publishers(transport: Transport, url: str) -> None:
    """After SIGKILL whatever was confirmed is there, and each batch is whole."""
    confirmed = []
    for attempt in range(_KILLS):
        process = _started(_PUBLISH_FOR_EVER, url, f"p{attempt}")
        lines = _kill_after(process, random.randint(1, 40))
        confirmed += [line.replace(" ", "-") for line in lines]
    ids = _ids(transport.receive(_QUEUE, 1_000_000, 0))
    batches = [id_.rpartition("-")[0] for id_ in ids]
    assert set(confirmed) <= set(batches)
    assert len(set(batches) - set(confirmed)) <= _KILLS
    assert all(batches.count(batch) == 20 for batch in set(batches))
    assert len(set(ids)) == len(ids)


@pytest.mark.in_turn("processes are killed")
def test_killed_consumers(transport: Transport, url: str, tmp_path: Path) -> None:
    """After SIGKILL nothing is lost, and nothing that was acknowledged comes again."""
    ids = set(_publish(transport, 5_000))
    acknowledged, in_between = set(), set()
    for _ in range(_KILLS):
        output = "\n".join(_kill_after(_started(_CONSUME, url), random.randint(2, 100)))
        now_acknowledged = set(_told(output, "acknowledged"))
        acknowledged |= now_acknowledged
        # The last one may have been acknowledged, and not have said so.
        in_between |= set(_told(output, "received")) - now_acknowledged
    with closing(_an_hour_later(tmp_path)) as later:
        left = _ids(later.receive(_QUEUE, 10_000, 0))
    assert len(left) == len(set(left))
    assert acknowledged & set(left) == set()
    assert ids - acknowledged - in_between <= set(left)
    assert len(in_between) <= 10 * _KILLS


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_fork(transport: Transport) -> None:
    """A forked child receives what its parent does not hold, and closes what is its own."""
    ids = _publish(transport, 2)
    [held] = transport.receive(_QUEUE, 1, 0)

    def consume() -> None:
        [delivery] = transport.receive(_QUEUE, 10, 0)
        transport.acknowledge([(delivery, Ack())])
        transport.close()

    assert exit_of(forked(consume)) == 0
    assert transport.receive(_QUEUE, 10, 0) == []
    transport.acknowledge([(held, Requeue())])
    assert _ids(transport.receive(_QUEUE, 10, 0)) == ids[:1]


def _started(program: str, *args: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", program, *args],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _kill_after(process: "subprocess.Popen[str]", lines: int) -> list[str]:
    """Kill it when it has said so many lines, at any moment after; all that it said."""
    assert process.stdout is not None
    said = [process.stdout.readline() for _ in range(lines)]
    time.sleep(random.uniform(0, 0.01))
    process.kill()
    # `communicate` would pass over what `readline` has read ahead.
    with process:
        rest = process.stdout.read()
    whole, _, _ = rest.rpartition("\n")
    return [line.strip() for line in (*said, *whole.splitlines()) if line]


def _told(output: str, what: str) -> list[str]:
    lines = [line.split() for line in output.splitlines()]
    return [id_ for first, *ids in lines if first == what for id_ in ids]


def _an_hour_later(folder: Path) -> Transport:
    clock = lambda: time.time() + 3_600  # noqa: E731
    return StoreTransport(SqlStore(sqlite_engine(folder / "queue.db"), clock=clock))
