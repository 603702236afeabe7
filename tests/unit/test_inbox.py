"""Inside the caller's transaction: what is answered and counted there, and what may be sent."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import closing

import pytest
from prometheus_client import CollectorRegistry
from sqlalchemy import NullPool
from sqlalchemy.ext.asyncio import create_async_engine
from tests.records import granted
from tests.unit.conftest import Sql

from oncely.core.commands import Busy, Duplicate
from oncely.core.errors import ConfigError, FencedError, MessageError
from oncely.core.message import Message
from oncely.core.record import Claim, Key, State
from oncely.ledger.inbox import AsyncInbox
from oncely.ledger.ledger import Ledger, open_ledger
from oncely.metrics import Metrics

KEY = Key("billing", "1")


def test_second_claim_is_busy(sql: Sql) -> None:
    """A message that is claimed again in the same transaction is busy, and not a duplicate."""
    with sql.engine.begin() as connection, sql.ledger.transaction(connection) as inbox:
        claim = granted(inbox.claim(KEY))
        assert isinstance(inbox.claim(KEY), Busy)
        inbox.complete(claim, "done")
    record = sql.record("1")
    assert (record.state, record.result, record.duplicates) == (State.COMPLETED, "done", 0)


def test_step_of_what_is_completed(sql: Sql) -> None:
    """After it is completed a message keeps no step."""
    with sql.engine.begin() as connection, sql.ledger.transaction(connection) as inbox:
        claim = granted(inbox.claim(KEY))
        inbox.complete(claim)
        with pytest.raises(FencedError):
            inbox.keep_step(claim, "charge", 7)
    assert sql.ledger.steps(KEY) == {}


def test_metrics_of_a_transaction(sql: Sql) -> None:
    """Duplicates that are turned away inside a transaction are counted as any."""
    registry = CollectorRegistry()
    with closing(open_ledger(sql.engine, metrics=Metrics(registry))) as ledger:
        ledger.complete(granted(ledger.claim(KEY)))
        with sql.engine.begin() as connection, ledger.transaction(connection) as inbox:
            assert isinstance(inbox.claim(KEY), Duplicate)
    labels = {"provider": "billing"}
    assert registry.get_sample_value("duplicate_messages_blocked_total", labels) == 1


Call = Callable[[AsyncInbox, Claim], Awaitable[object]]


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda inbox, _: inbox.send("mails", {"to": "anna"}), "send"),
        (lambda inbox, _: inbox.put("mails", [Message("1")]), "put"),
        (lambda inbox, _: inbox.claim(Key("billing", "2")), "claim"),
        (lambda inbox, claim: inbox.complete(claim), "complete"),
        (lambda inbox, claim: inbox.complete_many([claim]), "complete_many"),
        (lambda inbox, claim: inbox.keep_step(claim, "debit", 1), "keep_step"),
        (lambda inbox, _: asyncio.gather(inbox.find(KEY), inbox.send("mails", "")), "find"),
    ],
)
@pytest.mark.parametrize("is_awaited", [True, False])
def test_call_that_is_not_awaited(sql: Sql, call: Call, name: str, is_awaited: bool) -> None:
    """Leaving the block names it, before anything is committed; awaited calls may be many."""
    url = sql.engine.url.set(drivername="sqlite+aiosqlite")

    async def run() -> None:
        engine = create_async_engine(url, poolclass=NullPool)
        async with engine.begin() as connection, sql.ledger.transaction(connection) as inbox:
            claim = granted(await inbox.claim(KEY))
            made = call(inbox, claim)
            if is_awaited:
                await made
            if isinstance(made, asyncio.Future):
                made.cancel()

    if is_awaited:
        asyncio.run(run())
        assert sql.record("1")
        return
    with pytest.raises(ConfigError, match=rf"write `await inbox\.{name}\(\.\.\.\)`"):
        asyncio.run(run())
    assert sql.ledger.find(KEY) is None


def test_error_before_a_call_that_is_not_awaited(sql: Sql) -> None:
    """An error of the block's own comes first."""
    url = sql.engine.url.set(drivername="sqlite+aiosqlite")
    made = []

    async def run() -> None:
        engine = create_async_engine(url, poolclass=NullPool)
        async with engine.begin() as connection, sql.ledger.transaction(connection) as inbox:
            made.append(inbox.find(KEY))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        asyncio.run(run())
    made[0].close()


@pytest.mark.parametrize("destination", ["", "exchange:shop", "events:", "n" * 256])
def test_no_destination(sql: Sql, destination: str) -> None:
    """What is not a destination is told where it is written, and not by the relay."""
    said = r"^destination: .*; write "
    with (
        sql.engine.begin() as connection,
        sql.ledger.transaction(connection) as inbox,
        pytest.raises(MessageError, match=said),
    ):
        inbox.send(destination, "body")
    url = sql.engine.url.set(drivername="sqlite+aiosqlite")

    async def send(ledger: Ledger) -> None:
        async with (
            create_async_engine(url, poolclass=NullPool).begin() as connection,
            ledger.transaction(connection) as inbox,
        ):
            await inbox.send(destination, "body")

    with pytest.raises(MessageError, match=said):
        asyncio.run(send(sql.ledger))
    assert not sql.ledger.mailbox.backlog().waiting
