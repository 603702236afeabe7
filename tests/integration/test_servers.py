"""The servers that tests start: they answer, they come back, and nothing of them is left."""

import socket
import subprocess
import sys
import threading
from pathlib import Path

import psycopg
import pymysql
import pytest
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
