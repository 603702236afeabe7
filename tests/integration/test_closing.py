"""Ledgers that are closed leave no thread and no connection; their heartbeats wait for nobody."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from datetime import timedelta

import pytest
from sqlalchemy import Connection, event
from tests.conformance.conftest import ledger_url_of
from tests.records import granted

from oncely.core.errors import StoreUnavailable
from oncely.core.record import Key
from oncely.ledger.ledger import Ledger, open_ledger
from oncely.lifecycle.heartbeat import Heartbeat
from oncely.once import once
from oncely.stores.sql.sql_store import SqlStore
from oncely.testing import at_once

_KINDS = ("memory", "sqlite", "postgresql", "mysql", "redis")


@pytest.fixture(params=_KINDS)
def url(request: pytest.FixtureRequest) -> str:
    """The URL of a ledger without a row of each kind."""
    return "memory://" if request.param == "memory" else ledger_url_of(request.param, request)


def use(ledger: Ledger, number: int) -> None:
    """Call it from functions, tasks and threads, with claims that have a lease."""

    @once(ledger, consumer="billing", key=str, lease="60s")
    def charge(order: int) -> int:
        return order

    @once(ledger, consumer="mailing", key=str, lease="30s")
    async def mail(order: int) -> int:
        return order

    async def mail_all() -> None:
        await asyncio.gather(*(mail(number * 100 + n) for n in range(5)))

    assert charge(number) == number
    asyncio.run(mail_all())
    at_once(3, lambda n: charge(1_000_000 + number * 100 + n))
    ledger.mailbox.wait(timedelta(milliseconds=1))


def test_closed_and_used_again(url: str) -> None:
    """A ledger that is used after it was closed goes on, and can be closed again."""
    before = set(threading.enumerate())
    ledger = open_ledger(url)
    for number in range(3):
        use(ledger, number)
        ledger.close()
        assert set(threading.enumerate()) <= before


@pytest.fixture(params=["sqlite", "postgresql", "mysql"])
def sql_ledger(request: pytest.FixtureRequest) -> Iterator[Ledger]:
    """A ledger in a database of each kind."""
    with closing(open_ledger(ledger_url_of(request.param, request))) as ledger:
        yield ledger


def test_heartbeat_while_every_connection_is_taken(sql_ledger: Ledger) -> None:
    """Claims are extended though all connections of the pool are in use, and over one that was not
    closed with them.
    """
    store = sql_ledger._store
    assert isinstance(store, SqlStore)
    claim = granted(sql_ledger.claim(Key("billing", "1"), "60s"))
    heartbeat = Heartbeat(sql_ledger, 60.0, is_by_hand=True)
    heartbeat.hold([claim], 0.0)
    with ExitStack() as taken:
        for _ in range(store._engine.pool.size() + store._engine.pool._max_overflow):  # type: ignore[attr-defined]
            taken.enter_context(store._engine.connect())
        heartbeat.beat()
        heartbeat.beat()
    assert heartbeat.let_go([claim])[0].version == claim.version + 2


def test_connections_end(sql_ledger: Ledger) -> None:
    """When a ledger is closed, so are its connections, the heartbeat's too."""
    opened, closed = _watched(sql_ledger)
    heartbeat = Heartbeat(sql_ledger, 60.0, is_by_hand=True)
    claim = granted(sql_ledger.claim(Key("billing", "1"), "60s"))
    heartbeat.hold([claim], 0.0)
    heartbeat.beat()
    sql_ledger.close()
    assert len(opened) == 2
    assert opened <= closed


@pytest.mark.parametrize("is_closed", [True, False])
def test_connections_at_work_end(sql_ledger: Ledger, is_closed: bool) -> None:
    """A connection at which a thread was at work when its ledger was closed, or when another
    connection had broken, is closed as soon as the thread is done.
    """
    opened, closed = _watched(sql_ledger)
    store = sql_ledger._store
    assert isinstance(store, SqlStore)

    def work(_: Connection) -> None:
        if is_closed:
            sql_ledger.close()
        else:
            # As after an error that says that a connection is gone.
            store._engine.dispose()
        assert len(opened) == 1
        assert not closed

    store._once(work, lost=StoreUnavailable)
    assert opened == closed


def _watched(ledger: Ledger) -> tuple[set[int], set[int]]:
    """Closes the ledger; the connections that it opens and closes from then on."""
    store = ledger._store
    assert isinstance(store, SqlStore)
    alive: list[object] = []
    opened: set[int] = set()
    closed: set[int] = set()

    def opens(connection: object, _: object) -> None:
        alive.append(connection)  # So that its number stays its own.
        opened.add(id(connection))

    ledger.close()
    for engine in (store._engine, store._engine_beside):
        event.listen(engine, "connect", opens)
        event.listen(engine, "close", lambda connection, _: closed.add(id(connection)))
    return opened, closed
