"""The idempotency barrier: a function that runs once for each message of a queue."""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

import pytest
from sqlalchemy import Connection, Engine, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Session
from tests.conditions import LIMIT_S
from tests.seeds.conftest import OpenLedger, in_memory, on_a_server_too, orders_in

from oncely.barrier import idempotent_consumer, message_context
from oncely.core.errors import MessageError, MismatchError
from oncely.core.message import Message
from oncely.core.record import Key, State
from oncely.ledger.ledger import Ledger

_QUEUE = "orders"
_KEY = Key(_QUEUE, "1")

T = TypeVar("T")


class Handler:
    """What stands behind the barriers of these tests; it remembers with what it was called."""

    def __init__(self) -> None:
        self.orders: list[str] = []

    def on_order(self, order: str) -> str:
        self.orders.append(order)
        return f"receipt for {order}"


@pytest.fixture
def handler() -> Handler:
    """One that nobody has called."""
    return Handler()


# ---- The rule ----------------------------------------------------------------------------------


def test_seen_does_not_run(
    ledger: Ledger, another_ledger: OpenLedger, handler: Handler, caplog: pytest.LogCaptureFixture
) -> None:
    """A message that was seen, here or elsewhere, is logged, and the call returns normally."""
    results: list[str | None] = []
    for each in (ledger, ledger, another_ledger()):
        with message_context("1", _QUEUE), caplog.at_level(logging.WARNING):
            results.append(idempotent_consumer(each)(handler.on_order)("pens"))
    assert results == ["receipt for pens", None, None]
    assert handler.orders == ["pens"]
    assert ledger.counts() == {(_QUEUE, State.COMPLETED): 1}
    logged = [(vars(record)["event"], vars(record)["message_id"]) for record in caplog.records]
    assert logged == [("duplicate", "1")] * 2


def test_the_key_is_message_and_queue(ledger: Ledger, handler: Handler) -> None:
    """Equal content under another id is another message; one id in two queues is two. A message
    handled within another has its own context; then the outer one is back.
    """
    on_order = idempotent_consumer(ledger)(handler.on_order)
    with message_context("1", _QUEUE):
        for message_id, queue in (("2", _QUEUE), ("1", "returns")):
            with message_context(message_id, queue):
                on_order("pens")
        on_order("pens")
    assert handler.orders == ["pens"] * 3
    keys = [Key(_QUEUE, "1"), Key(_QUEUE, "2"), Key("returns", "1")]
    assert sorted(record.key for record in ledger.scan()) == keys


def test_a_message_with_another_body_is_refused(ledger: Ledger) -> None:
    """Where the function is given a Message, one id with another body never passes for seen."""

    @idempotent_consumer(ledger)
    def on_message(message: Message) -> bytes | None:
        return message.body

    message = Message("1", b"pens")
    with message_context("1", _QUEUE):
        assert on_message(message) == b"pens"
        assert on_message(message) is None
        with pytest.raises(MismatchError):
            on_message(replace(message, body=b"ink"))


# ---- Functions of every kind -------------------------------------------------------------------


def test_async_functions(ledger: Ledger, handler: Handler) -> None:
    """A coroutine function is awaited within its context, in each task its own."""

    @idempotent_consumer(ledger)
    async def on_order(order: str) -> str:
        await asyncio.sleep(0)
        return handler.on_order(order)

    async def deliver(number: int) -> str:
        with message_context(str(number), _QUEUE):
            return await on_order(f"order {number}")

    async def deliver_all() -> Sequence[str | None]:
        return await asyncio.gather(*(deliver(number) for number in range(5)))

    expected = [f"order {number}" for number in range(5)]
    assert asyncio.run(deliver_all()) == [f"receipt for {order}" for order in expected]
    assert asyncio.run(deliver_all()) == [None] * 5
    assert sorted(handler.orders) == expected


@in_memory
def test_the_message_inside(ledger: Ledger) -> None:
    """Inside there are steps, messages that leave after success, and a key for other services."""
    debits: list[str] = []

    @idempotent_consumer(ledger)
    def on_order(message: Message) -> None:
        message.step("debit", debits.append, message.idempotency_key)
        message.send("mail", {"to": "customer"})
        if len(debits) == 1:
            debits.append("the log failed")
            raise ConnectionError

    with message_context("1", _QUEUE):
        with pytest.raises(ConnectionError):
            on_order(Message("1"))
        assert ledger.mailbox.deferred(_KEY) == []
        on_order(Message("1"))
    assert len(debits) == 2, "one debit, and the note"
    assert [deferred.destination for deferred in ledger.mailbox.deferred(_KEY)] == ["mail"]


# ---- The context -------------------------------------------------------------------------------


@pytest.mark.parametrize("message_id", [None, "", " "])
@in_memory
def test_a_missing_id_never_matches_another(
    ledger: Ledger, handler: Handler, message_id: str | None
) -> None:
    """A message without an id is an error of its own, the second as the first."""
    on_order = idempotent_consumer(ledger)(handler.on_order)
    for _ in range(2):
        with message_context(message_id, _QUEUE), pytest.raises(MessageError, match="id"):
            on_order("pens")
    assert handler.orders == []


@in_memory
def test_the_context_is_local_to_its_thread(ledger: Ledger, handler: Handler) -> None:
    """Another thread does not see it, and has its own at the same time."""
    on_order = idempotent_consumer(ledger)(handler.on_order)
    both = threading.Barrier(2, timeout=LIMIT_S)

    def deliver(message_id: str) -> None:
        with message_context(message_id, _QUEUE):
            both.wait()
            on_order(message_id)

    with message_context("main", _QUEUE), ThreadPoolExecutor(3) as pool:
        with pytest.raises(MessageError, match="message_context"):
            pool.submit(on_order, "pens").result(LIMIT_S)
        list(pool.map(deliver, ("1", "2"), timeout=LIMIT_S))
    assert sorted(handler.orders) == ["1", "2"]
    assert {record.key.message_id for record in ledger.scan()} == {"1", "2"}


# ---- Without a transaction ---------------------------------------------------------------------


def test_an_error_stores_nothing(ledger: Ledger, handler: Handler) -> None:
    """A function that fails leaves no record: however often it failed, it runs again."""
    failures = iter(range(7))

    @idempotent_consumer(ledger)
    def on_order(order: str) -> str:
        if next(failures, None) is not None:
            raise ConnectionError(order)
        return handler.on_order(order)

    for _ in range(7):
        with message_context("1", _QUEUE), pytest.raises(ConnectionError, match="pens"):
            on_order("pens")
        assert ledger.counts() == {}
    with message_context("1", _QUEUE):
        assert on_order("pens") == "receipt for pens"


# ---- In the caller's transaction ---------------------------------------------------------------


def buy(connection: Connection | Session, order: str = "pens") -> str:
    """The work of a function that writes through its caller's connection."""
    connection.execute(text("INSERT INTO orders (id) VALUES (:id)"), {"id": order})
    return order


@on_a_server_too
def test_record_and_work_commit_together(
    ledger: Ledger, another_ledger: OpenLedger, engine: Engine
) -> None:
    """Both are there when the caller has committed; then no other worker runs it again."""
    with engine.begin() as connection, message_context("1", _QUEUE, connection):
        assert idempotent_consumer(ledger)(buy)(connection) == "pens"
    assert ledger.counts() == {(_QUEUE, State.COMPLETED): 1}
    with engine.begin() as connection, message_context("1", _QUEUE, connection):
        assert idempotent_consumer(another_ledger())(buy)(connection) is None
    assert orders_in(engine) == ["pens"]


@on_a_server_too
def test_async_sessions(ledger: Ledger, engine: Engine, async_engine: AsyncEngine) -> None:
    """The same in a transaction of asyncio."""

    @idempotent_consumer(ledger, keep_result=True)
    async def buy_async(session: AsyncSession) -> str:
        await session.execute(text("INSERT INTO orders (id) VALUES ('pens')"))
        return "pens"

    async def deliver() -> str:
        async with AsyncSession(async_engine) as session, session.begin():
            with message_context("1", _QUEUE, session):
                return await buy_async(session)

    async def fail() -> None:
        async with AsyncSession(async_engine) as session, session.begin():
            with message_context("1", _QUEUE, session):
                await buy_async(session)
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        asyncio.run(fail())
    assert orders_in(engine) == []
    assert [asyncio.run(_bounded(deliver)) for _ in range(2)] == ["pens", "pens"]
    assert orders_in(engine) == ["pens"]


async def _bounded(call: Callable[[], Awaitable[T]]) -> T:
    async with asyncio.timeout(LIMIT_S):
        return await call()
