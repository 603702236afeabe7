"""Sessions that the server has made useless while they stood idle in a pool: ended, or read-only
since a failover. The server itself is up: whoever calls notices nothing, by any way in.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from sqlalchemy import Connection, Engine, create_engine, make_url, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.orm import Session, sessionmaker
from tests.conditions import wait_until
from tests.integration.callers import Place, django_connection
from tests.integration.drivers import connect_mysql, connect_postgresql, engine_on, rows_of
from tests.integration.test_unusual_servers import set_for_database
from tests.records import deferred, granted
from tests.spark.tasks import run_task

from oncely.consumer import Consumer
from oncely.core.errors import StoreUnavailable
from oncely.core.message import Message
from oncely.core.record import Key, State
from oncely.ledger.ledger import Ledger, open_ledger
from oncely.once import once
from oncely.stores.memory_store import MemoryStore
from oncely.stores.sql import SqlStore
from oncely.transports.store_transport import StoreTransport

pytestmark = pytest.mark.in_turn("useless sessions")

_SESSIONS = 4
"""In each pool."""
_INSERT = "INSERT INTO effects (message) VALUES ('{}')"


class Bank(NamedTuple):
    """A ledger, and business rows in the same database, of a role that is none of an operator's."""

    kind: str
    url: str
    admin: str
    """The URL of an operator."""
    ledger: Ledger
    engine: Engine

    def rows(self) -> list[str]:
        """The business rows."""
        # Its pool may still hold sessions that the server has ended.
        self.engine.dispose()
        with self.engine.connect() as connection:
            return sorted(connection.execute(text("SELECT message FROM effects")).scalars())

    def check_once(self, *ids: str) -> None:
        """Each message was handled at its first attempt, and its row is there once."""
        assert self.rows() == sorted(ids)
        records = self.ledger.find_many([Key("billing", id_) for id_ in ids]).values()
        assert [(each.state, each.attempts) for each in records] == [(State.COMPLETED, 1)] * len(
            ids
        )


@pytest.fixture(params=["postgresql", "mysql"])
def bank(request: pytest.FixtureRequest) -> Iterator[Bank]:
    """A bank on each kind of server."""
    kind = request.param
    admin = url = str(request.getfixturevalue(f"{kind}_ledger_url"))
    if kind == "mysql":
        url = _without_rights(admin)
    engine = engine_on(url, pool_size=_SESSIONS)
    with closing(open_ledger(url)) as ledger:
        with engine.begin() as connection:
            connection.execute(text("CREATE TABLE effects (message VARCHAR(255))"))
        yield Bank(kind, url, admin, ledger, engine)
    engine.dispose()
    if kind == "mysql":
        with closing(connect_mysql(admin)) as operator:
            rows_of(operator, f"DROP USER {make_url(url).username}")


def _without_rights(admin: str) -> str:
    """The URL of a user of that database, for whom a server can be read-only."""
    at = make_url(admin)
    name = f"u{str(at.database)[-12:]}"
    with closing(connect_mysql(admin)) as operator:
        rows_of(operator, f"CREATE USER {name} IDENTIFIED BY 'secret'")
        rows_of(operator, f"GRANT ALL ON {at.database}.* TO {name}")
    return at.set(username=name, password="secret").render_as_string(hide_password=False)


# ---- What becomes of sessions ------------------------------------------------------------------


def _end(bank: Bank) -> None:
    """The server ends all sessions with the database, as when they have been idle for too long."""
    if bank.kind == "postgresql":
        with closing(connect_postgresql(bank.admin)) as operator:
            others = "FROM pg_stat_activity WHERE datname = current_database()"
            others += " AND pid <> pg_backend_pid()"
            operator.execute(f"SELECT pg_terminate_backend(pid) {others}".encode())
            wait_until(lambda: not operator.execute(f"SELECT 1 {others}".encode()).fetchall())
        return
    with closing(connect_mysql(bank.admin)) as operator:
        asked = "SELECT id FROM information_schema.processlist WHERE user = %s"
        for (session,) in rows_of(operator, asked, make_url(bank.url).username):
            rows_of(operator, f"KILL {session}")


@contextmanager
def _read_only(bank: Bank) -> Iterator[None]:
    """Sessions that begin within the block can only read, for as long as they live."""
    if bank.kind == "postgresql":
        with set_for_database(bank.admin, "default_transaction_read_only", "on"):
            yield
        return
    with closing(connect_mysql(bank.admin)) as operator:
        rows_of(operator, "SET GLOBAL init_connect = 'SET SESSION TRANSACTION READ ONLY'")
        try:
            yield
        finally:
            rows_of(operator, "SET GLOBAL init_connect = ''")


def _warm(engine: Engine) -> None:
    """Fill the pool."""
    with ExitStack() as opened:
        for _ in range(_SESSIONS):
            opened.enter_context(engine.connect()).exec_driver_sql("SELECT 1")


def _spoil(bank: Bank, how: str, engine: Engine) -> None:
    """All sessions in the pool of an engine become useless."""
    engine.dispose()
    if how == "ended":
        _warm(engine)
        _end(bank)
    else:
        with _read_only(bank):
            _warm(engine)


hows = pytest.mark.parametrize("how", ["ended", "read-only"])


# ---- The ledger's own sessions -----------------------------------------------------------------


@hows
def test_calls_of_the_ledger(bank: Bank, how: str) -> None:
    """Each call of a ledger is done."""
    ledger, store = bank.ledger, bank.ledger._store
    assert isinstance(store, SqlStore)
    keys = [Key("billing", str(n)) for n in range(50)]
    claims = [granted(outcome) for outcome in ledger.claim_many(keys)]
    calls: list[Callable[[], object]] = [
        lambda: granted(ledger.claim(Key("billing", "new"))),
        lambda: ledger.complete(claims[0]),
        lambda: ledger.complete_many(claims[1:40]),
        lambda: ledger.extend(claims[41], "5m"),
        lambda: ledger.keep_step(claims[42], "debit", 1),
        lambda: ledger.handled(claims[43], None, [deferred("m", parent=claims[43].key)]),
        lambda: ledger.mailbox.take(10, "60s"),
        lambda: store.put("orders", [Message("1", b"{}")]),
        lambda: ledger.keep_retention("billing", "8d"),
        lambda: ledger.purge("0s"),
        ledger.counts,
    ]
    for call in calls:
        _spoil(bank, how, store._engine)
        call()
    assert ledger.counts() == {("billing", State.PROCESSING): 10, ("billing", State.HANDLED): 1}
    _spoil(bank, how, store._engine_beside)
    [outcome] = ledger.extend_each([claims[44]], "5m")
    assert not isinstance(outcome, Exception)


# ---- Sessions of the program -------------------------------------------------------------------


def _handle(message: Message, connection: Connection | Session) -> None:
    connection.execute(text(_INSERT.format(message.id)))


def _once(bank: Bank, transaction: Any) -> Callable[[Callable[..., Any]], Any]:
    guard: Callable[[Callable[..., Any]], Any] = once(
        bank.ledger,
        consumer="billing",
        key=lambda message, *_: message.id,
        transaction=transaction,
    )
    return guard


@hows
@pytest.mark.parametrize("begins", [lambda engine: engine, sessionmaker], ids=["engine", "session"])
@pytest.mark.parametrize(
    ("bank", "driver"),
    [("postgresql", "psycopg"), ("postgresql", "psycopg2"), ("mysql", "pymysql")],
    indirect=["bank"],
)
def test_once(bank: Bank, how: str, driver: str, begins: Callable[[Engine], Any]) -> None:
    """A function in a transaction with its claim runs once."""
    engine = create_engine(make_url(bank.url).set(drivername=f"{bank.kind}+{driver}"))
    charge = _once(bank, begins(engine))(_handle)
    _spoil(bank, how, engine)
    charge(Message("1", b"{}"))
    bank.check_once("1")
    engine.dispose()


@hows
@pytest.mark.parametrize(
    ("bank", "driver"),
    [
        ("postgresql", "postgresql+psycopg"),
        ("postgresql", "postgresql+asyncpg"),
        ("mysql", "mysql+asyncmy"),
    ],
    indirect=["bank"],
)
def test_once_async(bank: Bank, how: str, driver: str) -> None:
    """The same in asyncio."""

    async def deliver() -> None:
        engine = create_async_engine(make_url(bank.url).set(drivername=driver))

        @_once(bank, engine)
        async def charge(message: Message, connection: AsyncConnection) -> None:
            await connection.execute(text(_INSERT.format(message.id)))

        if how == "ended":
            await _warm_async(engine)
            _end(bank)
        else:
            with _read_only(bank):
                await _warm_async(engine)
        await charge(Message("1", b"{}"))
        await engine.dispose()

    asyncio.run(deliver())
    bank.check_once("1")


async def _warm_async(engine: AsyncEngine) -> None:
    opened = [await engine.connect() for _ in range(_SESSIONS)]
    for connection in opened:
        await connection.exec_driver_sql("SELECT 1")
        await connection.close()


@hows
@pytest.mark.parametrize("together", [False, True])
def test_consumer(bank: Bank, how: str, together: bool) -> None:
    """A consumer whose handlers work in transactions handles its messages."""
    transport = StoreTransport(MemoryStore())
    ids = [str(n) for n in range(20)]
    transport.subscribe("orders", [])
    transport.publish("orders", [Message(id_, b"{}") for id_ in ids])
    consumer = Consumer(transport, queue="orders").idempotent(bank.ledger, "billing")
    if together:
        consumer = consumer.transactional(bank.engine, together=True)

        def handle(messages: list[Message], connection: Connection) -> None:
            for message in messages:
                _handle(message, connection)
    else:
        consumer, handle = consumer.transactional(bank.engine), _handle  # type: ignore[assignment]
    _spoil(bank, how, bank.engine)
    report = consumer.consume(handle, drain=True)
    assert (report.handled, report.failed) == (20, 0)
    bank.check_once(*ids)


@hows
def test_spark(bank: Bank, how: str, tmp_path: Path) -> None:
    """A task on Spark does, too."""
    ids = [str(n) for n in range(20)]
    begins = sessionmaker(bank.engine)
    _spoil(bank, how, bank.engine)
    counts = run_task(bank.ledger, _handle, tmp_path, ids, 1_000, begins, mode="transactional")
    assert counts.handled == 20
    assert bank.rows() == sorted(ids)


@hows
def test_transactions_that_a_program_begins(bank: Bank, how: str) -> None:
    """One that joins its own transactions meets an error on each useless session once: each then
    leaves the pool.
    """
    _spoil(bank, how, bank.engine)
    failed = 0
    for number in range(_SESSIONS + 1):
        try:
            _join(bank, str(number))
        except StoreUnavailable:
            failed += 1
    assert failed == _SESSIONS
    assert bank.rows() == [str(_SESSIONS)]


def _join(bank: Bank, message_id: str) -> None:
    with bank.engine.begin() as connection, bank.ledger.transaction(connection) as inbox:
        inbox.complete(granted(inbox.claim(Key("billing", message_id))))
        connection.execute(text(_INSERT.format(message_id)))


@hows
@pytest.mark.parametrize("bank", ["postgresql"], indirect=True)
def test_django(bank: Bank, how: str) -> None:
    """Django's own connection is a new one after an error."""
    from django.db import transaction

    def join(connection: Any) -> None:
        with transaction.atomic(connection.alias), bank.ledger.transaction(connection) as inbox:
            inbox.complete(granted(inbox.claim(Key("billing", "1"))))

    place = Place(bank.kind, bank.url, bank.ledger, bank.engine)
    with django_connection(place) as connection:
        if how == "ended":
            connection.ensure_connection()
            _end(bank)
        else:
            with _read_only(bank):
                connection.ensure_connection()
        with pytest.raises(StoreUnavailable):
            join(connection)
        join(connection)
    bank.engine.dispose()
    assert bank.ledger.counts() == {("billing", State.COMPLETED): 1}


def test_handler_that_meets_it(bank: Bank) -> None:
    """Where the handler's own statement is the first to find out, its session leaves the pool, too,
    and the handler runs again.
    """
    runs: list[int] = []

    @_once(bank, bank.engine)
    def charge(message: Message, connection: Connection) -> None:
        runs.append(1)
        if len(runs) == 1:
            raise DBAPIError("INSERT", {}, _refusal(bank))
        _handle(message, connection)

    charge(Message("1", b"{}"))
    assert len(runs) == 2
    bank.check_once("1")


def _refusal(bank: Bank) -> Exception:
    """What a server says to a session that can only read."""
    begin = "SET" if bank.kind == "postgresql" else "START"
    with bank.engine.connect() as connection:
        connection.execute(text(f"{begin} TRANSACTION READ ONLY"))
        with pytest.raises(DBAPIError) as refused:
            _handle(Message("0", b"{}"), connection)
    assert isinstance(refused.value.orig, Exception)
    return refused.value.orig
