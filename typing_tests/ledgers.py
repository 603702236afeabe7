"""Outcomes are told apart by `match`, and AsyncLedger's calls are those of Ledger, awaited."""

from collections.abc import Mapping, Sequence
from typing import assert_never, assert_type

from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncSession

import oncely


def each_outcome(ledger: oncely.Ledger, key: oncely.Key) -> str:
    """Every outcome of a claim is named: a checker sees one that is left out."""
    match ledger.claim(key, lease="5m"):
        case oncely.Granted(claim) | oncely.Handled(claim):
            assert_type(claim, oncely.Claim)
            return str(claim.fence)
        case oncely.Busy(record, retry_at):
            assert_type(retry_at, float | None)
            return record.key.message_id
        case oncely.Waiting(record, due):
            assert_type(due, float)
            return record.key.message_id
        case (
            oncely.Duplicate(record)
            | oncely.Exhausted(record)
            | oncely.InDoubt(record)
            | oncely.Mismatch(record)
        ):
            assert_type(record, oncely.Record)
            return record.state.value
        case oncely.TooOld(horizon):
            assert_type(horizon, float)
            return str(horizon)


def forgotten_outcome(ledger: oncely.Ledger, key: oncely.Key) -> None:
    """What a `match` forgets is an error, and not a surprise."""
    outcome = ledger.claim(key)
    match outcome:
        case oncely.Granted() | oncely.Handled() | oncely.Duplicate() | oncely.Busy():
            pass
        case oncely.Waiting() | oncely.Exhausted() | oncely.InDoubt() | oncely.TooOld():
            pass
        case _:
            assert_never(outcome)  # type: ignore[arg-type]


def calls(ledger: oncely.Ledger, key: oncely.Key, claim: oncely.Claim) -> None:
    assert_type(ledger.claim_many([key], lease=60), Sequence[oncely.ClaimOutcome])
    assert_type(ledger.find(key), oncely.Record | None)
    assert_type(ledger.counts(), Mapping[tuple[str, oncely.State], int])
    assert_type(ledger.purge(older_than="30d"), int)
    for letter in ledger.dead():
        assert_type(letter, oncely.DeadLetter)
    for message in ledger.waiting("billing"):
        assert_type(message, oncely.WaitingMessage)
    ledger.complete(claim, result={"receipt": 17})
    ledger.complete(key)  # type: ignore[arg-type]
    ledger.claim("order-17")  # type: ignore[arg-type]
    ledger.claim(key, lease=["5m"])  # type: ignore[arg-type]


def in_a_transaction(ledger: oncely.Ledger, connection: Connection, key: oncely.Key) -> None:
    with ledger.transaction(connection) as inbox:
        assert_type(inbox, oncely.Inbox)
        assert_type(inbox.claim(key), oncely.ClaimOutcome)
        inbox.send("mails", {"to": "anna"}, delay="5m")


async def async_calls(ledger: oncely.Ledger, key: oncely.Key, claim: oncely.Claim) -> None:
    calls = oncely.AsyncLedger(ledger)
    outcome = await calls.claim(key, lease="5m")
    assert_type(outcome, oncely.ClaimOutcome)
    if isinstance(outcome, oncely.Granted):
        assert_type(outcome.claim, oncely.Claim)
    assert_type(await calls.claim_many([key]), Sequence[oncely.ClaimOutcome])
    assert_type(await calls.find(key), oncely.Record | None)
    assert_type(await calls.purge(older_than="30d"), int)
    async for record in calls.scan(state="failed"):
        assert_type(record, oncely.Record)
    await calls.complete(key)  # type: ignore[arg-type]


async def async_transaction(ledger: oncely.Ledger, session: AsyncSession) -> None:
    async with oncely.AsyncLedger(ledger).transaction(session) as inbox:
        assert_type(inbox, oncely.AsyncInbox)


def policies() -> Sequence[oncely.Policy]:
    oncely.Policy(on_in_doubt="perhaps")  # type: ignore[arg-type]
    oncely.Policy(tries="three")  # type: ignore[arg-type]
    return [oncely.Policy(tries=3, backoff=["5s", 30]), oncely.at_least_once(lease="2m")]
