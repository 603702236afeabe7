"""Servers for tests that need a real one: started at first use, or named by the environment.

A server that cannot be had skips the tests that need it, and fails them in CI.
"""

import fcntl
import os
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import pytest
from sqlalchemy import URL, make_url
from tests.servers import MariaDb, MissingProgram, PgBouncer, Postgresql, Rabbitmq, Redis, Server

if TYPE_CHECKING:
    from psycopg.sql import Composed
    from pymysql.cursors import Cursor

S = TypeVar("S")

# The names of queues that tests use where they may choose.
QUEUES = ("orders", "another", "a", "A", "a.b", "a:b", "é")

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


@pytest.fixture
def private_postgresql() -> Iterator[Postgresql]:
    """A PostgreSQL that the test may kill and start again."""
    with available(Postgresql) as server:
        yield server


@pytest.fixture
def private_mariadb() -> Iterator[MariaDb]:
    """A MariaDB that the test may kill and start again."""
    with available(MariaDb) as server:
        yield server


@pytest.fixture
def private_redis() -> Iterator[Redis]:
    """A Redis that the test may kill and start again."""
    with available(Redis) as server:
        yield server


@pytest.fixture
def private_rabbitmq() -> Iterator[Rabbitmq]:
    """A RabbitMQ that the test may kill and start again."""
    with available(Rabbitmq) as server:
        yield server


@pytest.fixture
def postgresql_url(postgresql: str) -> Iterator[str]:
    """The URL of an empty database on a PostgreSQL, gone after the test."""
    from psycopg import sql

    name = _new_name()
    _postgresql_execute(postgresql, sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
    yield _url_of(postgresql, name)
    drop = sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name))
    _postgresql_execute(postgresql, drop)


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


def _new_name() -> str:
    return f"oncely_{uuid.uuid4().hex}"


def _url_of(server: str, database: str) -> str:
    return make_url(server).set(database=database).render_as_string(hide_password=False)


def _postgresql_execute(url: str, statement: "Composed") -> None:
    import psycopg

    with closing(psycopg.connect(url, autocommit=True)) as connection:
        connection.execute(statement)


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
