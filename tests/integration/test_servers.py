"""The servers that tests start: they answer, they come back, and nothing of them is left."""

import socket
import subprocess
import sys
import threading
from pathlib import Path

import psycopg
import pymysql
import pytest
import redis
from sqlalchemy import make_url
from tests.conditions import wait_until
from tests.server_fixtures import available
from tests.servers import HOST, MariaDb, Postgresql, Rabbitmq, Redis, Server

ROOT = Path(__file__).parents[2]

# Says where the server is, and goes on until it is killed.
OWNER = """
import sys
from tests.servers import Postgresql
server = Postgresql()
server.start()
print(server.folder, server.url, flush=True)
sys.stdin.read()
"""


def connect_mysql(url: str) -> "pymysql.Connection[pymysql.cursors.Cursor]":
    at = make_url(url)
    assert at.username
    assert at.port
    return pymysql.connect(
        host=at.host,
        port=at.port,
        user=at.username,
        password=at.password or "",
        database=at.database,
    )


def test_postgresql_gives_an_empty_database(postgresql_url: str) -> None:
    """A database of the test's own, in UTF-8, on a server that is durable."""
    with psycopg.connect(postgresql_url) as connection:
        tables = connection.execute("SELECT count(*) FROM pg_tables WHERE schemaname = 'public'")
        assert tables.fetchone() == (0,)
        for setting, value in (
            ("server_encoding", "UTF8"),
            ("fsync", "on"),
            ("synchronous_commit", "on"),
        ):
            assert connection.execute(f"SHOW {setting}").fetchone() == (value,)


def test_mariadb_gives_an_empty_database(mysql_url: str) -> None:
    """A database of the test's own, in UTF-8, on a server that is durable."""
    with connect_mysql(mysql_url) as connection, connection.cursor() as cursor:
        cursor.execute("SHOW TABLES")
        assert cursor.fetchall() == ()
        cursor.execute("SELECT @@character_set_database, @@innodb_flush_log_at_trx_commit")
        assert cursor.fetchone() == ("utf8mb4", 1)


def test_redis_gives_an_empty_database(redis_url: str) -> None:
    """A database that is empty, on a server that keeps what it holds."""
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        assert client.dbsize() == 0
        assert client.config_get("appendonly") == {"appendonly": "yes"}
        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}


def test_a_killed_postgresql_comes_back_with_its_data(private_postgresql: Postgresql) -> None:
    """What was committed before a crash is there after it, at the same URL."""
    url = private_postgresql.url
    with psycopg.connect(url) as connection:
        connection.execute("CREATE TABLE kept AS SELECT 17 AS number")
        connection.commit()
        private_postgresql.kill()
        with pytest.raises(psycopg.OperationalError):
            connection.execute("SELECT 1")
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(url)
    private_postgresql.start()
    assert private_postgresql.url == url
    with psycopg.connect(url) as connection:
        assert connection.execute("SELECT number FROM kept").fetchone() == (17,)


def test_a_killed_mariadb_comes_back_with_its_data(private_mariadb: MariaDb) -> None:
    """What was committed before a crash is there after it, at the same URL."""
    with connect_mysql(private_mariadb.url) as connection, connection.cursor() as cursor:
        cursor.execute("CREATE TABLE kept AS SELECT 17 AS number")
        connection.commit()
    private_mariadb.kill()
    private_mariadb.start()
    with connect_mysql(private_mariadb.url) as connection, connection.cursor() as cursor:
        cursor.execute("SELECT number FROM kept")
        assert cursor.fetchone() == (17,)


def test_a_redis_that_is_restarted_has_its_data(private_redis: Redis) -> None:
    """What was written before a restart is there after it, at the same URL."""
    with redis.Redis.from_url(private_redis.url) as client:
        client.set("kept", 17)
        private_redis.restart()
        assert client.get("kept") == b"17"


@pytest.fixture
def left() -> list[object]:
    """What the test leaves open; asked for first, it outlives the test's other fixtures."""
    return []


def test_a_left_transaction_does_not_hold_up_the_end(left: list[object], mysql_url: str) -> None:
    """A connection that a test leaves open, a row locked in it, ends with the test's database."""
    connection = connect_mysql(mysql_url)
    left.append(connection)
    with connection.cursor() as cursor:
        cursor.execute("CREATE TABLE held AS SELECT 17 AS number")
        cursor.execute("SELECT * FROM held FOR UPDATE")


@pytest.mark.parametrize("kind", [Postgresql, MariaDb, Redis, Rabbitmq])
def test_a_missing_program(kind: type[Server], monkeypatch: pytest.MonkeyPatch) -> None:
    """It skips the test on somebody's machine, and fails it in CI."""
    monkeypatch.setattr("tests.servers.find_program", lambda name: None)
    advice = f"{kind.name} is not installed; type: apt-get install {kind.package}"
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match=advice):
        available(kind)
    monkeypatch.setenv("CI", "True")
    with pytest.raises(pytest.fail.Exception, match=advice):
        available(kind)


def test_nothing_is_left_of_a_server_whose_owner_is_killed() -> None:
    """Nothing answers where it was and its folder goes, though nobody closed it."""
    # Only to see that this machine has it.
    available(Postgresql).close()
    with subprocess.Popen(
        [sys.executable, "-c", OWNER],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as owner:
        assert owner.stdout is not None
        folder, url = owner.stdout.readline().split()
        owner.kill()
    wait_until(lambda: not Path(folder).exists())
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(url)


@pytest.mark.usefixtures("rabbitmq")
def test_another_has_the_port() -> None:
    """RabbitMQ starts elsewhere where another server has the port of its epmd."""
    server = Rabbitmq()
    first = server.port
    with socket.create_server((HOST, first + 2)) as other:

        def answer() -> None:
            while True:
                try:
                    asking, _ = other.accept()
                except OSError:
                    return
                with asking:
                    asking.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        threading.Thread(target=answer, daemon=True).start()
        with server:
            assert server.port != first
            assert "oncely" in server.evaluate("node()")
        other.shutdown(socket.SHUT_RDWR)
