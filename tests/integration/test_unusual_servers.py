"""Servers, and sessions of callers, with settings that few have: the ledger answers as ever."""

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
from psycopg import sql
from sqlalchemy import Connection, Engine, create_engine, make_url
from tests.conditions import wait_until
from tests.integration.callers import CALLERS, Place, opened
from tests.integration.drivers import (
    Psycopg,
    PyMysql,
    connect_mysql,
    connect_postgresql,
    engine_on,
    rows_of,
)
from tests.records import granted
from tests.servers import MariaDb

from oncely.consumer import Consumer
from oncely.core.commands import Busy, Duplicate, Granted
from oncely.core.message import Message
from oncely.core.record import Key, State
from oncely.core.waiting import WaitingMessage
from oncely.ledger.ledger import Ledger, open_ledger
from oncely.stores.memory_store import MemoryStore
from oncely.transports.store_transport import StoreTransport

KEYS = [Key("billing", message_id) for message_id in ("1", "€", "😀", "a\\'b")]


@contextmanager
def set_for_database(url: str, name: str, value: str) -> Iterator[None]:
    """Inside the block, every new session of a database on PostgreSQL has the setting."""
    database = sql.Identifier(str(make_url(url).database))
    with closing(connect_postgresql(url)) as connection:
        change = sql.SQL("ALTER DATABASE {} SET {} = {}")
        connection.execute(change.format(database, sql.Identifier(name), sql.Literal(value)))
        try:
            yield
        finally:
            reset = sql.SQL("ALTER DATABASE {} RESET {}")
            connection.execute(reset.format(database, sql.Identifier(name)))


@contextmanager
def disposing(engine: Engine) -> Iterator[Engine]:
    """An engine, for as long as the block."""
    try:
        yield engine
    finally:
        engine.dispose()


def check_answers(ledger: Ledger) -> None:
    """Each message is granted once; what is stored comes back as it was."""
    outcomes = ledger.claim_many(KEYS, "60s", metadata={"paid": "5 €"})
    assert [type(outcome) for outcome in outcomes] == [Granted] * len(KEYS)
    assert [type(ledger.claim(key)) for key in KEYS] == [Busy] * len(KEYS)
    ledger.complete_many([granted(outcome) for outcome in outcomes], ["é"] * len(KEYS))
    duplicates = ledger.claim_many(KEYS)
    assert [type(outcome) for outcome in duplicates] == [Duplicate] * len(KEYS)
    found = ledger.find_many(KEYS)
    assert [found[key].metadata for key in KEYS] == [{"paid": "5 €"}] * len(KEYS)
    assert [found[key].result for key in KEYS] == ["é"] * len(KEYS)


# ---- PostgreSQL --------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["LATIN1", "SQL_ASCII"])
def test_encoding_of_sessions(postgresql_url: str, encoding: str) -> None:
    """Where sessions have another encoding, ids have all letters nevertheless."""
    with (
        set_for_database(postgresql_url, "client_encoding", encoding),
        closing(open_ledger(postgresql_url)) as ledger,
    ):
        ledger.migrate()
        check_answers(ledger)


@pytest.fixture
def rounding(postgresql_ledger_url: str, request: pytest.FixtureRequest) -> Iterator[Place]:
    """A place whose sessions show numbers with one digit."""
    with (
        set_for_database(postgresql_ledger_url, "extra_float_digits", "-15"),
        opened("postgresql", request) as place,
    ):
        yield place


@pytest.mark.parametrize(
    "name", [name for name, (kind, _) in CALLERS.items() if kind == "postgresql"]
)
def test_rounding_in_a_joined_transaction(rounding: Place, name: str) -> None:
    """No lease seems to be over, whatever driver reads it."""
    key = Key("billing", "1")
    granted(rounding.ledger.claim(key))
    _, run = CALLERS[name]

    def work(handed: Any, _: Callable[[str], object]) -> None:
        with rounding.ledger.transaction(handed) as inbox:
            assert isinstance(inbox.claim(key), Busy)

    run(rounding, work)


def test_rounding_in_lists(rounding: Place) -> None:
    """Lists and totals have the times to the microsecond: what is purged goes by them."""
    ledger, key = rounding.ledger, Key("billing", "1")
    ledger.complete(granted(ledger.claim(key)))
    record = ledger.find(key)
    assert [*ledger.scan()] == [record]
    assert [record for page in ledger.read() for record in page] == [record]
    assert record is not None
    assert ledger.tallies()["billing", State.COMPLETED].oldest == record.last_seen


def test_commits_that_a_crash_loses(postgresql_url: str, psql: Psycopg) -> None:
    """Settings by which the server may lose records are told."""
    with (
        set_for_database(postgresql_url, "synchronous_commit", "off"),
        closing(open_ledger(postgresql_url)) as ledger,
    ):
        ledger.migrate()
        psql.execute("ALTER TABLE processed_messages SET UNLOGGED")
        slow, unlogged = ledger.problems()
        assert "synchronous_commit = on" in slow
        assert "SET LOGGED" in unlogged


def test_encoding_of_a_database(postgresql: str, psql: Psycopg) -> None:
    """A database that lacks letters is told of."""
    psql.execute("CREATE DATABASE latin ENCODING LATIN1 LOCALE 'C' TEMPLATE template0")
    try:
        latin = make_url(postgresql).set(database="latin").render_as_string(hide_password=False)
        with closing(open_ledger(latin)) as ledger:
            ledger.migrate()
            [problem] = ledger.problems()
            assert "ENCODING 'UTF8'" in problem
    finally:
        psql.execute("DROP DATABASE latin WITH (FORCE)")


_PARTITIONED = """
    ALTER TABLE processed_messages RENAME TO first_made;
    CREATE TABLE processed_messages (LIKE first_made INCLUDING ALL EXCLUDING INDEXES,
        PRIMARY KEY (message_id, provider)) PARTITION BY LIST (provider);
    CREATE TABLE live_records PARTITION OF processed_messages FOR VALUES IN ('live');
    CREATE TABLE other_records PARTITION OF processed_messages DEFAULT;
"""


def test_purge_of_partitions(postgresql_url: str, psql: Psycopg) -> None:
    """In a table with partitions, only those records are purged that fit."""
    with closing(open_ledger(postgresql_url)) as ledger:
        ledger.migrate()
        psql.execute(_PARTITIONED)
        live = [Key("live", str(number)) for number in range(60)]
        over = [Key("over", str(number)) for number in range(20)]
        assert {type(outcome) for outcome in ledger.claim_many(live)} == {Granted}
        ledger.complete_many([granted(outcome) for outcome in ledger.claim_many(over)])
        assert ledger.purge("0s") == len(over)
        assert {type(outcome) for outcome in ledger.claim_many(live)} == {Busy}


_IS_THERE = {
    "postgresql": "SELECT 1 FROM pg_stat_activity WHERE pid = %s",
    "mysql": "SELECT 1 FROM information_schema.processlist WHERE id = %s",
}


@pytest.mark.parametrize(
    ("driver", "limit", "asked", "told"),
    [
        ("postgresql+psycopg", "idle_in_transaction_session_timeout", "pg_backend_pid", "idle_in"),
        ("postgresql+psycopg2", "idle_in_transaction_session_timeout", "pg_backend_pid", "closed"),
        pytest.param(
            *("mysql+pymysql", "wait_timeout", "connection_id", "gone away"),
            marks=pytest.mark.in_turn("useless sessions"),
        ),
    ],
)
def test_session_ended_while_its_handler_runs(
    driver: str, limit: str, asked: str, told: str, request: pytest.FixtureRequest
) -> None:
    """Where the server allows less time than a handler takes, that message fails, as it would with
    another error, and does not hold up others.
    """
    kind = driver.partition("+")[0]
    url = request.getfixturevalue(f"{kind}_ledger_url")
    transport = StoreTransport(MemoryStore())
    with (
        disposing(create_engine(make_url(url).set(drivername=driver))) as engine,
        disposing(engine_on(url, isolation_level="AUTOCOMMIT")) as other,
        other.connect() as watching,
        closing(open_ledger(url)) as ledger,
    ):
        consumer = Consumer(transport, queue="orders").transactional(engine)
        consumer.idempotent(ledger, "billing").tries(2).backoff([0])
        calls = set()

        @consumer.handler
        def handle(message: Message, connection: Connection) -> None:
            calls.add(message.id)
            if message.id == "slow":
                session = connection.exec_driver_sql(f"SELECT {asked}()").scalar_one()
                connection.exec_driver_sql(f"SET {limit} = 1")
                there = _IS_THERE[kind]
                wait_until(lambda: not watching.exec_driver_sql(there, (session,)).all())

        transport.subscribe("orders", [])
        transport.publish("orders", [Message(id_, b"{}") for id_ in ("a", "slow", "b")])
        consumer.consume(drain=True)
        assert calls == {"a", "slow", "b"}
        [letter] = ledger.dead()
        assert told in (letter.error or "")
        assert letter.attempts == 2
        assert ledger.counts()["billing", State.COMPLETED] == 2


# ---- MariaDB -----------------------------------------------------------------------------------


def check_two_ledgers(url: str, other_url: str) -> None:
    """A ledger answers as ever, and what it stores another sees."""
    with closing(open_ledger(url)) as ledger, closing(open_ledger(other_url)) as other:
        ledger.migrate()
        assert ledger.problems() == []
        claim = granted(ledger.claim(Key("billing", "live"), "60s"))
        assert isinstance(other.claim(claim.key), Busy)
        assert isinstance(ledger.claim(claim.key), Busy)
        check_answers(ledger)
        assert [type(outcome) for outcome in other.claim_many(KEYS)] == [Duplicate] * len(KEYS)


@pytest.mark.parametrize(
    "setting", ["max_join_size = 2", "sql_quote_show_create = 0", "timestamp = 2000000000"]
)
def test_settings_of_sessions(mysql_url: str, setting: str) -> None:
    """Whatever new sessions have, the ledger's have what it needs."""
    unusual = make_url(mysql_url).update_query_dict({"init_command": f"SET {setting}"})
    check_two_ledgers(unusual.render_as_string(hide_password=False), mysql_url)


@pytest.mark.parametrize("stopped_at", [1_000_000_000, 2_000_000_000])
@pytest.mark.parametrize("zone", ["+00:00", "-11:00"])
def test_stopped_clock_of_a_caller(mysql_ledger_url: str, zone: str, stopped_at: int) -> None:
    """Neither a claim of another, nor one of the caller's, seems to be over."""
    stop = {"init_command": f"SET timestamp = {stopped_at}, time_zone = '{zone}'"}
    with (
        closing(open_ledger(mysql_ledger_url)) as ledger,
        disposing(engine_on(mysql_ledger_url, connect_args=stop)) as engine,
    ):
        theirs, ours = Key("billing", "theirs"), Key("billing", "ours")
        granted(ledger.claim(theirs, "60s"))
        with engine.begin() as connection, ledger.transaction(connection) as inbox:
            assert isinstance(inbox.claim(theirs), Busy)
            granted(inbox.claim(ours, "60s"))
        assert isinstance(ledger.claim(ours), Busy)
        assert abs(ledger.now() - time.time()) < 60


@pytest.mark.parametrize("default", ["latin1", "utf8mb4 COLLATE utf8mb4_bin", "utf16"])
def test_default_letters_of_a_database(mysql_url: str, mysql: PyMysql, default: str) -> None:
    """Ids that differ in letters that the database's default lacks are different messages; what
    messages hold comes back.
    """
    rows_of(mysql, f"ALTER DATABASE CHARACTER SET {default}")
    keys = [Key("billing", chr(0x1F600 + number)) for number in range(200)]
    sent = Message("€", b"{}", "type.😀", source="😁")
    with closing(open_ledger(mysql_url)) as ledger:
        ledger.migrate()
        assert {type(outcome) for outcome in ledger.claim_many(keys[:150])} == {Granted}
        granted_now = [granted(outcome) for outcome in ledger.claim_many(keys[150:])]
        assert {type(outcome) for outcome in ledger.claim_many(keys)} == {Busy}
        ledger.complete_many(granted_now)
        parent = granted(ledger.claim(Key("billing", "parent")))
        ledger.handled(parent, None, [WaitingMessage("€", "mails", sent, parent.key, 0)])
        [taken] = ledger.mailbox.take(1, "60s")
        assert taken.message == sent
        ledger.mailbox.sent([taken])
        assert ledger.purge("0s") == len(granted_now) + 1


def set_for_server(server: MariaDb, setting: str) -> None:
    """Every new session has the setting."""
    with closing(connect_mysql(server.url)) as connection:
        rows_of(connection, f"SET GLOBAL {setting}")


@pytest.mark.parametrize(
    "setting",
    [
        "sql_mode = 'ORACLE'",
        "sql_mode = 'ANSI,NO_BACKSLASH_ESCAPES'",
        "completion_type = 'CHAIN'",
        "completion_type = 'RELEASE'",
    ],
)
def test_settings_of_the_server(private_mariadb: MariaDb, setting: str) -> None:
    """Neither another SQL, nor transactions that go on after COMMIT, change an answer."""
    set_for_server(private_mariadb, setting)
    check_two_ledgers(private_mariadb.url, private_mariadb.url)


def test_commits_that_a_server_answers_early(private_mariadb: MariaDb) -> None:
    """A setting by which the server may lose records is told."""
    set_for_server(private_mariadb, "innodb_flush_log_at_trx_commit = 2")
    with closing(open_ledger(private_mariadb.url)) as ledger:
        ledger.migrate()
        [problem] = ledger.problems()
        assert "innodb_flush_log_at_trx_commit = 1" in problem
