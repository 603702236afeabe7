"""A queue in the ledger's own database: what is done with, is so by one commit; and who is told."""

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import Connection, Engine, create_engine, make_url, text
from tests.conditions import LIMIT_S, wait_until

from oncely import Consumer, Ledger, Message, at_least_once, open_ledger, open_transport
from oncely.core.control import Unrecoverable
from oncely.core.errors import PublishRefused, TransportError
from oncely.core.verdicts import Ack, Acknowledgement
from oncely.core.waiting import queue_named
from oncely.stores import notifications
from oncely.stores.open_store import open_store
from oncely.stores.sql import SqlStore
from oncely.stores.store import Transaction
from oncely.transports.store_transport import StoreTransport
from oncely.transports.transport import Delivery, Transport

_QUEUE = "jobs"


class _Unsettling(StoreTransport):
    """A transport of one that dies before it acknowledges anything."""

    def acknowledge(self, verdicts: Sequence[tuple[Delivery, Acknowledgement]]) -> None:
        pass


@pytest.fixture(params=["sqlite", "postgresql", "mysql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty database of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'ledger.db'}"
    return str(request.getfixturevalue(f"{request.param}_url"))


@pytest.fixture
def ledger(url: str) -> Iterator[Ledger]:
    """A ledger there."""
    with closing(open_ledger(url)) as ledger:
        ledger.migrate()
        yield ledger


@pytest.fixture
def unsettling(url: str) -> Iterator[Transport]:
    """A transport there that acknowledges nothing."""
    store = open_store(url)
    assert isinstance(store, SqlStore)
    with closing(_Unsettling(store)) as transport:
        yield transport


@pytest.fixture
def engine(url: str) -> Iterator[Engine]:
    """An engine for handlers, on the same database."""
    made = make_url(url)
    drivers = {"postgresql": "postgresql+psycopg", "mysql": "mysql+pymysql"}
    engine = create_engine(made.set(drivername=drivers.get(made.drivername, made.drivername)))
    yield engine
    engine.dispose()


def _succeed(_: Message) -> None:
    pass


def _fail_once() -> Callable[[Message], None]:
    failed: set[str] = set()

    def handler(message: Message) -> None:
        if message.id not in failed:
            failed.add(message.id)
            raise ValueError("not yet")

    return handler


def _fail(_: Message) -> None:
    raise Unrecoverable("never")


@pytest.mark.parametrize("handler", [_succeed, _fail_once(), _fail], ids=["ok", "retry", "dead"])
def test_gone_with_the_end(
    ledger: Ledger, unsettling: Transport, handler: Callable[[Message], None]
) -> None:
    """A message whose end is stored is gone from the queue, though nobody has acknowledged it."""
    unsettling.publish(_QUEUE, [Message(str(n)) for n in range(20)])
    consumer = Consumer(unsettling, _QUEUE).idempotent(ledger, "shop", policy=at_least_once())
    report = consumer.backoff("10ms").consume(handler, drain=True)
    assert unsettling.is_drained(_QUEUE)
    assert report.duplicates == 0
    assert len(list(ledger.dead("shop"))) == (20 if handler is _fail else 0)


def test_gone_with_the_transaction(ledger: Ledger, unsettling: Transport, engine: Engine) -> None:
    """The same where handlers have transactions, each undone with what it took from the queue."""
    seen = []

    def handler(message: Message, connection: Connection) -> None:
        left = connection.execute(text("SELECT count(*) FROM waiting_messages")).scalar_one()
        seen.append((message.id, left))

    unsettling.publish(_QUEUE, [Message(str(n)) for n in range(5)])
    consumer = Consumer(unsettling, _QUEUE).idempotent(ledger, "shop").transactional(engine)
    assert consumer.consume(handler, drain=True).handled == 5
    assert [message_id for message_id, _ in seen] == [str(n) for n in range(5)]


def test_refused_by_the_database(tmp_path: Path) -> None:
    """A message that the database refuses does not hold up those that are published with it."""
    database = f"sqlite:///{tmp_path / 'queue.db'}"
    messages = [Message("a"), Message("b", type="wrong"), Message("c")]
    with closing(open_transport(database)) as transport:
        for queue in ("one", "two"):
            transport.subscribe(queue, ["wrong", "right"])
        with closing(create_engine(database).raw_connection()) as connection:
            connection.cursor().execute(
                "CREATE TRIGGER refuses BEFORE INSERT ON waiting_messages WHEN NEW.type = 'wrong' "
                "BEGIN SELECT RAISE(ABORT, 'it lacks a letter'); END"
            )
        for destination in ("one", "events:right"):
            with pytest.raises(PublishRefused, match=r"message 1: .* it lacks a letter"):
                transport.publish(destination, messages)
        # It may be the fault of the database, too.
        with pytest.raises(TransportError) as raised:
            transport.publish("one", messages[1:2])
        assert not isinstance(raised.value, PublishRefused)
        for queue, count in {"one": 4, "two": 2}.items():
            ids = [each.message.id for each in transport.receive(queue, 10, 0)]
            assert ids == ["a", "c"] * (count // 2)


def test_ledger_elsewhere(url: str, tmp_path: Path) -> None:
    """A queue in another database than the ledger's is acknowledged by its transport."""
    with (
        closing(open_ledger(f"sqlite:///{tmp_path / 'other.db'}")) as ledger,
        closing(open_transport(url)) as transport,
    ):
        ledger.migrate()
        transport.publish(_QUEUE, [Message("1")])
        consumer = Consumer(transport, _QUEUE).idempotent(ledger, "shop")
        consumer.consume(lambda _: consumer.stop())
        assert transport.is_drained(_QUEUE)


def test_put_in_a_transaction(url: str, ledger: Ledger, engine: Engine) -> None:
    """What is put into a queue inside a transaction is there when that has committed."""
    with closing(open_transport(url)) as transport:
        for ending in ("rollback", "commit"):
            with engine.connect() as connection:
                with ledger.transaction(connection) as inbox:
                    inbox.put(_QUEUE, [Message(ending, json.dumps({"to": "anna"}).encode())])
                getattr(connection, ending)()
            assert transport.is_drained(_QUEUE) == (ending == "rollback")
        [delivery] = transport.receive(_QUEUE, 9, LIMIT_S)
        assert (delivery.message.id, delivery.message.json()) == ("commit", {"to": "anna"})


def test_two_tables(url: str) -> None:
    """Queues beside two ledgers of one database are apart."""
    with (
        closing(open_transport(url)) as one,
        closing(open_transport(f"{url}?table=other_messages")) as other,
    ):
        one.publish(_QUEUE, [Message("1")])
        assert other.is_drained(_QUEUE)
        assert not one.is_drained(_QUEUE)


# ---- Being told --------------------------------------------------------------------------------


def _of_another_process(url: str) -> Transport:
    # Nothing in this process tells the one of the other.
    return open_transport(f"{url}{'&' if '?' in url else '?'}application_name=another")


@pytest.mark.parametrize("url", ["postgresql", "mysql"], indirect=True)
def test_taking_locks_nothing_that_is_held(url: str, ledger: Ledger, engine: Engine) -> None:
    """While others are being taken, who acknowledges finds no lock on what it holds: MariaDB locked
    all that was held.
    """
    store = ledger._store
    assert isinstance(store, SqlStore)
    with closing(open_transport(url)) as transport:
        transport.publish(_QUEUE, [Message(str(n), b"", key=str(n % 5)) for n in range(20)])
        held = transport.receive(_QUEUE, 3, 0.0)

        def take(transaction: Transaction) -> int:
            taken = transaction.take(queue_named(_QUEUE), 10, 60.0, one_per_lane=True, counts=True)
            numbers = ", ".join(str(each.tag.row.number) for each in held)
            locked = f"SELECT id FROM waiting_messages WHERE id IN ({numbers}) FOR UPDATE NOWAIT"
            with engine.begin() as program:
                assert len(program.execute(text(locked)).all()) == len(held)
            transport.acknowledge([(each, Ack()) for each in held])
            return len(taken)

        assert store.transaction(take) == 2
        assert sum(each.waiting for each in ledger.mailbox.backlogs().values()) == 17


def test_told_by_the_server(postgresql_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """PostgreSQL tells a receiver what another process has put in: it need not look."""
    waits_s: list[float] = []
    wait = notifications.ProcessSignal.wait

    def noted(signal: notifications.ProcessSignal, seen: int, timeout_s: float) -> int:
        waits_s.append(timeout_s)
        return wait(signal, seen, timeout_s)

    monkeypatch.setattr(notifications, "_LOOK_WHILE_HEARING_S", 3_600.0)
    monkeypatch.setattr(notifications.ProcessSignal, "wait", noted)
    store = open_store(postgresql_url)
    assert isinstance(store, SqlStore)
    with (
        closing(StoreTransport(store)) as transport,
        closing(_of_another_process(postgresql_url)) as other,
        ThreadPoolExecutor(1) as pool,
    ):
        waiting = pool.submit(transport.receive, _QUEUE, 1, 3_600.0)
        # It looks now and then for a while after it was told, as it is when it begins to hear.
        wait_until(lambda: waits_s and waits_s[-1] > 60)
        other.publish(_QUEUE, [Message("1")])
        [delivery] = waiting.result(LIMIT_S)
        assert delivery.message.id == "1"


def test_not_told_behind_a_pooler(pooled_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind PgBouncer nothing would be heard: receivers look, and are given messages all the
    same.
    """
    monkeypatch.setattr(notifications, "_BUSY_S", 0.0)
    store = open_store(pooled_url)
    assert isinstance(store, SqlStore)
    with (
        closing(StoreTransport(store)) as transport,
        closing(_of_another_process(pooled_url)) as other,
        ThreadPoolExecutor(1) as pool,
    ):
        assert transport.receive(_QUEUE, 1, 0.5) == []
        waiting = pool.submit(transport.receive, _QUEUE, 1, LIMIT_S)
        other.publish(_QUEUE, [Message("1")])
        assert len(waiting.result(LIMIT_S)) == 1
        assert store.notifications.poll_s < 1.0
