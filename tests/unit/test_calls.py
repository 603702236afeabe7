"""The ledger's calls, as they are and as coroutines."""

import asyncio
import inspect
from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

import pytest
from tests.records import granted, record_of

from oncely.core.commands import Busy, Duplicate, Fenced, Written
from oncely.core.errors import ConfigError, FencedError, MessageError, RefusedError
from oncely.core.message import Message
from oncely.core.record import Key, State
from oncely.core.waiting import WaitingMessage
from oncely.ledger.async_ledger import AsyncLedger
from oncely.ledger.ledger import Ledger, open_ledger
from oncely.testing import ManualClock


class Awaited:
    """The calls of an AsyncLedger, each awaited where it is made."""

    def __init__(self, ledger: Ledger) -> None:
        self._calls = AsyncLedger(ledger)
        self.mailbox = self._calls.mailbox

    def __getattr__(self, name: str) -> Callable[..., Any]:
        call = getattr(self._calls, name)

        def run(*args: Any, **named: Any) -> Any:
            return asyncio.run(_awaited(call(*args, **named)))

        return run


async def _awaited(called: Any) -> Any:
    """What a coroutine returns, or all that an asynchronous generator gives."""
    if inspect.isasyncgen(called):
        return [each async for each in called]
    return await called


@pytest.fixture(params=["ledger", "async ledger"])
def calls(request: pytest.FixtureRequest, ledger: Ledger) -> Ledger:
    """The calls of a ledger in memory, or those of an AsyncLedger over it."""
    return ledger if request.param == "ledger" else cast(Ledger, Awaited(ledger))


ONE, TWO = Key("billing", "one"), Key("billing", "two")


def keys_of(number: int) -> list[Key]:
    return [Key("billing", str(n)) for n in range(number)]


def test_life_of_a_message(calls: Ledger) -> None:
    """Claim, extend, fail, release, mark handled, complete: each is answered and stored."""
    claim = granted(calls.claim(ONE, "60s", fingerprint="one", metadata={"tenant": "a"}))
    assert isinstance(calls.claim(ONE), Busy)
    calls.fail(calls.extend(claim, timedelta(seconds=90)), ValueError("no"))
    record = record_of(calls, ONE)
    assert (record.state, record.error) == (State.FAILED, "ValueError: no")
    calls.release(granted(calls.claim(ONE)))
    calls.fail(granted(calls.claim(ONE)), "never", final=True)
    calls.reset(ONE, by="anna", why="fixed")
    calls.complete(calls.handled(granted(calls.claim(ONE))), {"sent": True})
    outcome = calls.claim(ONE, fingerprint="one")
    assert isinstance(outcome, Duplicate)
    assert (outcome.record.state, outcome.record.result) == (State.COMPLETED, {"sent": True})
    assert outcome.record.metadata is not None
    assert outcome.record.metadata["tenant"] == "a"


def test_many(calls: Ledger) -> None:
    """The many forms answer each in order."""
    outcomes = calls.claim_many(keys_of(6), "60s", fingerprints=["x"] * 6)
    claims = [granted(outcome) for outcome in outcomes]
    calls.release(claims[5])
    written = [
        *calls.extend_many(claims, "60s"),
        *calls.handled_many([claims[0]]),
        *calls.complete_many(claims[:2], [1, 2]),
        *calls.fail_many([claims[2]], ["no"], final=True),
        *calls.release_many([claims[3]]),
    ]
    assert [type(outcome) for outcome in written] == [Written] * 5 + [Fenced] + [Written] * 5
    assert calls.counts() == {
        ("billing", State.COMPLETED): 2,
        ("billing", State.FAILED): 1,
        ("billing", State.PROCESSING): 1,
    }


def test_looking(calls: Ledger, ledger: Ledger, clock: ManualClock) -> None:
    """What is looked at is what the ledger finds; a state that does not exist is told."""
    for key in keys_of(3):
        calls.claim(key, "60s")
        clock.advance(1)
    assert [record.key.message_id for record in calls.scan("billing", limit=2)] == ["0", "1"]
    assert [*calls.scan(text="2", state="processing")] == [ledger.find(Key("billing", "2"))]
    assert [*calls.scan(lease_over=True)] == []
    for name in ("now", "counts", "tallies", "size", "problems", "migration_sql"):
        assert getattr(calls, name)() == getattr(ledger, name)()
    with pytest.raises(ConfigError, match="'done' is none of processing, handled, sent, failed"):
        calls.scan(state="done")


def test_operators(calls: Ledger, clock: ManualClock) -> None:
    """What operators do is done."""
    calls.migrate()
    keys = keys_of(5)
    claims = [granted(outcome) for outcome in calls.claim_many(keys, "60s")]
    calls.complete_many(claims[1:])
    clock.advance(86_400 * 31)
    calls.forget(keys[0])
    with pytest.raises(RefusedError):
        calls.reset(keys[1])
    purged: list[int] = []
    assert calls.purge("30d", "billing", 3, on_batch=purged.append) == 4
    assert purged == [3, 1]
    calls.close()
    granted(calls.claim(keys[0]))


def test_single_forms_raise(calls: Ledger, clock: ManualClock) -> None:
    """An old fence, a bad key, a bad lease and a result that is not JSON are errors."""
    claim = granted(calls.claim(ONE, "60s"))
    clock.advance(61)
    granted(calls.claim(ONE))
    late: list[Callable[[], object]] = [
        lambda: calls.handled(claim),
        lambda: calls.complete(claim),
        lambda: calls.fail(claim, "no"),
        lambda: calls.release(claim),
        lambda: calls.extend(claim, "60s"),
    ]
    for call in late:
        with pytest.raises(FencedError, match=r"not the newest.* at fence 2"):
            call()
    with pytest.raises(MessageError):
        calls.claim(Key("billing", ""))
    with pytest.raises(ConfigError, match="lease"):
        calls.claim(TWO, "0s")
    with pytest.raises(MessageError, match="JSON"):
        calls.complete(claim, object())


def test_handled_again_after_it_was_sent(calls: Ledger) -> None:
    """The first answer is lost, and a relay is faster than the second try: what it has sent is
    not sent once more, and a completed message has none that wait.
    """
    claim = granted(calls.claim(ONE))
    messages = [WaitingMessage(id_, "mails", Message(id_), ONE) for id_ in "ab"]
    calls.handled(claim, "first", messages)
    calls.mailbox.sent(calls.mailbox.take(10, "30s"))
    calls.handled(claim, "second", messages)
    assert calls.mailbox.deferred(ONE) == []


def test_no_transaction_to_join(ledger: Ledger, redis_url: str) -> None:
    """A ledger in memory, or in Redis, says that it cannot be part of a transaction."""
    for each in (ledger, open_ledger(redis_url)):
        with pytest.raises(ConfigError, match="transaction: a ledger in"), each.transaction(None):
            pass
