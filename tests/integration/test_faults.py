"""Servers that end connections, refuse them, are away, or let others go first."""

import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from threading import Event
from typing import Any

import psycopg
import pymysql
import pytest
from sqlalchemy import make_url
from tests.integration.drivers import (
    Psycopg,
    PyMysql,
    connect_mysql,
    connect_postgresql,
    rows_of,
)
from tests.servers import MariaDb, Postgresql, Server

from oncely.core.errors import StoreError, StoreUnavailable
from oncely.core.record import Key, State
from oncely.core.rules import Busy, Fenced, Granted, Written
from oncely.ledger import Ledger, open_ledger
from oncely.stores.retrying import patiently
from oncely.stores.sql import batches, store
from oncely.testing import at_once, granted

_DEADLINE_S = 30.0
_CONSUMER = "billing"
_A, _B = Key(_CONSUMER, "a"), Key(_CONSUMER, "b")


@pytest.fixture(params=["postgresql", "mysql"])
def other(request: pytest.FixtureRequest) -> "Other":
    """Another program's connection to the test's database, on each kind of server."""
    if request.param == "postgresql":
        return OtherOnPostgresql(request.getfixturevalue("psql"))
    return OtherOnMysql(request.getfixturevalue("mysql"))


@pytest.fixture
def ledger(other: "Other", request: pytest.FixtureRequest) -> Iterator[Ledger]:
    """A ledger on the same database."""
    with closing(open_ledger(request.getfixturevalue(f"{other.kind}_url"))) as ledger:
        ledger.migrate()
        yield ledger


class Other:
    """What another program does beside the ledger."""

    kind: str
    sessions: str
    """The sessions in the same database, but for its own."""
    waiting: str
    """How many of them wait for a lock."""

    def run(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        """What a statement returns."""
        raise NotImplementedError

    def end(self, session: int) -> None:
        """End a session, whatever it is doing."""
        raise NotImplementedError

    def lock(self, key: Key) -> None:
        """Lock a row, in a transaction that begins here if there is none."""
        self.run("SELECT id FROM processed_messages WHERE message_id = %s FOR UPDATE", key[1])

    def await_a_waiter(self) -> None:
        """Return once somebody waits for what this program has locked."""
        _wait_until(lambda: self.run(self.waiting) != [(0,)])

    def end_one(self) -> int:
        """End one session of the others; how many were ended."""
        found = self.run(self.sessions)
        for (session,) in found[:1]:
            self.end(session)
        return len(found[:1])


class OtherOnPostgresql(Other):
    """Another program's connection to a PostgreSQL."""

    kind = "postgresql"
    sessions = (
        "SELECT pid FROM pg_stat_activity"
        " WHERE datname = current_database() AND pid <> pg_backend_pid() ORDER BY random()"
    )
    waiting = (
        "SELECT count(*) FROM pg_stat_activity"
        " WHERE datname = current_database() AND wait_event_type = 'Lock'"
    )

    def __init__(self, connection: Psycopg) -> None:
        self._connection = connection

    def run(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        cursor = self._connection.execute(statement.encode(), values or None)
        return cursor.fetchall() if cursor.description else []

    def end(self, session: int) -> None:
        self.run("SELECT pg_terminate_backend(%s)", session)


class OtherOnMysql(Other):
    """Another program's connection to a MariaDB."""

    kind = "mysql"
    sessions = (
        "SELECT id FROM information_schema.processlist"
        " WHERE db = DATABASE() AND id <> CONNECTION_ID() ORDER BY rand()"
    )
    waiting = (
        "SELECT count(*) FROM information_schema.innodb_trx WHERE trx_state = 'LOCK WAIT'"
        " AND trx_mysql_thread_id IN"
        " (SELECT id FROM information_schema.processlist WHERE db = DATABASE())"
    )

    def __init__(self, connection: PyMysql) -> None:
        self._connection = connection

    def run(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        return list(rows_of(self._connection, statement, *values))

    def end(self, session: int) -> None:
        try:
            self.run("KILL %s", session)
        except pymysql.OperationalError as error:
            if error.args[0] != pymysql.constants.ER.NO_SUCH_THREAD:
                raise


# ---- Connections that are ended ----------------------------------------------------------------


def test_ended_sessions(ledger: Ledger, other: Other) -> None:
    """While a session is ended every 50 ms, 2,000 messages go through, and no caller notices."""
    numbers, threads = range(2_000), 4
    done = Event()

    def end_sessions() -> int:
        ended = 0
        while not done.wait(0.05):
            ended += other.end_one()
        return ended

    def work(thread: int) -> None:
        for n in numbers[thread::threads]:
            ledger.complete(granted(ledger.claim(Key(_CONSUMER, str(n)), "none")), n)

    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(end_sessions)
        try:
            at_once(threads, work)
        finally:
            done.set()
        assert ended.result() > 10
    assert ledger.counts() == {(_CONSUMER, State.COMPLETED): len(numbers)}
    records = list(ledger.scan(limit=len(numbers)))
    assert all(record.attempts == record.fence == 1 for record in records)
    assert sorted(record.result for record in records) == list(numbers)


def test_connections_of_before(ledger: Ledger, other: Other) -> None:
    """Connections that were ended while nothing was asked are replaced before anybody notices."""
    claims = at_once(5, lambda n: granted(ledger.claim(Key(_CONSUMER, str(n)))))
    while other.end_one():
        pass
    ledger.complete_many(claims)
    assert ledger.counts() == {(_CONSUMER, State.COMPLETED): 5}


# ---- Others go first ---------------------------------------------------------------------------


def test_locked_row(ledger: Ledger, other: Other) -> None:
    """A row that another transaction has locked is waited for."""
    claim = granted(ledger.claim(_A))
    other.run("BEGIN")
    other.lock(_A)
    with ThreadPoolExecutor(1) as pool:
        completed = pool.submit(ledger.complete, claim)
        other.await_a_waiter()
        assert not completed.done()
        other.run("COMMIT")
        completed.result(_DEADLINE_S)
    assert ledger.counts() == {(_CONSUMER, State.COMPLETED): 1}


def test_deadlock(ledger: Ledger, other: Other) -> None:
    """A batch that loses in a deadlock is written when the other is through."""
    claims = [granted(outcome) for outcome in ledger.claim_many([_A, _B])]
    with _winning(other):
        other.lock(_B)
        with ThreadPoolExecutor(1) as pool:
            completed = pool.submit(ledger.complete_many, claims)
            other.await_a_waiter()
            # The ledger has the first and waits for the second.
            other.lock(_A)
            other.run("COMMIT")
            outcomes = completed.result(_DEADLINE_S)
    assert [type(outcome) for outcome in outcomes] == [Written] * 2
    assert ledger.counts() == {(_CONSUMER, State.COMPLETED): 2}


def test_deadlock_in_a_later_batch(
    ledger: Ledger, other: Other, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a later batch is tried again, what was claimed in an earlier one is no other's."""
    monkeypatch.setattr(batches, "BATCH", 10)
    keys = [Key(_CONSUMER, f"message-{n:02}") for n in range(20)]
    insert = (
        "INSERT INTO processed_messages"
        " (message_id, provider, status, first_processed_at, last_processed_at)"
        f" VALUES (%s, '{_CONSUMER}', 'processing', now(), now())"
    )
    with _winning(other):
        other.run(insert, "message-19")
        with ThreadPoolExecutor(1) as pool:
            claimed = pool.submit(ledger.claim_many, keys)
            other.await_a_waiter()
            other.run(insert, "message-15")
            other.run("ROLLBACK")
            outcomes = claimed.result(_DEADLINE_S)
    assert [type(outcome) for outcome in outcomes] == [Granted] * 20
    assert ledger.counts() == {(_CONSUMER, State.PROCESSING): 20}


@contextmanager
def _winning(other: Other) -> Iterator[None]:
    """A transaction that wins every deadlock: by its patience, or by what would have to be undone."""
    other.run("CREATE TABLE weight (id INT)")
    if other.kind == "postgresql":
        other.run("SET deadlock_timeout = '1min'")
    other.run("BEGIN")
    other.run(f"INSERT INTO weight VALUES {', '.join(['(1)'] * 1_000)}")
    yield


@pytest.mark.parametrize("isolation", ["serializable", "repeatable read"])
def test_serialization_failure(postgresql_url: str, psql: Psycopg, isolation: str) -> None:
    """Where the database isolates strictly, what fails for that is done again."""
    _isolate(psql, isolation)
    with closing(open_ledger(postgresql_url)) as ledger, ThreadPoolExecutor(1) as pool:
        ledger.migrate()
        with psql.transaction():
            psql.execute(
                "INSERT INTO processed_messages (message_id, provider, status) VALUES (%s, %s, %s)",
                (_A.message_id, _A.consumer, "processing"),
            )
            outcome = pool.submit(ledger.claim, _A)
            OtherOnPostgresql(psql).await_a_waiter()
        assert isinstance(outcome.result(_DEADLINE_S), Busy)


@pytest.mark.parametrize("isolation", ["serializable", "repeatable read"])
def test_races_where_isolation_is_strict(
    postgresql_url: str, psql: Psycopg, isolation: str
) -> None:
    """Workers that race under strict isolation meet no error, and each message runs once."""
    _isolate(psql, isolation)
    keys = [Key(_CONSUMER, str(n)) for n in range(60)]
    with closing(open_ledger(postgresql_url)) as ledger:
        ledger.migrate()

        def work(racer: int) -> int:
            count = 0
            for start in range(0, len(keys), 10):
                outcomes = ledger.claim_many(keys[start : start + 10])
                claims = [outcome.claim for outcome in outcomes if isinstance(outcome, Granted)]
                assert Fenced not in map(type, ledger.complete_many(claims))
                count += len(claims)
            return count

        assert sum(at_once(6, work)) == len(keys)
        assert ledger.counts() == {(_CONSUMER, State.COMPLETED): len(keys)}


def _isolate(psql: Psycopg, isolation: str) -> None:
    psql.execute(
        f"ALTER DATABASE {psql.info.dbname} SET default_transaction_isolation = '{isolation}'"
    )


def test_batch_that_lost_altogether(ledger: Ledger, other: Other) -> None:
    """A batch whose claims have all been overtaken changes nothing, and its owner is told."""
    old = [granted(outcome) for outcome in ledger.claim_many([_A, _B], "1ms")]
    new = _claimed_again(ledger, [_A, _B])
    assert [type(outcome) for outcome in ledger.complete_many(old)] == [Fenced] * 2
    assert [type(outcome) for outcome in ledger.release_many(old)] == [Fenced] * 2
    assert [type(outcome) for outcome in ledger.complete_many(new)] == [Written] * 2


def _claimed_again(ledger: Ledger, keys: list[Key]) -> list[Any]:
    def claim() -> list[Any]:
        outcomes = ledger.claim_many(keys)
        return [outcome.claim for outcome in outcomes if isinstance(outcome, Granted)]

    found: list[Any] = []
    _wait_until(lambda: len(found.extend(claim()) or found) == len(keys))
    return found


def test_row_with_an_unknown_status(ledger: Ledger, other: Other) -> None:
    """A row that somebody gave a status of his own is named, as an error of the store."""
    ledger.claim(_A)
    other.run("UPDATE processed_messages SET status = 'paused'")
    calls: list[Callable[[], object]] = [
        lambda: ledger.claim(_A),
        ledger.counts,
        lambda: list(ledger.scan()),
    ]
    for call in calls:
        with pytest.raises(StoreError, match=r"status 'paused', which is none of processing, "):
            call()


# ---- Servers away ------------------------------------------------------------------------------


@pytest.fixture(params=["postgresql", "mariadb"])
def server(request: pytest.FixtureRequest) -> Server:
    """A server that the test may stop, of each kind."""
    server = request.getfixturevalue(f"private_{request.param}")
    assert isinstance(server, Server)
    return server


def test_server_away(server: Server) -> None:
    """While the server is away every call says so within seconds; afterwards all goes on."""
    with closing(open_ledger(server.url)) as ledger:
        ledger.migrate()
        claim = granted(ledger.claim(_A, "none"))
        server.stop()
        calls: list[Callable[[], object]] = [
            lambda: ledger.claim(_B),
            lambda: ledger.complete(claim),
            ledger.counts,
            ledger.problems,
        ]
        before = time.monotonic()
        for call in calls:
            with pytest.raises(StoreUnavailable, match=r"^[^\n]*[Cc]onnect[^\n]*$") as raised:
                call()
            assert "secret" not in str(raised.value)
        assert time.monotonic() - before < 5.0 * len(calls)
        server.start()
        ledger.complete(claim)
        granted(ledger.claim(_B))


def test_server_away_for_a_moment(server: Server) -> None:
    """A server that is back within a second costs patience, and no error."""
    with closing(open_ledger(server.url)) as ledger, ThreadPoolExecutor(1) as pool:
        ledger.migrate()
        claim = granted(ledger.claim(_A))
        stopped = Event()

        def restart() -> None:
            server.stop()
            stopped.set()
            server.start()

        restarted = pool.submit(restart)
        assert stopped.wait(_DEADLINE_S)
        _until_available(lambda: ledger.complete(claim))
        restarted.result(_DEADLINE_S)
        assert ledger.counts() == {(_CONSUMER, State.COMPLETED): 1}


def test_too_many_connections(server: Server) -> None:
    """A server that takes no more connections is unavailable until it does."""
    with closing(open_ledger(server.url)) as ledger:
        ledger.migrate()
        ledger.close()
        with _full(server), pytest.raises(StoreUnavailable, match="[Tt]oo many"):
            ledger.claim(_A)
        granted(ledger.claim(_A))


@contextmanager
def _full(server: Server) -> Iterator[None]:
    """All connections that a server takes are taken, for as long as the block."""
    if isinstance(server, MariaDb):
        with closing(connect_mysql(server.url)) as connection:
            rows_of(connection, "SET GLOBAL max_connections = 10")
    connect: Callable[[str], Any] = (
        connect_postgresql if isinstance(server, Postgresql) else connect_mysql
    )
    with ExitStack() as opened:
        while True:
            try:
                opened.enter_context(closing(connect(server.url)))
            except (psycopg.OperationalError, pymysql.OperationalError):
                break
        yield


def test_server_that_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that accepts a connection and says nothing is unavailable, after the timeout."""
    monkeypatch.setattr(store, "patiently", partial(patiently, tries=1))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        ledger = open_ledger(f"postgresql://anna@127.0.0.1:{port}/x?connect_timeout=2")
        with pytest.raises(StoreUnavailable, match="timeout"):
            ledger.claim(_A)


def test_patience_with_connecting() -> None:
    """A connection is not waited for longer than five seconds, unless the URL says so."""
    for kind in ("postgresql", "mysql"):
        url = make_url(f"{kind}://anna@host/x")
        options = open_ledger(url.render_as_string())._store._engine.dialect  # type: ignore[attr-defined]
        assert options


def _until_available(call: Callable[[], object]) -> None:
    deadline = time.monotonic() + _DEADLINE_S
    while True:
        try:
            call()
        except StoreUnavailable:
            assert time.monotonic() < deadline
        else:
            return


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "it does not come to that"
        time.sleep(0.005)
