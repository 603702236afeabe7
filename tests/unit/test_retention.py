"""Policies tell the ledger how long to keep records; and what is old to a new ledger is handled."""

import asyncio
import logging
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import NullPool
from sqlalchemy.ext.asyncio import create_async_engine
from tests.logs import events_in
from tests.unit.conftest import Sql

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


@pytest.mark.parametrize("use", [by_once, by_service, by_barrier, by_consumer])
def test_it_is_told(use: Callable[[Ledger], None]) -> None:
    """Whoever uses a policy tells the ledger for how long it keeps the consumer's records. Who asks
    for claims has it for these claims alone.
    """
    ledger = open_ledger("memory://")
    ledger.claim(oncely.Key("billing", "bare"), policy=POLICY)
    assert ledger.retentions() == {}
    use(ledger)
    assert ledger.retentions() == KEPT


def test_it_is_told_outside_of_transactions(sql: Sql) -> None:
    """Also by functions in a transaction, after it; async ones, too."""
    url = sql.engine.url.set(drivername="sqlite+aiosqlite")
    engine = create_async_engine(url, poolclass=NullPool)

    def guard(consumer: str, source: Any) -> Any:
        return oncely.once(
            sql.ledger, consumer=consumer, key=str, policy=POLICY, transaction=source
        )

    @guard("billing", sql.engine)  # type: ignore[untyped-decorator]
    def handle(_: int, __: object) -> None: ...

    @guard("mailing", engine)  # type: ignore[untyped-decorator]
    async def handle_async(_: int, __: object) -> None: ...

    handle(1)
    asyncio.run(handle_async(1))
    assert sql.ledger.retentions() == {**KEPT, "mailing": KEPT["billing"]}


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


def test_a_backfill_with_a_consumer() -> None:
    """A new ledger runs last year's messages, once; what it has forgotten later is set aside."""
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
