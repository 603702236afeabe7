"""`Ledger.transaction`: claims that are stored with the caller's own work, by every connection."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import scoped_session, sessionmaker
from tests.integration.callers import (
    CALLERS,
    Execute,
    Place,
    Work,
    async_engine_on,
    insertion,
    opened,
)
from tests.records import granted

from oncely.core.commands import Duplicate, Granted
from oncely.core.errors import StoreError, StoreUnavailable
from oncely.core.message import Message
from oncely.core.record import Key, State
from oncely.core.waiting import OUTBOX, WaitingMessage
from oncely.ledger.inbox import Inbox
from oncely.stores.store import PutBack

KEY = Key("billing", "abc-123")


class Program(NamedTuple):
    """A program that hands over its transactions."""

    place: Place
    run: Callable[[Place, Work], None]

    def transact(self, work: Callable[[Inbox, Execute], object]) -> None:
        """Run `work` in a transaction that the ledger has joined."""

        def joined(handed: Any, execute: Execute) -> None:
            with self.place.ledger.transaction(handed) as inbox:
                work(inbox, execute)

        self.run(self.place, joined)


@pytest.fixture(params=list(CALLERS))
def program(request: pytest.FixtureRequest) -> Iterator[Program]:
    """A program for each kind of connection."""
    kind, run = CALLERS[request.param]
    with opened(kind, request) as place:
        yield Program(place, run)


def pay(inbox: Inbox, execute: Execute) -> None:
    """Handle the message."""
    claim = granted(inbox.claim(KEY))
    execute(insertion("abc-123"))
    inbox.complete(claim)


def test_stored_together_or_not_at_all(program: Program) -> None:
    """The record and the caller's rows are there once the caller has committed, and an error
    leaves neither. A later transaction meets a duplicate, and may do other work.
    """

    def fail(inbox: Inbox, execute: Execute) -> None:
        pay(inbox, execute)
        raise ZeroDivisionError

    def again(inbox: Inbox, execute: Execute) -> None:
        assert isinstance(inbox.claim(KEY), Duplicate)
        execute(insertion("other work"))

    with pytest.raises(ZeroDivisionError):
        program.transact(fail)
    assert program.place.ledger.find(KEY) is None
    assert program.place.rows() == []
    program.transact(pay)
    assert program.place.find(KEY).state is State.COMPLETED
    assert program.place.rows() == ["abc-123"]
    program.transact(again)
    assert program.place.rows() == ["abc-123", "other work"]
    assert program.place.find(KEY).duplicates == 1


def test_every_call(program: Program) -> None:
    """Whatever can be asked of a ledger can be asked of an inbox, with the same answers."""
    program.transact(_call_everything)
    ledger = program.place.ledger
    states = {record.key.message_id: record.state for record in ledger.scan("billing")}
    assert states == {
        "abc-123": State.COMPLETED,
        **{f"many-{n}": State.COMPLETED for n in range(5)},
        "failed": State.FAILED,
        "open": State.PROCESSING,
    }
    assert program.place.find(KEY).result == [1, "größe"]
    assert program.place.find(Key("billing", "many-3")).metadata == {"from": "a test"}
    assert list(ledger.steps(KEY)) == ["debit"]
    lease_until = program.place.find(Key("billing", "open")).lease_until
    assert lease_until is not None
    assert lease_until - ledger.now() == pytest.approx(3600, abs=60)


def _call_everything(inbox: Inbox, _: Execute) -> None:
    claim = granted(inbox.claim(KEY, fingerprint="f" * 64))
    claim = inbox.extend(claim, "10m")
    inbox.keep_step(claim, "debit", {"amount": 12})
    assert inbox.steps(KEY) == {"debit": {"amount": 12}}
    messages = [_deferred("one"), _deferred("two", delay_s=3600.0)]
    inbox.handled(claim, result=[1, "größe"], deferred=messages)
    assert [message.id for message in inbox.mailbox.deferred(KEY)] == ["one", "two"]
    [taken] = inbox.mailbox.take(10, "30s", [KEY])
    assert taken.message == messages[0].message
    inbox.mailbox.put_back([PutBack(taken, "refused", None)])
    inbox.mailbox.sent(inbox.mailbox.deferred(KEY))
    keys = [Key("billing", f"many-{n}") for n in range(5)]
    claims = inbox.claim_many(keys, metadata={"from": "a test"})
    inbox.complete_many([granted(outcome) for outcome in claims])
    inbox.fail(granted(inbox.claim(Key("billing", "failed"))), "declined")
    inbox.release(granted(inbox.claim(Key("billing", "released"))))
    granted(inbox.claim(Key("billing", "open"), lease="1h"))
    assert inbox.find(Key("billing", "unknown")) is None


def _deferred(id_: str, delay_s: float = 0.0) -> WaitingMessage:
    message = Message(id_, body=b"\0\xff", type="paid", headers={"a": "b"})
    return WaitingMessage(id_, "mail", message, KEY, position=len(id_), delay_s=delay_s)


def test_table_missing(program: Program) -> None:
    """A missing table is reported whatever the driver calls it. The message names the transaction's
    database, which may be another one than the ledger's.
    """
    with program.place.engine.begin() as connection:
        connection.execute(text("DROP TABLE processed_messages"))
    with pytest.raises(StoreError, match="missing or of an older version in the database of this"):
        program.transact(pay)


@pytest.mark.parametrize("name", [name for name in CALLERS if "sqlite" not in name])
def test_connection_lost(name: str, request: pytest.FixtureRequest) -> None:
    """A connection that breaks is a store that cannot be reached; nothing is stored."""
    kind, run = CALLERS[name]

    def work(inbox: Inbox, execute: Execute) -> None:
        execute(insertion("abc-123"))
        _disconnect(place)
        with pytest.raises(StoreUnavailable):
            inbox.claim(KEY)
        raise ZeroDivisionError

    with opened(kind, request) as place:
        # Some drivers fail once more when their transaction is rolled back.
        own = () if "connection" in name or "session" in name else (Exception,)
        with pytest.raises((ZeroDivisionError, *own)):
            Program(place, run).transact(work)
        assert place.ledger.find(KEY) is None
        assert place.rows() == []


def _disconnect(place: Place) -> None:
    """End all connections to the place but one's own."""
    own = "SELECT pg_backend_pid()" if place.kind == "postgresql" else "SELECT connection_id()"
    others, kill = {
        "postgresql": (
            "SELECT pid FROM pg_stat_activity WHERE datname = current_database()",
            "SELECT pg_terminate_backend({})",
        ),
        "mysql": (
            "SELECT id FROM information_schema.processlist WHERE db = DATABASE()",
            "KILL {}",
        ),
    }[place.kind]
    with place.engine.connect() as connection:
        me = connection.exec_driver_sql(own).scalar_one()
        for number in connection.exec_driver_sql(others).scalars().all():
            if number != me:
                connection.exec_driver_sql(kill.format(number))


def test_joined_twice(place: Place) -> None:
    """A transaction may be joined twice, and one within the other."""
    with place.engine.begin() as connection:
        with place.ledger.transaction(connection) as inbox:
            with place.ledger.transaction(connection) as inner:
                inner.complete(granted(inner.claim(KEY)))
            assert isinstance(inbox.claim(KEY), Duplicate)
        with place.ledger.transaction(connection) as inbox:
            assert isinstance(inbox.claim(KEY), Duplicate)
    assert place.find(KEY).duplicates == 2


# ---- SQLAlchemy --------------------------------------------------------------------------------


def test_connection_that_has_not_begun(place: Place) -> None:
    """A connection on which nothing has begun is begun: the caller's commit stores the claim."""
    with place.engine.connect() as connection:
        with place.ledger.transaction(connection) as inbox:
            inbox.complete(granted(inbox.claim(KEY)))
        connection.commit()
    assert place.find(KEY).state is State.COMPLETED


def test_scoped_session(place: Place) -> None:
    """What web frameworks keep for each request is a session too."""
    session = scoped_session(sessionmaker(place.engine))
    with place.ledger.transaction(session) as inbox:
        session.execute(text(insertion("abc-123")))
        inbox.complete(granted(inbox.claim(KEY)))
    session.commit()
    session.remove()
    assert place.find(KEY).state is State.COMPLETED


@pytest.mark.parametrize(
    "driver", ["sqlite+aiosqlite", "postgresql+asyncpg", "postgresql+psycopg", "mysql+asyncmy"]
)
@pytest.mark.parametrize("handed", ["connection", "session"])
@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_coroutines(driver: str, handed: str, end: str, request: pytest.FixtureRequest) -> None:
    """With an AsyncConnection or AsyncSession it is `async with`, and its calls are awaited. What
    is sent there waits to be sent once that has committed, and never where it has not.
    """

    async def run(place: Place) -> None:
        async with (
            async_engine_on(place, driver) as engine,
            engine.connect() if handed == "connection" else AsyncSession(engine) as link,
        ):
            async with place.ledger.transaction(link) as inbox:
                outcome = await inbox.claim(KEY)
                assert isinstance(outcome, Granted)
                await link.execute(text(insertion("abc-123")))
                await inbox.send("mails", {"order": 1}, key="k")
                await inbox.complete(outcome.claim)
            await getattr(link, end)()

    with opened(driver.partition("+")[0], request) as place:
        asyncio.run(run(place))
        sent = [each.message for each in place.ledger.mailbox.listed(OUTBOX, 9)]
        if end == "rollback":
            assert (place.ledger.find(KEY), place.rows(), sent) == (None, [], [])
        else:
            assert place.find(KEY).state is State.COMPLETED
            assert place.rows() == ["abc-123"]
            assert [(each.body, each.key) for each in sent] == [(b'{"order": 1}', "k")]


@pytest.mark.parametrize(
    "settings",
    [{"isolation_level": None}, {"isolation_level": "IMMEDIATE"}],
    ids=["begun by hand", "immediate"],
)
def test_settings_of_sqlite(settings: dict[str, Any], request: pytest.FixtureRequest) -> None:
    """However sqlite3 begins its transactions, the claim is part of the one that is open."""
    with opened("sqlite", request) as place:
        engine = create_engine(place.url, connect_args=settings)
        with engine.connect() as connection:
            if settings["isolation_level"] is None:
                connection.exec_driver_sql("BEGIN")
            with place.ledger.transaction(connection) as inbox:
                inbox.claim(KEY)
            connection.rollback()
            assert place.ledger.find(KEY) is None
        engine.dispose()
