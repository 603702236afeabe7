"""Servers that are away, that take nobody more, or that never answer."""

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import psycopg
import pymysql
import pytest
from tests.integration.drivers import connect_mysql, connect_postgresql, rows_of
from tests.records import granted
from tests.servers import MariaDb, Postgresql, Server

from oncely.core.errors import StoreUnavailable
from oncely.core.record import Key
from oncely.ledger.ledger import open_ledger
from oncely.stores import retrying
from oncely.stores.sql import engines

_CONSUMER = "billing"
_A, _B = Key(_CONSUMER, "a"), Key(_CONSUMER, "b")


@pytest.fixture(params=["postgresql", "mariadb"])
def server(request: pytest.FixtureRequest) -> Server:
    """A server that the test may stop, of each kind."""
    server = request.getfixturevalue(f"private_{request.param}")
    assert isinstance(server, Server)
    return server


def test_server_away(server: Server) -> None:
    """While the server is away every call says so; afterwards all goes on."""
    with closing(open_ledger(server.url)) as ledger:
        ledger.migrate()
        claim = granted(ledger.claim(_A, "none"))
        server.stop()
        calls: list[Callable[[], object]] = [lambda: ledger.complete(claim), ledger.counts]
        for call in calls:
            with pytest.raises(StoreUnavailable, match=r"^[^\n]*[Cc]onnect[^\n]*$") as raised:
                call()
            assert "secret" not in str(raised.value)
        server.start()
        ledger.complete(claim)
        granted(ledger.claim(_B))


def test_too_many_connections(server: Server) -> None:
    """A server that takes no more connections is unavailable until it does."""
    with closing(open_ledger(server.url)) as ledger:
        ledger.migrate()
        ledger.close()
        with _full(server), pytest.raises(StoreUnavailable, match=r"[Tt]oo many"):
            ledger.claim(_A)
        granted(ledger.claim(_A))


@contextmanager
def _full(server: Server) -> Iterator[None]:
    """All connections that a server takes are taken, for as long as the block."""
    connect: Callable[[str], Any] = connect_mysql
    if isinstance(server, Postgresql):
        connect = connect_postgresql
    with ExitStack() as opened:
        if isinstance(server, MariaDb):
            first = opened.enter_context(closing(connect_mysql(server.url)))
            rows_of(first, "SET GLOBAL max_connections = 10")
        while True:
            try:
                opened.enter_context(closing(connect(server.url)))
            except (psycopg.OperationalError, pymysql.OperationalError):
                break
        yield


@pytest.mark.parametrize("kind", ["postgresql", "mysql"])
def test_server_that_never_answers(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that accepts a connection and says nothing is unavailable after a while."""
    monkeypatch.setattr(retrying, "_TRIES", 1)
    # PostgreSQL's driver waits for no less.
    monkeypatch.setattr(engines, "_CONNECT_TIMEOUT_S", 2)
    monkeypatch.setattr(engines, "_ANSWER_TIMEOUT_S", 1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        ledger = open_ledger(f"{kind}://anna@127.0.0.1:{port}/x")
        with pytest.raises(StoreUnavailable, match=r"timeout|timed out"):
            ledger.claim(_A)
