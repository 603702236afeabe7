"""The ledger's calls, as they are and as coroutines; those for deferred messages and steps."""

import asyncio
import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, cast

import pytest
from tests.records import granted

from oncely.async_ledger import AsyncLedger
from oncely.core.commands import Busy, Duplicate, Fenced, Written
from oncely.core.errors import ConfigError, FencedError, MessageError, RefusedError
from oncely.core.message import Message
from oncely.core.record import Claim, Key, State
from oncely.core.waiting import WaitingMessage
from oncely.ledger import Ledger, open_ledger
from oncely.stores.memory_store import MemoryStore
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


def deferred(
    parent: Key,
    id_: str,
    destination: str = "mails",
    *,
    key: str | None = None,
    delay_s: float = 0.0,
    position: int = 0,
) -> WaitingMessage:
    """A message that was sent while `parent` was handled."""
    message = Message(id_, key=key)
    return WaitingMessage(id_, destination, message, parent, position, delay_s)


def handled(calls: Ledger, message_id: str, *messages: WaitingMessage, result: Any = None) -> Claim:
    """The claim on a message whose handler has succeeded, and has deferred these."""
    claim = granted(calls.claim(Key("billing", message_id), "60s"))
    return calls.handled(claim, result, messages)


def ids(messages: Sequence[WaitingMessage]) -> list[str]:
    return [message.id for message in messages]


def state(calls: Ledger, key: Key) -> State:
    record = calls.find(key)
    assert record is not None
    return record.state


ONE, TWO = Key("billing", "one"), Key("billing", "two")


# ---- Every call ---------------------------------------------------------------------------------


def keys_of(number: int) -> list[Key]:
    return [Key("billing", str(n)) for n in range(number)]


def test_life_of_a_message(calls: Ledger) -> None:
    """Claim, extend, fail, release, mark handled, complete: each is answered and stored."""
    claim = granted(calls.claim(ONE, "60s", fingerprint="one", metadata={"tenant": "a"}))
    assert isinstance(calls.claim(ONE), Busy)
    calls.fail(calls.extend(claim, timedelta(seconds=90)), ValueError("no"))
    record = calls.find(ONE)
    assert record is not None
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
        with pytest.raises(FencedError, match="not the newest"):
            call()
    with pytest.raises(MessageError):
        calls.claim(Key("billing", ""))
    with pytest.raises(ConfigError, match="lease"):
        calls.claim(TWO, "0s")
    with pytest.raises(MessageError, match="JSON"):
        calls.complete(claim, object())


# ---- Deferring ---------------------------------------------------------------------------------


def test_deferred_with_handled(calls: Ledger) -> None:
    """What is deferred is stored with `handled`, and waits in the order of sending."""
    late, soon = deferred(ONE, "late", position=2), deferred(ONE, "soon", position=1)
    claim = handled(calls, "one", late, soon, result={"receipt": 7})
    assert (claim.record.state, claim.record.result) == (State.HANDLED, {"receipt": 7})
    record = calls.find(ONE)
    assert record is not None
    assert (record.version, record.result) == (claim.record.version, {"receipt": 7})
    waiting = calls.mailbox.deferred(ONE)
    assert [replace(message, number=None) for message in waiting] == [soon, late]
    assert calls.mailbox.deferred(TWO) == []


def test_handled_again_after_it_was_sent(calls: Ledger) -> None:
    """The first answer is lost, and a relay is faster than the second try: what it has sent is
    not sent once more, and a completed message has none that wait.
    """
    claim = granted(calls.claim(ONE))
    messages = [deferred(ONE, "a"), deferred(ONE, "b")]
    calls.handled(claim, "first", messages)
    calls.mailbox.sent(calls.mailbox.take(10, "30s"))
    calls.handled(claim, "second", messages)
    assert calls.mailbox.deferred(ONE) == []


# ---- Sent, and refused -------------------------------------------------------------------------


def test_sent_completes_with_the_last(calls: Ledger) -> None:
    """A message is completed when the last of what it deferred is sent; its result stays."""
    handled(calls, "one", deferred(ONE, "a"), deferred(ONE, "b"), result="kept")
    first, last = calls.mailbox.take(10, "30s")
    calls.mailbox.sent([first])
    calls.mailbox.sent([first])
    assert (state(calls, ONE), ids(calls.mailbox.deferred(ONE))) == (State.HANDLED, ["b"])
    calls.mailbox.sent([last])
    calls.mailbox.sent([last])
    outcome = calls.claim(ONE)
    assert isinstance(outcome, Duplicate)
    assert outcome.record.result == "kept"


# ---- What becomes of it ------------------------------------------------------------------------


def test_refused_forget_takes_nothing(calls: Ledger) -> None:
    """Where the record stays, its steps stay."""
    calls.keep_step(granted(calls.claim(ONE, "60s")), "charge", 7)
    with pytest.raises(RefusedError):
        calls.forget(ONE)
    assert calls.steps(ONE) == {"charge": 7}


# ---- Steps -------------------------------------------------------------------------------------


def test_steps(calls: Ledger, clock: ManualClock) -> None:
    """A finished step keeps its first result, also None, for the next attempt and after."""
    claim = granted(calls.claim(ONE, "60s"))
    calls.keep_step(claim, "charge", {"receipt": [7, "é"]})
    calls.keep_step(claim, "charge", "second")
    calls.keep_step(claim, "log", None)
    clock.advance(61)
    claim = granted(calls.claim(ONE, "60s"))
    assert calls.steps(ONE) == {"charge": {"receipt": [7, "é"]}, "log": None}
    assert calls.steps(TWO) == {}
    calls.complete(claim)
    assert set(calls.steps(ONE)) == {"charge", "log"}


# ---- Waiting -----------------------------------------------------------------------------------


def test_waiting_goes_on_beside_other_calls(clock: ManualClock) -> None:
    """Calls that defer nothing do not end the wait: two relays would keep each other awake."""
    ledger = Ledger(MemoryStore(clock))
    handled(ledger, "one", deferred(ONE, "a", delay_s=60))
    store = ledger._store
    assert isinstance(store, MemoryStore)
    before = store.notifications.count
    ledger.find(ONE)
    ledger.mailbox.take(10, "1s")
    assert store.notifications.count == before
    handled(ledger, "two", deferred(TWO, "b"))
    assert store.notifications.count > before


# ---- Transactions ------------------------------------------------------------------------------


def test_no_transaction_to_join(ledger: Ledger, redis_url: str) -> None:
    """A ledger in memory, or in Redis, says that it cannot be part of a transaction."""
    for each in (ledger, open_ledger(redis_url)):
        with pytest.raises(ConfigError, match="transaction: a ledger in"), each.transaction(None):
            pass
