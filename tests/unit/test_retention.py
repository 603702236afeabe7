"""Policies tell the ledger how long to keep records; and what is old to a new ledger is handled."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import pytest
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine
from tests.logs import events_in

import oncely
from oncely import Ledger, Message, Policy, open_ledger
from oncely.barrier import idempotent_consumer, message_context
from oncely.core.errors import StoreUnavailable
from oncely.service import IdempotenceService

POLICY = Policy(retention="90d")
KEPT = {"billing": timedelta(days=90)}
LAST_YEAR = datetime.now(UTC) - timedelta(days=365)


def by_once(ledger: Ledger) -> None:
    """With the decorator."""

    @oncely.once(ledger, consumer="billing", key=str, policy=POLICY)
    def handle(_: int) -> None:
        pass

    handle(1)


def by_async_once(ledger: Ledger) -> None:
    """With the decorator, on a coroutine."""

    @oncely.once(ledger, consumer="billing", key=str, policy=POLICY)
    async def handle(_: int) -> None:
        pass

    asyncio.run(handle(1))


def by_service(ledger: Ledger) -> None:
    """With the service."""
    service = IdempotenceService(ledger, "billing", policy=POLICY)
    service.processing_status(Message("1"))
    service.processing_completed(Message("1"))


def by_barrier(ledger: Ledger) -> None:
    """With the barrier: the queue is the consumer."""
    with message_context("1", "billing"):
        idempotent_consumer(ledger, policy=POLICY)(lambda: None)()


def by_consumer(ledger: Ledger) -> None:
    """With a consumer of a queue."""
    url = "memory://retention"
    oncely.open_transport(url).publish("orders", [Message("1")])
    consumer = oncely.Consumer(url, queue="orders").idempotent(ledger, "billing", policy=POLICY)
    consumer.consume(lambda _: None, drain=True)


@pytest.mark.parametrize("use", [by_once, by_async_once, by_service, by_barrier, by_consumer])
def test_it_is_told(use: Callable[[Ledger], None]) -> None:
    """Whoever uses a policy tells the ledger for how long it keeps the consumer's records."""
    ledger = open_ledger("memory://")
    use(ledger)
    assert ledger.retentions() == KEPT


def test_it_is_told_outside_of_transactions(tmp_path: Path) -> None:
    """Also by functions in a transaction, after it."""
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    with closing(open_ledger(url)) as ledger:
        ledger.migrate()
        engine = create_engine(url)

        @oncely.once(ledger, consumer="billing", key=str, policy=POLICY, transaction=engine)
        def handle(_: int, __: object) -> None:
            pass

        cast(Any, handle)(1)
        assert ledger.retentions() == KEPT
        engine.dispose()


def test_it_is_told_outside_of_async_transactions(tmp_path: Path) -> None:
    """And by async ones."""
    file = tmp_path / "ledger.db"
    with closing(open_ledger(f"sqlite:///{file}")) as ledger:
        ledger.migrate()
        engine = create_async_engine(f"sqlite+aiosqlite:///{file}")

        @oncely.once(ledger, consumer="billing", key=str, policy=POLICY, transaction=engine)
        async def handle(_: int, __: object) -> None:
            pass

        async def run() -> None:
            await cast(Any, handle)(1)
            await engine.dispose()

        asyncio.run(run())
        assert ledger.retentions() == KEPT


def test_bare_claims_tell_nothing() -> None:
    """Who asks for claims has a policy for these claims alone."""
    ledger = open_ledger("memory://")
    ledger.claim(oncely.Key("billing", "1"), policy=POLICY)
    assert ledger.retentions() == {}


def test_it_cannot_be_told_now(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A handler runs all the same; the next message tells it."""
    ledger = open_ledger("memory://")

    def away(*_: object) -> None:
        raise StoreUnavailable("it is away")

    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING, "oncely"):
        patched.setattr(ledger._store, "keep_retention", away)
        by_once(ledger)
    assert events_in(caplog) == ["retention_not_stored"]
    assert ledger.retentions() == {}
    ledger.forget(oncely.Key("billing", "1"))
    by_once(ledger)
    assert ledger.retentions() == KEPT


# ---- Last year's messages ----------------------------------------------------------------------


def test_a_backfill_with_once() -> None:
    """A new ledger has forgotten nothing: messages of last year are handled, once."""
    ledger = open_ledger("memory://")
    ran: list[str] = []

    @oncely.once(ledger, consumer="billing", key=lambda message: message.id)
    def handle(message: Message) -> None:
        ran.append(message.id)

    for n in (1, 2, 3, 1, 2, 3):
        handle(Message(str(n), time=LAST_YEAR))
    assert ran == ["1", "2", "3"]


def test_a_backfill_with_a_consumer() -> None:
    """So they are by a consumer; and what the ledger has forgotten later is set aside, with its
    reason.
    """
    ledger = open_ledger("memory://")
    transport = oncely.open_transport("memory://backfill")
    messages = [Message(str(n), time=LAST_YEAR) for n in range(50)]

    def consume() -> Any:
        transport.publish("orders", messages)
        consumer = oncely.Consumer("memory://backfill", queue="orders")
        return consumer.idempotent(ledger, "billing").consume(lambda _: None, drain=True)

    first, again = consume(), consume()
    assert (first.handled, first.dead_lettered) == (50, 0)
    assert (again.handled, again.duplicates) == (0, 50)
    while not ledger.purge("0s"):
        pass
    after = consume()
    assert (after.handled, after.dead_lettered) == (0, 50)
    letters = [*ledger.dead("billing")]
    assert len(letters) == 50
    assert all("TooOldError" in letter.reason for letter in letters)
