"""The ledger's statements in a caller's transaction, broken off anywhere: by a cancellation, or by
what a signal handler raises. That error is the one that comes out; and whatever returned, before
and after, of callers of the ledger and of others on the same connections, is committed.
"""

import asyncio
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager, suppress
from itertools import count
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, make_url, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from tests.integration.callers import CALLERS, Execute, Place, Work, insertion, opened
from tests.integration.cancelling import CancelledAt
from tests.integration.drivers import connect_mysql, connect_postgresql
from tests.integration.others import Other, OtherOnMysql, OtherOnPostgresql
from tests.records import granted
from tests.unit.test_interrupts import SoftTimeLimitError, Tracer, limit

from oncely.barrier import idempotent_consumer, message_context
from oncely.core.commands import Granted
from oncely.core.errors import EndedError
from oncely.core.record import Key, State
from oncely.once import once

CONSUMER = "billing"
ASYNC_DRIVERS = {
    "aiosqlite": "sqlite",
    "asyncpg": "postgresql",
    "psycopg": "postgresql",
    "asyncmy": "mysql",
}

AsyncWork = Callable[[str], Awaitable[None]]


# ---- Cancelled ---------------------------------------------------------------------------------


def _by_once(place: Place, engine: AsyncEngine) -> AsyncWork:
    @once(place.ledger, consumer=CONSUMER, key=lambda id_: id_, transaction=engine)
    async def work(id_: str, connection: Any) -> None:
        await connection.execute(text(insertion(id_)))

    return work


def _by_transaction(place: Place, engine: AsyncEngine) -> AsyncWork:
    async def work(id_: str) -> None:
        async with (
            AsyncSession(engine) as session,
            session.begin(),
            place.ledger.transaction(session) as inbox,
        ):
            outcome = await inbox.claim(Key(CONSUMER, id_))
            assert isinstance(outcome, Granted)
            await session.execute(text(insertion(id_)))
            await inbox.send("mails", id_)
            await inbox.complete(outcome.claim)

    return work


def _by_barrier(place: Place, engine: AsyncEngine) -> AsyncWork:
    @idempotent_consumer(place.ledger)
    async def handle(id_: str, connection: Any) -> None:
        await connection.execute(text(insertion(id_)))

    async def work(id_: str) -> None:
        async with engine.begin() as connection:
            with message_context(id_, CONSUMER, connection):
                await handle(id_, connection)

    return work


@pytest.mark.in_turn("broken off")
@pytest.mark.parametrize("driver", ASYNC_DRIVERS)
@pytest.mark.parametrize("by", [_by_once, _by_transaction, _by_barrier])
@pytest.mark.parametrize("times", [1, 2], ids=["once", "twice in a row"])
def test_cancelled_at_every_await(
    driver: str,
    by: Callable[[Place, AsyncEngine], AsyncWork],
    times: int,
    request: pytest.FixtureRequest,
) -> None:
    """Whatever has returned is committed: of the call that is cancelled, of the next one on the
    connection, and of other code there that knows nothing of a ledger.
    """
    kind = ASYNC_DRIVERS[driver]
    returned: list[str] = []

    async def run(place: Place) -> None:
        url = make_url(place.url).set(drivername=f"{kind}+{driver}")
        engine = create_async_engine(url, pool_size=1, max_overflow=0)
        work = by(place, engine)
        await work("warm")
        for number in count():
            broken_off = CancelledAt(work(f"{number}"), number, times)
            [error] = await asyncio.gather(_awaited(broken_off), return_exceptions=True)
            assert error is None or type(error) is asyncio.CancelledError
            if error is None:
                returned.append(f"{number}")
            async with engine.begin() as connection:
                await connection.execute(text(insertion(f"other {number}")))
            await work(f"later {number}")
            returned.extend((f"other {number}", f"later {number}"))
            if broken_off.waits <= number:
                break
        assert number > 5
        # Of a connection that is closed, nothing more is committed.
        _check(place, returned)
        await engine.dispose()

    with opened(kind, request) as place:
        asyncio.run(run(place))


@pytest.mark.parametrize("driver", ASYNC_DRIVERS)
def test_cancellation_that_is_swallowed(driver: str, request: pytest.FixtureRequest) -> None:
    """Leaving the block raises, as after any error: nothing of the transaction would be stored."""
    kind = ASYNC_DRIVERS[driver]

    async def swallow(place: Place, engine: AsyncEngine) -> None:
        async with engine.begin() as connection, place.ledger.transaction(connection) as inbox:
            await connection.execute(text(insertion("1")))
            with suppress(asyncio.CancelledError):
                await CancelledAt(inbox.claim(Key(CONSUMER, "1")), 0)

    async def run(place: Place) -> None:
        engine = create_async_engine(make_url(place.url).set(drivername=f"{kind}+{driver}"))
        with pytest.raises(EndedError, match="CancelledError"):
            await swallow(place, engine)
        await engine.dispose()
        assert place.rows() == []

    with opened(kind, request) as place:
        asyncio.run(run(place))


async def _awaited(work: Awaitable[None]) -> None:
    await work


def _check(place: Place, returned: list[str]) -> None:
    """What returned is committed; and of what did not, all is or nothing."""
    rows = place.rows()
    assert sorted({*returned}.difference(rows)) == []
    assert len(rows) == len({*rows})
    handled = {
        record.key.message_id
        for record in place.ledger.scan(CONSUMER, limit=10_000)
        if record.state is State.COMPLETED
    }
    assert {row for row in rows if not row.startswith("other")} == handled


# ---- Interrupted -------------------------------------------------------------------------------


@contextmanager
def _raised_by_signal(error: type[BaseException]) -> Iterator[None]:
    def handler(*_: object) -> None:
        raise error

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


def _pooled(driver: str) -> Callable[[Place, Work], None]:
    engines: dict[int, Engine] = {}

    def run(place: Place, work: Work) -> None:
        if id(place) not in engines:
            url = make_url(place.url).set(drivername=driver)
            engines.clear()
            engines[id(place)] = create_engine(url, pool_size=1, max_overflow=0)
        with engines[id(place)].begin() as connection:
            work(connection, lambda statement: connection.execute(text(statement)))

    return run


_WAYS = {
    "psycopg in a pool": ("postgresql", _pooled("postgresql+psycopg")),
    "psycopg2 in a pool": ("postgresql", _pooled("postgresql+psycopg2")),
    "pymysql in a pool": ("mysql", _pooled("mysql+pymysql")),
    **{name: CALLERS[name] for name in ("psycopg", "psycopg2", "postgresql django", "pymysql")},
}


_CONNECT: dict[str, Callable[[str], Any]] = {
    "postgresql": connect_postgresql,
    "mysql": connect_mysql,
}
_OTHERS: dict[str, Callable[[Any], Other]] = {
    "postgresql": OtherOnPostgresql,
    "mysql": OtherOnMysql,
}


@pytest.mark.in_turn("broken off")
@pytest.mark.parametrize("name", _WAYS)
@pytest.mark.parametrize("error", [SoftTimeLimitError, KeyboardInterrupt])
def test_signal_in_a_statement(
    name: str, error: type[BaseException], request: pytest.FixtureRequest
) -> None:
    """While a claim waits for a lock, a signal handler raises: that comes out. Nothing of the
    transaction is stored, and what follows on the connections is.
    """
    kind, run = _WAYS[name]

    def pay(id_: str) -> None:
        def work(handed: Any, execute: Execute) -> None:
            with place.ledger.transaction(handed) as inbox:
                execute(insertion(id_))
                inbox.complete(granted(inbox.claim(Key(CONSUMER, id_))))

        run(place, work)

    def interrupt() -> None:
        other.await_waiters()
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        # Some drivers do not look for signals before the answer comes.
        other.run("ROLLBACK")

    with (
        opened(kind, request) as place,
        closing(_CONNECT[kind](place.url)) as connection,
        _raised_by_signal(error),
    ):
        other = _OTHERS[kind](connection)
        pay("warm")
        place.ledger.fail(granted(place.ledger.claim(Key(CONSUMER, "locked"))), "declined")
        other.run("BEGIN")
        other.lock(Key(CONSUMER, "locked"))
        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(error) as raised:
            pay("locked")
        assert raised.type is error
        thread.join()
        run(place, lambda _, execute: execute(insertion("other")))
        pay("later")
        assert place.rows() == ["later", "other", "warm"]
        assert place.find(Key(CONSUMER, "later")).state is State.COMPLETED


def test_signal_anywhere_in_the_ledger(request: pytest.FixtureRequest) -> None:
    """The same on SQLite, whose driver sees no signals: between its statements."""
    raised = 0

    def pay(id_: str) -> None:
        with engine.begin() as connection, place.ledger.transaction(connection) as inbox:
            connection.execute(text(insertion(id_)))
            inbox.complete(granted(inbox.claim(Key(CONSUMER, id_))))

    with opened("sqlite", request) as place:
        engine = create_engine(place.url, pool_size=1, max_overflow=0)
        for number in count(0, 5):
            with Tracer(number, limit) as tracer:
                try:
                    pay(f"{number}")
                except SoftTimeLimitError:
                    raised += 1
            with engine.begin() as connection:
                connection.execute(text(insertion(f"other {number}")))
            if not tracer.has_run:
                break
        assert raised > 10
        _check(place, [f"other {each}" for each in range(0, number + 1, 5)])
        engine.dispose()
