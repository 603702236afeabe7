"""Servers for tests that need a real one: started at first use, or named by the environment.

A server that cannot be had skips the tests that need it, and fails them in CI.
"""

import fcntl
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import pytest
from sqlalchemy import URL, make_url
from tests.servers import (
    Kafka,
    MariaDb,
    MissingProgram,
    PgBouncer,
    Postgresql,
    Rabbitmq,
    Redis,
    Server,
)

from oncely.ledger.ledger import open_ledger

if TYPE_CHECKING:
    from psycopg import Connection as PostgresqlConnection
    from psycopg.sql import Composed
    from pymysql.cursors import Cursor

S = TypeVar("S")

# The names of queues that tests use where they may choose.
QUEUES = ("orders", "another", "a", "A", "a.b", "a:b", "é")

_LEDGER_TABLES = {
    "processed_messages",
    "message_activity",
    "message_audit",
    "message_bindings",
    "message_consumers",
    "message_runs",
    "message_steps",
    "message_workers",
    "waiting_messages",
}
_VERSION_TABLE = "processed_messages_version"

# Number 0 is left alone: where a server has a use besides, it is there.
_REDIS_NUMBERS = cycle(range(1, 16))


@pytest.fixture(scope="session")
def postgresql() -> Iterator[str]:
    """The URL of the PostgreSQL that tests share."""
    yield from _shared(Postgresql, "ONCELY_TEST_POSTGRESQL_URL")


@pytest.fixture(scope="session")
def pgbouncer(postgresql: str) -> Iterator[PgBouncer]:
    """A PgBouncer in transaction mode in front of the PostgreSQL that tests share."""
    with available(lambda: PgBouncer(postgresql)) as server:
        yield server


@pytest.fixture(scope="session")
def mariadb() -> Iterator[str]:
    """The URL of the MariaDB (or MySQL) that tests share."""
    yield from _shared(MariaDb, "ONCELY_TEST_MYSQL_URL")


@pytest.fixture(scope="session")
def redis_server() -> Iterator[str]:
    """The URL of the Redis that tests share."""
    yield from _shared(Redis, "ONCELY_TEST_REDIS_URL")


@pytest.fixture(scope="session")
def rabbitmq() -> Iterator[Rabbitmq]:
    """The RabbitMQ that tests share, each in a vhost of its own."""
    with available(Rabbitmq) as server:
        yield server


@pytest.fixture(scope="session")
def kafka() -> Iterator[str]:
    """The URL of the Kafka that tests share."""
    yield from _shared(Kafka, "ONCELY_TEST_KAFKA_URL")


def _private(kind: type[Server]) -> Callable[[], Iterator[Server]]:
    @pytest.fixture
    def server() -> Iterator[Server]:
        """A server that the test may kill and start again."""
        with available(kind) as server:
            yield server

    return server


private_postgresql = _private(Postgresql)
private_mariadb = _private(MariaDb)
private_redis = _private(Redis)
private_rabbitmq = _private(Rabbitmq)
private_kafka = _private(Kafka)


@pytest.fixture(scope="session")
def _empty_databases(postgresql: str) -> Iterator[list[str]]:
    """The names of databases that tests have left, empty again: emptying one costs a tenth of
    what making and dropping one does.
    """
    names: list[str] = []
    yield names
    for name in names:
        _postgresql_drop(postgresql, name)


@pytest.fixture
def postgresql_url(postgresql: str, _empty_databases: list[str]) -> Iterator[str]:
    """The URL of an empty database on a PostgreSQL."""
    name = _empty_databases.pop() if _empty_databases else _postgresql_create(postgresql)
    url = _url_of(postgresql, name)
    yield url
    if _postgresql_is_empty_again(url):
        _empty_databases.append(name)
    else:
        _postgresql_drop(postgresql, name)


@pytest.fixture
def pooled_url(pgbouncer: PgBouncer, postgresql_url: str) -> str:
    """The URL of an empty database behind a PgBouncer in transaction mode."""
    return pgbouncer.url_of(str(make_url(postgresql_url).database))


@pytest.fixture
def mysql_url(mariadb: str) -> Iterator[str]:
    """The URL of an empty database on a MariaDB, gone after the test."""
    name = _new_name()
    with _mysql_cursor(mariadb) as cursor:
        cursor.execute(f"CREATE DATABASE {name}")
    yield _url_of(mariadb, name)
    with _mysql_cursor(mariadb) as cursor:
        _mysql_disconnect(cursor, name)
        cursor.execute(f"DROP DATABASE {name}")


@pytest.fixture(scope="session")
def _postgresql_ledgers(postgresql: str) -> Iterator[list[str]]:
    """The names of databases with a migrated ledger in them that tests have left, without a row."""
    names: list[str] = []
    yield names
    for name in names:
        _postgresql_drop(postgresql, name)


@pytest.fixture
def postgresql_ledger_url(postgresql: str, _postgresql_ledgers: list[str]) -> Iterator[str]:
    """The URL of a migrated ledger without a row on a PostgreSQL. What tables a test adds are gone
    after it; apart from them it leaves the schema as it is, or drops a table of the ledger.
    """
    is_new = not _postgresql_ledgers
    name = _postgresql_create(postgresql) if is_new else _postgresql_ledgers.pop()
    url = _url_of(postgresql, name)
    if is_new:
        _migrate(url)
    yield url
    if _postgresql_is_migrated_again(url):
        _postgresql_ledgers.append(name)
    else:
        _postgresql_drop(postgresql, name)


@pytest.fixture
def pooled_ledger_url(pgbouncer: PgBouncer, postgresql_ledger_url: str) -> str:
    """The same behind a PgBouncer in transaction mode."""
    return pgbouncer.url_of(str(make_url(postgresql_ledger_url).database))


@pytest.fixture(scope="session")
def _mysql_ledgers(mariadb: str) -> Iterator[list[str]]:
    """As on PostgreSQL."""
    names: list[str] = []
    yield names
    with _mysql_cursor(mariadb) as cursor:
        for name in names:
            cursor.execute(f"DROP DATABASE {name}")


@pytest.fixture
def mysql_ledger_url(mariadb: str, _mysql_ledgers: list[str]) -> Iterator[str]:
    """The URL of a migrated ledger without a row on a MariaDB: as on PostgreSQL."""
    if _mysql_ledgers:
        name = _mysql_ledgers.pop()
        url = _url_of(mariadb, name)
    else:
        name = _new_name()
        url = _url_of(mariadb, name)
        with _mysql_cursor(mariadb) as cursor:
            cursor.execute(f"CREATE DATABASE {name}")
        _migrate(url)
    yield url
    with _mysql_cursor(mariadb) as cursor:
        _mysql_disconnect(cursor, name)
        if _mysql_is_migrated_again(cursor, name):
            _mysql_ledgers.append(name)
        else:
            cursor.execute(f"DROP DATABASE {name}")


@pytest.fixture(scope="session")
def _sqlite_ledger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("migrated") / "ledger.db"
    _migrate(f"sqlite:///{file}")
    return file


@pytest.fixture
def sqlite_ledger_url(_sqlite_ledger: Path, tmp_path: Path) -> str:
    """The URL of a migrated ledger without a row in a file of the test's folder."""
    return f"sqlite:///{shutil.copy(_sqlite_ledger, tmp_path / 'ledger.db')}"


@pytest.fixture
def redis_url(redis_server: str) -> Iterator[str]:
    """The URL of an empty database on a Redis; the fifteenth test after this one empties it."""
    import redis

    url = _url_of(redis_server, str(next(_REDIS_NUMBERS)))
    with _alone_at("ONCELY_TEST_REDIS_URL"):
        with redis.Redis.from_url(url) as client:
            client.flushdb()
        yield url


@pytest.fixture
def rabbitmq_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of an empty vhost on a RabbitMQ, gone after the test.

    A server that the environment names cannot be told to make one: there the queues that tests
    use are deleted before the test.
    """
    if url := os.environ.get("ONCELY_TEST_RABBITMQ_URL"):
        with _alone_at("ONCELY_TEST_RABBITMQ_URL"):
            _delete_queues(url)
            yield url
        return
    server: Rabbitmq = request.getfixturevalue("rabbitmq")
    name = _new_name()
    server.add_vhost(name)
    yield server.url_of(name)
    server.delete_vhost(name)


@pytest.fixture
def kafka_url(kafka: str) -> Iterator[str]:
    """The URL of a Kafka without the topics that tests name where they may choose."""
    from confluent_kafka.admin import AdminClient

    with _alone_at("ONCELY_TEST_KAFKA_URL"):
        client = AdminClient({"bootstrap.servers": kafka.removeprefix("kafka://")})
        there = client.list_topics(timeout=60).topics
        old = {f"{name}{suffix}" for name in QUEUES for suffix in ("", ".dead", ".dead.dead")}
        if found := [*(old & there.keys())]:
            for deleted in client.delete_topics(found, operation_timeout=60).values():
                deleted.result()
        # Nobody waits long for members that come or are gone.
        yield f"{kafka}?heartbeat.interval.ms=200&session.timeout.ms=6000"


def available(kind: Callable[[], S]) -> S:
    """A server; where its program is missing, the test is skipped, or fails in CI."""
    try:
        return kind()
    except MissingProgram as missing:
        why = str(missing)
    if os.environ.get("CI", "").lower() in {"1", "true"}:
        pytest.fail(why)
    pytest.skip(why)


def _shared(kind: type[Server], variable: str) -> Iterator[str]:
    if url := os.environ.get(variable):
        yield url
        return
    with available(kind) as server:
        yield server.url


@contextmanager
def _alone_at(variable: str) -> Iterator[None]:
    """Where it names a server, which all processes share, their tests take turns."""
    if not os.environ.get(variable):
        yield
        return
    with (Path(tempfile.gettempdir()) / f"{variable}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _migrate(url: str) -> None:
    with closing(open_ledger(url)) as ledger:
        ledger.migrate()


def _new_name() -> str:
    return f"oncely_{uuid.uuid4().hex}"


def _url_of(server: str, database: str) -> str:
    return make_url(server).set(database=database).render_as_string(hide_password=False)


def _postgresql_execute(url: str, statement: "Composed") -> None:
    import psycopg

    with closing(psycopg.connect(url, autocommit=True)) as connection:
        connection.execute(statement)


def _postgresql_create(server: str) -> str:
    """Make a database; its name."""
    from psycopg import sql

    name = _new_name()
    _postgresql_execute(server, sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
    return name


def _postgresql_drop(server: str, name: str) -> None:
    from psycopg import sql

    drop = sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name))
    _postgresql_execute(server, drop)


_DISCONNECT = (
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
    " WHERE datname = current_database() AND pid <> pg_backend_pid()"
)
_PATIENCE = "-c statement_timeout=60s"
"""A session that was ended may hold its locks for a while; what takes longer is dropped."""
# What is made after initdb has a number from there on.
_LEFT = """
    SELECT 1 FROM pg_class WHERE oid >= 16384
    UNION ALL SELECT 1 FROM pg_proc WHERE oid >= 16384
    UNION ALL SELECT 1 FROM pg_type WHERE oid >= 16384
    UNION ALL SELECT 1 FROM pg_namespace WHERE oid >= 16384
    UNION ALL SELECT 1 FROM pg_extension WHERE oid >= 16384
    UNION ALL SELECT 1 FROM pg_event_trigger
    UNION ALL SELECT 1 FROM pg_default_acl
    UNION ALL SELECT 1 FROM pg_publication
    UNION ALL SELECT 1 FROM pg_db_role_setting JOIN pg_database ON setdatabase = pg_database.oid
        WHERE datname = current_database()
    UNION ALL SELECT 1 FROM pg_namespace JOIN pg_init_privs ON objoid = pg_namespace.oid
        WHERE nspname = 'public' AND nspacl IS DISTINCT FROM initprivs
"""


def _postgresql_is_empty_again(url: str) -> bool:
    """End what connections a test left, and drop its tables; whether that was all it left."""
    import psycopg

    try:
        with closing(psycopg.connect(url, autocommit=True, options=_PATIENCE)) as connection:
            connection.execute(_DISCONNECT)
            _postgresql_drop_tables(connection, _postgresql_tables(connection))
            return connection.execute(_LEFT).fetchone() is None
    except psycopg.Error:
        return False


def _postgresql_is_migrated_again(url: str) -> bool:
    """End what connections a test left, drop the tables that it added and empty the ledger's;
    whether all of those are there.
    """
    import psycopg
    from psycopg import sql

    try:
        with closing(psycopg.connect(url, autocommit=True, options=_PATIENCE)) as connection:
            connection.execute(_DISCONNECT)
            tables = _postgresql_tables(connection)
            if not tables >= {*_LEDGER_TABLES, _VERSION_TABLE}:
                return False
            _postgresql_drop_tables(connection, tables - _LEDGER_TABLES - {_VERSION_TABLE})
            names = sql.SQL(", ").join(map(sql.Identifier, _LEDGER_TABLES))
            connection.execute(sql.SQL("TRUNCATE {}").format(names))
            return True
    except psycopg.errors.QueryCanceled:
        return False


def _postgresql_tables(connection: "PostgresqlConnection") -> set[str]:
    found = connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")
    return {name for (name,) in found}


def _postgresql_drop_tables(connection: "PostgresqlConnection", tables: set[str]) -> None:
    from psycopg import sql

    if tables:
        names = sql.SQL(", ").join(sql.Identifier("public", name) for name in tables)
        connection.execute(sql.SQL("DROP TABLE {} CASCADE").format(names))


@contextmanager
def _mysql_cursor(url: str) -> Iterator["Cursor"]:
    import pymysql

    at: URL = make_url(url)
    with (
        closing(
            pymysql.connect(
                host=at.host,
                port=at.port or 3306,
                user=at.username,
                password=at.password or "",
                autocommit=True,
            )
        ) as connection,
        connection.cursor() as cursor,
    ):
        yield cursor


def _mysql_is_migrated_again(cursor: "Cursor", database: str) -> bool:
    """Drop the tables that a test added, and empty the ledger's; whether all of those are there."""
    cursor.execute(f"USE {database}")
    cursor.execute("SHOW TABLES")
    tables = {name for (name,) in cursor.fetchall()}
    if not tables >= {*_LEDGER_TABLES, _VERSION_TABLE}:
        return False
    for table in tables - _LEDGER_TABLES - {_VERSION_TABLE}:
        cursor.execute(f"DROP TABLE `{table}`")
    for table in _LEDGER_TABLES:
        # What is deleted goes on being locked until the server has swept it up.
        cursor.execute(f"TRUNCATE {table}")
    return True


def _mysql_disconnect(cursor: "Cursor", database: str) -> None:
    """End what connections a test left: a transaction in one would hold up dropping for ever."""
    import pymysql

    cursor.execute("SELECT id FROM information_schema.processlist WHERE db = %s", (database,))
    for (connection,) in cursor.fetchall():
        # It may have gone by itself meanwhile.
        with suppress(pymysql.OperationalError):
            cursor.execute("KILL %s", (connection,))


def _delete_queues(url: str) -> None:
    import pika

    with closing(pika.BlockingConnection(pika.URLParameters(url))) as connection:
        channel = connection.channel()
        for name in QUEUES:
            for suffix in ("", ".dead", ".delay.10", ".delay.1000", ".delay.longer"):
                channel.queue_delete(f"{name}{suffix}")
