"""`once(..., transaction=...)`: a function whose work and whose claim are stored together."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from sqlalchemy import Connection, make_url, text
from sqlalchemy.exc import DBAPIError, InvalidRequestError, ProgrammingError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.orm import Session, sessionmaker
from tests.conditions import LIMIT_S
from tests.integration.callers import Place
from tests.integration.drivers import as_a_program, engine_on
from tests.proxy import Proxy

from oncely.core.errors import EndedError, StoreError
from oncely.core.message import Message
from oncely.core.record import Key, State
from oncely.once import once
from oncely.testing import at_once

MESSAGE = Message("abc-123", b"{}")
KEY = Key("billing", MESSAGE.id)
_ASYNC = {
    "sqlite": "sqlite+aiosqlite",
    "postgresql": "postgresql+psycopg",
    "mysql": "mysql+asyncmy",
}

Charge = Callable[..., Any]
behind_a_pooler_too = pytest.mark.parametrize("place", [*_ASYNC, "pooled"], indirect=True)


def charged(place: Place, transaction: Any = None, **options: Any) -> Callable[[Charge], Any]:
    """`once` for this place."""
    guard: Callable[[Charge], Any] = once(
        place.ledger,
        consumer="billing",
        key=lambda message, *_: message.id,
        transaction=transaction or place.engine,
        **options,
    )
    return guard


def insert(connection: Connection | Session, message: Message = MESSAGE) -> None:
    """The business's own row, which nothing keeps from being there twice."""
    row = {"message": message.id}
    connection.execute(text("INSERT INTO effects (message) VALUES (:message)"), row)


@behind_a_pooler_too
def test_one_commit_for_all(place: Place) -> None:
    """The row, the record, its result and what was sent are stored together, once."""

    @charged(place, keep_result=True)
    def charge(message: Message, connection: Connection) -> str:
        insert(connection)
        message.send("post", "a letter")
        return f"charged {message.step('note', lambda: 'once')}"

    assert charge(MESSAGE) == charge(MESSAGE) == "charged once"
    assert len(place.rows()) == 1
    assert place.find(KEY).state is State.HANDLED
    [letter] = place.ledger.mailbox.deferred(KEY)
    assert letter.message.body == b"a letter"
    place.ledger.mailbox.sent([letter])
    assert place.find(KEY).state is State.COMPLETED


def test_sessions(place: Place) -> None:
    """A sessionmaker gives sessions: what they hold is flushed and stored with the claim."""

    @charged(place, sessionmaker(place.engine))
    def charge(message: Message, session: Any) -> None:
        assert isinstance(session, Session)
        insert(session)

    charge(MESSAGE)
    assert len(place.rows()) == 1
    assert place.find(KEY).state is State.COMPLETED


@behind_a_pooler_too
def test_failure_undoes_all_and_is_recorded(place: Place) -> None:
    """What a failed function wrote, finished and sent is gone; its error and attempt are kept."""
    failures = iter([True, False])

    @charged(place)
    def charge(message: Message, connection: Connection) -> None:
        insert(connection)
        message.step("note", lambda: 1)
        message.send("post", "a letter")
        if next(failures):
            raise ValueError("no money")

    with pytest.raises(ValueError, match="no money"):
        charge(MESSAGE)
    assert (place.find(KEY).state, place.find(KEY).attempts) == (State.FAILED, 1)
    assert place.find(KEY).error == "ValueError: no money"
    assert len(place.rows()) == 0
    assert place.ledger.steps(KEY) == {}
    assert place.ledger.mailbox.deferred(KEY) == []
    charge(MESSAGE)
    assert len(place.rows()) == 1
    assert place.find(KEY).attempts == 2


def test_result_that_is_no_json(place: Place) -> None:
    """A result that cannot be kept undoes nothing: the work is done, and a duplicate gets None."""

    @charged(place, keep_result=True)
    def charge(message: Message, connection: Connection) -> object:
        insert(connection)
        return object()

    charge(MESSAGE)
    assert charge(MESSAGE) is None
    assert len(place.rows()) == 1
    assert place.find(KEY).state is State.COMPLETED


_LEVELS = ("READ UNCOMMITTED", "READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE")


@pytest.mark.parametrize(
    ("place", "level"),
    [
        *((kind, None) for kind in (*_ASYNC, "pooled")),
        *((kind, level) for kind in ("postgresql", "mysql") for level in _LEVELS),
    ],
    indirect=["place"],
)
def test_deliveries_at_once(place: Place, level: Any) -> None:
    """Of racing deliveries one does the work, whatever isolation a program's connections have; none
    meets an error, however the locks fall.
    """
    engine = place.engine if level is None else engine_on(place.url, isolation_level=level)

    @charged(place, engine)
    def charge(message: Message, connection: Connection) -> None:
        insert(connection, message)

    messages = [Message(str(n)) for n in range(20 if level is None else 5)]
    at_once(16 if level is None else 4, lambda _: [charge(message) for message in messages])
    engine.dispose()
    assert len(place.rows()) == len(messages)
    assert place.ledger.counts() == {("billing", State.COMPLETED): len(messages)}


@pytest.mark.parametrize("place", ["postgresql", "mysql"], indirect=True)
def test_deadlock_of_the_work_itself(place: Place) -> None:
    """Two functions that lock each other's rows: one loses, all of it is done again, none fails."""
    with place.engine.begin() as connection:
        connection.execute(text("CREATE TABLE accounts (id INTEGER PRIMARY KEY, total INTEGER)"))
        connection.execute(text("INSERT INTO accounts VALUES (0, 0), (1, 0)"))
    both_hold_one = threading.Barrier(2)
    runs: list[str] = []

    @charged(place)
    def charge(message: Message, connection: Connection) -> None:
        runs.append(message.id)
        first = int(message.id)
        _add_to(connection, first)
        if len(runs) <= 2:
            both_hold_one.wait(LIMIT_S)
        _add_to(connection, 1 - first)

    at_once(2, lambda n: charge(Message(str(n))))
    assert len(runs) == 3
    with place.engine.connect() as connection:
        totals = connection.execute(text("SELECT total FROM accounts")).scalars().all()
    assert totals == [2, 2]
    assert place.ledger.counts() == {("billing", State.COMPLETED): 2}


def _add_to(connection: Connection, account: int) -> None:
    statement = "UPDATE accounts SET total = total + 1 WHERE id = :id"
    connection.execute(text(statement), {"id": account})


@behind_a_pooler_too
def test_async(place: Place) -> None:
    """Coroutines work in transactions of an async engine."""
    at, settings = as_a_program(place.url)
    engine = create_async_engine(at.set(drivername=_ASYNC[at.get_backend_name()]), **settings)
    failures = iter([True, False])

    @charged(place, engine)
    async def charge(message: Message, connection: AsyncConnection) -> None:
        row = {"message": message.id}
        await connection.execute(text("INSERT INTO effects (message) VALUES (:message)"), row)
        message.send("post", "a letter")
        if next(failures):
            raise ValueError("no money")

    async def deliver(engine: AsyncEngine) -> None:
        with pytest.raises(ValueError, match="no money"):
            await charge(MESSAGE)
        assert len(place.rows()) == 0
        await charge(MESSAGE)
        await charge(MESSAGE)
        await engine.dispose()

    asyncio.run(deliver(engine))
    assert len(place.rows()) == 1
    assert (place.find(KEY).state, place.find(KEY).attempts) == (State.HANDLED, 2)
    assert len(place.ledger.mailbox.deferred(KEY)) == 1


@pytest.mark.parametrize("place", ["postgresql"], indirect=True)
@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
def test_statement_that_failed_unseen_async(place: Place, driver: str) -> None:
    """As above, with the drivers of asyncio."""
    engine = create_async_engine(make_url(place.url).set(drivername=f"postgresql+{driver}"))

    @charged(place, engine)
    async def charge(message: Message, connection: AsyncConnection) -> None:
        with suppress(ProgrammingError):
            await connection.execute(text("SELECT nonsense"))

    async def deliver() -> None:
        with pytest.raises(EndedError, match="a statement has failed"):
            await charge(MESSAGE)
        await engine.dispose()

    asyncio.run(deliver())
    assert place.find(KEY).state is State.FAILED


@pytest.mark.parametrize("place", ["postgresql", "mysql"], indirect=True)
def test_line_lost_in_the_work(place: Place) -> None:
    """Where the database ends the connection all is done again, and no attempt is counted."""
    runs: list[int] = []

    @charged(place)
    def charge(message: Message, connection: Connection) -> None:
        runs.append(1)
        insert(connection)
        if len(runs) == 1:
            _end_line_of(place, connection)
            insert(connection)

    charge(MESSAGE)
    assert len(runs) == 2
    assert len(place.rows()) == 1
    assert place.find(KEY).attempts == 1


def _end_line_of(place: Place, connection: Connection) -> None:
    is_postgresql = connection.dialect.name == "postgresql"
    ask = "SELECT pg_backend_pid()" if is_postgresql else "SELECT connection_id()"
    number = connection.execute(text(ask)).scalar_one()
    end = f"SELECT pg_terminate_backend({number})" if is_postgresql else f"KILL {number}"
    with place.engine.connect() as other:
        other.execute(text(end))


# ---- The reply to the commit is lost -------------------------------------------------------------


@pytest.mark.parametrize("place", ["postgresql", "mysql"], indirect=True)
@pytest.mark.parametrize("delivers", [True, False], ids=["reply lost", "request lost"])
@pytest.mark.parametrize("sends", [False, True], ids=["plain", "sends"])
def test_reply_to_the_commit_is_lost(place: Place, delivers: bool, sends: bool) -> None:
    """The function's result is returned, and its work stored once, whether or not the server got
    the commit; where it did, the function does not run again.
    """
    at = make_url(place.url)
    runs: list[int] = []
    with Proxy(at.port or 0) as proxy:
        engine = engine_on(str(at.set(host="127.0.0.1", port=proxy.port).render_as_string(False)))

        @charged(place, engine)
        def charge(message: Message, connection: Connection) -> str:
            runs.append(1)
            insert(connection)
            if sends:
                message.send("post", "a letter")
            if len(runs) == 1:
                proxy.cut(b"COMMIT", delivers=delivers)
            return f"run {len(runs)}"

        assert charge(MESSAGE) == f"run {len(runs)}"
        duplicates = place.find(KEY).duplicates
        assert charge(MESSAGE) is None
        engine.dispose()
    assert proxy.cuts == 1
    assert len(runs) == (1 if delivers else 2)
    assert len(place.rows()) == 1
    assert (place.find(KEY).attempts, duplicates) == (1, 0)
    assert place.find(KEY).state is (State.HANDLED if sends else State.COMPLETED)


@pytest.mark.parametrize("place", ["postgresql", "mysql"], indirect=True)
def test_reply_to_the_commit_is_lost_async(place: Place) -> None:
    """As above, in asyncio."""
    at = make_url(place.url)
    runs: list[int] = []

    async def deliver(proxy: Proxy) -> str:
        through = at.set(
            drivername=_ASYNC[at.get_backend_name()], host="127.0.0.1", port=proxy.port
        )
        engine = create_async_engine(through)

        @charged(place, engine)
        async def charge(message: Message, connection: AsyncConnection) -> str:
            runs.append(1)
            row = {"message": message.id}
            await connection.execute(text("INSERT INTO effects (message) VALUES (:message)"), row)
            proxy.cut(b"COMMIT", delivers=True)
            return f"run {len(runs)}"

        done: str = await charge(MESSAGE)
        await engine.dispose()
        return done

    with Proxy(at.port or 0) as proxy:
        assert asyncio.run(deliver(proxy)) == "run 1"
    assert (len(place.rows()), place.find(KEY).attempts) == (1, 1)


# ---- Errors of the function's own ----------------------------------------------------------------


def _own_errors(place: Place) -> list[Exception]:
    """What a user's code raises, of every make."""
    with pytest.raises(ProgrammingError if place.engine.name != "sqlite" else Exception) as wrong:
        _execute(place, "SELECT nonsense FROM effects WHERE")
    assert isinstance(wrong.value, DBAPIError)
    assert isinstance(wrong.value.orig, Exception)
    return [wrong.value, wrong.value.orig, InvalidRequestError("mine"), StoreError("mine")]


def _execute(place: Place, statement: str) -> None:
    with place.engine.begin() as connection:
        connection.execute(text(statement))


def test_own_errors_stay_what_they_are(place: Place) -> None:
    """An error that the function raises is raised as it was, be it a driver's, SQLAlchemy's or one
    of ours: by `once`, and by `Ledger.transaction`.
    """
    for n, error in enumerate(_own_errors(place)):

        def fail(error: Exception = error) -> None:
            raise error

        def charge(message: Message, connection: Connection, fail: Any = fail) -> None:
            insert(connection)
            fail()

        with pytest.raises(Exception) as caught:  # noqa: PT011 - any of them.
            charged(place)(charge)(Message(f"once {n}"))
        assert caught.value is error
        with (  # noqa: PT012
            pytest.raises(Exception) as caught,  # noqa: PT011
            place.engine.begin() as connection,
            place.ledger.transaction(connection) as inbox,
        ):
            inbox.claim(Key("billing", f"transaction {n}"))
            fail()
        assert caught.value is error
    assert len(place.rows()) == 0
