"""The delivery guarantees, and the tracker."""

import asyncio
import sqlite3
from contextlib import closing, nullcontext
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession
from sqlalchemy.orm import Session
from tests.conditions import LIMIT_S
from tests.integration.drivers import connect_mysql, connect_postgresql
from tests.records import granted
from tests.seeds.conftest import OpenLedger, in_memory, on_a_server_too, orders_in

from oncely.core.errors import (
    BusyError,
    ConfigError,
    DuplicateError,
    InDoubtError,
    MessageError,
)
from oncely.core.ids import Id
from oncely.core.message import Message
from oncely.core.policy import Policy, at_least_once, at_most_once, effectively_once
from oncely.core.record import Key, State
from oncely.ledger.ledger import Ledger, open_ledger
from oncely.once import once
from oncely.testing import ManualClock
from oncely.tracker import AsyncMessageTracker, MessageTracker

_CONSUMER = "orders"

MESSAGE = Message("order-1", b'{"id": "pens"}')


def buy(connection: Connection | Session, order: str = "pens") -> None:
    """The work of a handler, in its work transaction."""
    connection.execute(text("INSERT INTO orders (id) VALUES (:id)"), {"id": order})


# ---- The guarantees, where the effect is outside the database ----------------------------------


@pytest.mark.parametrize(
    ("policy", "crash", "effects", "in_doubt"),
    [
        (at_most_once(lease="60s"), "before the effect", 0, True),
        (at_most_once(lease="60s"), "after the effect", 1, True),
        (at_most_once(lease="60s"), "after completion", 1, False),
        (at_least_once(lease="60s"), "before the effect", 1, False),
        (at_least_once(lease="60s"), "after the effect", 2, False),
        (at_least_once(lease="60s"), "after completion", 1, False),
        (effectively_once(lease="60s"), "before the effect", 0, True),
        (effectively_once(lease="60s"), "after the effect", 1, True),
        (effectively_once(lease="60s"), "after completion", 1, False),
    ],
)
@in_memory
def test_a_crash_and_its_redelivery(
    ledger: Ledger,
    another_ledger: OpenLedger,
    clock: ManualClock,
    policy: Policy,
    crash: str,
    effects: int,
    in_doubt: bool,
) -> None:
    """Each guarantee repeats, or loses and says so, exactly where its table says."""
    happened: list[str] = []
    claim = granted(another_ledger().claim(Key(_CONSUMER, MESSAGE.id), policy=policy))
    if crash != "before the effect":
        happened.append("SMS")
    if crash == "after completion":
        ledger.complete(claim)
    clock.advance(61)

    @once(ledger, consumer=_CONSUMER, key=lambda message: message.id, policy=policy)
    def send(message: Message) -> None:
        happened.append("SMS")

    with pytest.raises(InDoubtError) if in_doubt else nullcontext():
        send(MESSAGE)
    assert happened == ["SMS"] * effects


# ---- The tracker -------------------------------------------------------------------------------


def handle_tracked(connection: Connection | Session, message_id: Id = MESSAGE.id) -> bool:
    """A handler that handles redeliveries itself; whether it did the work."""
    tracker = MessageTracker(connection, _CONSUMER)
    if tracker.has_processed(message_id):
        return False
    buy(connection)
    tracker.mark_as_processed(message_id)
    return True


@on_a_server_too
def test_tracked_work_is_done_once(ledger: Ledger, engine: Engine) -> None:
    """The mark commits with the work and a redelivery finds it, by the id as number or text. Where
    the transaction is rolled back there is no mark: the redelivery does the work.
    """
    with engine.connect() as connection:
        assert handle_tracked(connection, 17)
        connection.rollback()
    for message_id, expected in ((17, True), ("17", False), (17, False)):
        with engine.begin() as connection:
            assert handle_tracked(connection, message_id) is expected
    assert orders_in(engine) == ["pens"]
    assert ledger.counts() == {(_CONSUMER, State.COMPLETED): 1}


@on_a_server_too
def test_the_losers_transaction_goes_on(ledger: Ledger, engine: Engine) -> None:
    """Who is told of a duplicate may do something else in the same transaction, and commit."""
    with engine.begin() as connection:
        MessageTracker(connection, _CONSUMER).mark_as_processed(MESSAGE.id)
    with engine.begin() as connection:
        tracker = MessageTracker(connection, _CONSUMER)
        with pytest.raises(DuplicateError):
            tracker.mark_as_processed(MESSAGE.id)
        buy(connection, "ink")
        tracker.mark_as_processed("order-2")
        assert tracker.has_processed("order-2")
    assert orders_in(engine) == ["ink"]


def test_each_consumer_tracks_its_own(ledger: Ledger, engine: Engine) -> None:
    """One message for two consumers is two; without an id it is none."""
    with engine.begin() as connection:
        MessageTracker(connection, "orders").mark_as_processed(MESSAGE.id)
        other = MessageTracker(connection, "invoices")
        assert not other.has_processed(MESSAGE.id)
        other.mark_as_processed(MESSAGE.id)
        for call in (other.has_processed, other.mark_as_processed):
            with pytest.raises(MessageError, match="empty id"):
                call("")


def test_what_a_ledger_has_in_hand(ledger: Ledger, engine: Engine, clock: ManualClock) -> None:
    """What a consumer with a lease works on is not processed yet, and not the tracker's."""
    claim = granted(ledger.claim(Key(_CONSUMER, MESSAGE.id), "none"))
    with engine.begin() as connection:
        tracker = MessageTracker(connection, _CONSUMER)
        assert not tracker.has_processed(MESSAGE.id)
        with pytest.raises(BusyError):
            tracker.mark_as_processed(MESSAGE.id)
    ledger.handled(claim)
    with engine.begin() as connection:
        tracker = MessageTracker(connection, _CONSUMER)
        assert tracker.has_processed(MESSAGE.id)
        with pytest.raises(DuplicateError):
            tracker.mark_as_processed(MESSAGE.id)


@on_a_server_too
def test_sessions_and_bare_connections(ledger: Ledger, engine: Engine, kind: str, url: str) -> None:
    """The tracker takes what the caller has: a Session, or the driver's own connection."""
    with Session(engine) as session, session.begin():
        assert handle_tracked(session)
    with closing(_bare_connection(kind, url)) as connection:
        cursor = connection.cursor()
        cursor.execute("BEGIN")
        tracker = MessageTracker(connection, _CONSUMER)
        assert tracker.has_processed(MESSAGE.id)
        tracker.mark_as_processed("order-2")
        cursor.execute("COMMIT")
    with engine.begin() as connection:
        assert MessageTracker(connection, _CONSUMER).has_processed("order-2")


def _bare_connection(kind: str, url: str) -> Any:
    match kind:
        case "sqlite":
            return sqlite3.connect(url.removeprefix("sqlite:///"))
        case "postgresql":
            return connect_postgresql(url)
        case _:
            return connect_mysql(url)


@on_a_server_too
def test_async_handlers(ledger: Ledger, engine: Engine, async_engine: AsyncEngine) -> None:
    """The same in asyncio, with a connection or a session."""

    async def handle(connection: AsyncConnection | AsyncSession) -> bool:
        tracker = AsyncMessageTracker(connection, _CONSUMER)
        if await tracker.has_processed(MESSAGE.id):
            with pytest.raises(DuplicateError):
                await tracker.mark_as_processed(MESSAGE.id)
            return False
        await connection.execute(text("INSERT INTO orders (id) VALUES ('pens')"))
        await tracker.mark_as_processed(MESSAGE.id)
        return True

    async def deliver_twice() -> list[bool]:
        async with asyncio.timeout(LIMIT_S):
            async with async_engine.begin() as connection:
                first = await handle(connection)
            async with AsyncSession(async_engine) as session, session.begin():
                return [first, await handle(session)]

    assert asyncio.run(deliver_twice()) == [True, False]
    assert orders_in(engine) == ["pens"]


def test_a_table_of_its_own(engine: Engine, url: str) -> None:
    """The tracker's records may be in another table, which a ledger has made."""
    with closing(open_ledger(url, table="tracked")) as tracked:
        tracked.migrate()
        with engine.begin() as connection:
            MessageTracker(connection, _CONSUMER, table="tracked").mark_as_processed(MESSAGE.id)
        assert tracked.counts() == {(_CONSUMER, State.COMPLETED): 1}


def test_what_cannot_be_tracked_in(async_engine: AsyncEngine, engine: Engine) -> None:
    """What is not a connection, or one of the other world, is refused, and said what to take."""
    with pytest.raises(ConfigError, match="use AsyncMessageTracker"):
        MessageTracker(AsyncSession(async_engine), _CONSUMER)
    with pytest.raises(ConfigError, match="use MessageTracker"):
        AsyncMessageTracker(Session(engine), _CONSUMER)
    with pytest.raises(ConfigError, match="str is not a connection"):
        MessageTracker("sqlite:///orders.db", _CONSUMER)
