"""The ledger's calls for deferred messages and steps, as they are and as coroutines."""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
from tests.meddling import MeddlingStore
from tests.records import granted

from oncely.async_ledger import AsyncLedger
from oncely.core.commands import Duplicate, Fenced, Handled, Written
from oncely.core.errors import ConfigError, FencedError, MessageError, RefusedError
from oncely.core.message import Message
from oncely.core.record import Claim, Key, State
from oncely.core.waiting import WaitingMessage
from oncely.ledger import Ledger, open_ledger
from oncely.stores.memory_store import MemoryStore
from oncely.stores.memory_tables import MemoryTables
from oncely.stores.store import Backlog, PutBack
from oncely.testing import ManualClock

_DEADLINE_S = 60.0


class Awaited:
    """The calls of an AsyncLedger, each awaited where it is made."""

    def __init__(self, ledger: Ledger) -> None:
        self._calls = AsyncLedger(ledger)
        self.mailbox = self._calls.mailbox

    def __getattr__(self, name: str) -> Callable[..., Any]:
        call = getattr(self._calls, name)

        def run(*args: Any, **named: Any) -> Any:
            return asyncio.run(call(*args, **named))

        return run


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


def test_deferred_by_an_old_claim(calls: Ledger, clock: ManualClock) -> None:
    """Whose claim is not the newest defers nothing."""
    old = granted(calls.claim(ONE, "60s"))
    clock.advance(61)
    granted(calls.claim(ONE, "60s"))
    with pytest.raises(FencedError):
        calls.handled(old, None, [deferred(ONE, "a")])
    assert calls.mailbox.deferred(ONE) == []


def test_deferred_by_many(calls: Ledger, clock: ManualClock) -> None:
    """Of many claims each has its outcome, and its messages where it is the newest."""
    keys = [Key("billing", str(n)) for n in range(3)]
    claims = [granted(outcome) for outcome in calls.claim_many(keys, "60s")]
    clock.advance(61)
    granted(calls.claim(keys[1]))
    messages = [[deferred(key, f"{key.message_id}-{n}") for n in range(2)] for key in keys]
    outcomes = calls.handled_many(claims, ["a", "b", "c"], messages)
    assert [type(outcome) for outcome in outcomes] == [Written, Fenced, Written]
    assert [ids(calls.mailbox.deferred(key)) for key in keys] == [
        ["0-0", "0-1"],
        [],
        ["2-0", "2-1"],
    ]


def test_deferred_once(calls: Ledger) -> None:
    """The same `handled` again, its first answer lost, defers nothing a second time."""
    messages = [deferred(ONE, "a"), deferred(ONE, "b")]
    claim = granted(calls.claim(ONE))
    calls.handled(claim, "first", messages)
    calls.handled(claim, "second", messages)
    assert ids(calls.mailbox.deferred(ONE)) == ["a", "b"]


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


def test_two_destinations(calls: Ledger) -> None:
    """One message for two destinations is two that wait."""
    handled(calls, "one", deferred(ONE, "a", "mails"), deferred(ONE, "a", "texts"))
    assert [message.destination for message in calls.mailbox.deferred(ONE)] == ["mails", "texts"]


def test_result_that_is_no_json(calls: Ledger) -> None:
    """A result that is not JSON is refused before anything is stored."""
    claim = granted(calls.claim(ONE))
    with pytest.raises(MessageError, match="JSON"):
        calls.handled(claim, object(), [deferred(ONE, "a")])
    assert state(calls, ONE) is State.PROCESSING
    assert calls.mailbox.deferred(ONE) == []


def test_nothing_deferred_costs_one_write(ledger: Ledger, meddling: MeddlingStore) -> None:
    """Where no message was sent, `handled` is one write, for one and for many."""
    first, *claims = [granted(o) for o in ledger.claim_many([ONE, TWO, Key("billing", "three")])]
    meddling.calls.clear()
    ledger.handled(first)
    ledger.handled_many(claims, deferred=[[], []])
    assert meddling.calls == ["swap", "swap"]


# ---- Taking ------------------------------------------------------------------------------------


def test_take_holds(calls: Ledger, clock: ManualClock) -> None:
    """What is taken nobody else is given before the time is over."""
    handled(calls, "one", deferred(ONE, "a"), deferred(ONE, "b", "texts"))
    assert ids(calls.mailbox.take(1, "30s")) == ["a"]
    assert ids(calls.mailbox.take(10, "30s")) == ["b"]
    assert calls.mailbox.take(10, "30s") == []
    clock.advance(30)
    assert ids(calls.mailbox.take(10, "30s")) == ["a", "b"]


def test_take_keeps_the_order_of_a_lane(calls: Ledger) -> None:
    """Behind what is held its lane waits, and no other lane does."""
    handled(calls, "one", deferred(ONE, "a", key="k"), deferred(ONE, "b", key="other"))
    handled(calls, "two", deferred(TWO, "c", key="k"), deferred(TWO, "d"))
    assert ids(calls.mailbox.take(1, "30s")) == ["a"]
    assert ids(calls.mailbox.take(10, "30s")) == ["b", "d"]
    calls.mailbox.sent(calls.mailbox.deferred(ONE))
    assert ids(calls.mailbox.take(10, "30s")) == ["c"]


def test_take_of_a_whole_lane(calls: Ledger) -> None:
    """One who takes may be given the whole of a lane, in its order."""
    handled(calls, "one", deferred(ONE, "a"), deferred(ONE, "b"), deferred(ONE, "c"))
    assert ids(calls.mailbox.take(10, "30s")) == ["a", "b", "c"]


def test_take_of_parents(calls: Ledger) -> None:
    """Of the parents that are named, and none that would pass another's in its lane."""
    handled(calls, "one", deferred(ONE, "a", key="k"), deferred(ONE, "b"))
    handled(calls, "two", deferred(TWO, "c", key="k"), deferred(TWO, "d"))
    assert calls.mailbox.take(10, "30s", []) == []
    assert ids(calls.mailbox.take(10, "30s", [TWO])) == ["d"]
    assert ids(calls.mailbox.take(10, "30s", [ONE, TWO])) == ["a", "b", "c"]


def test_delay_counts_from_handled(calls: Ledger, clock: ManualClock) -> None:
    """What has a delay is not given sooner, and nothing waits behind it."""
    claim = granted(calls.claim(ONE, "60s"))
    clock.advance(50)
    messages = [deferred(ONE, "a", delay_s=20), deferred(ONE, "b"), deferred(ONE, "c", "texts")]
    calls.handled(claim, None, messages)
    assert ids(calls.mailbox.take(10, "1s")) == ["b", "c"]
    clock.advance(19)
    assert ids(calls.mailbox.take(10, "1s")) == ["b", "c"]
    clock.advance(1)
    assert ids(calls.mailbox.take(10, "1s")) == ["a", "b", "c"]


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


def test_sent_of_many_parents(calls: Ledger) -> None:
    """Of several messages those are completed of which nothing waits any more."""
    handled(calls, "one", deferred(ONE, "a"))
    handled(calls, "two", deferred(TWO, "b"), deferred(TWO, "c"))
    a, b, _ = calls.mailbox.take(10, "30s")
    calls.mailbox.sent([b, a])
    assert (state(calls, ONE), state(calls, TWO)) == (State.COMPLETED, State.HANDLED)


def test_sent_by_two_at_once(ledger: Ledger) -> None:
    """Of two who send the last two at the same time one completes the message."""
    for n in range(50):
        key = Key("billing", str(n))
        handled(ledger, str(n), deferred(key, "a"), deferred(key, "b", "texts"))
        both = ledger.mailbox.take(2, "30s", [key])
        threads = [
            threading.Thread(target=ledger.mailbox.sent, args=([message],)) for message in both
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(_DEADLINE_S)
        assert state(ledger, key) is State.COMPLETED


def test_refused_is_tried_again(calls: Ledger, clock: ManualClock) -> None:
    """What a transport refused waits for its time, with the reason, and its lane behind it."""
    handled(calls, "one", deferred(ONE, "a"), deferred(ONE, "b"))
    first, _ = calls.mailbox.take(10, "30s")
    calls.mailbox.put_back([PutBack(first, "no such queue", 40.0)])
    waiting = calls.mailbox.deferred(ONE)[0]
    assert (waiting.attempts, waiting.error) == (1, "no such queue")
    clock.advance(39)
    assert calls.mailbox.take(10, "1s") == []
    clock.advance(1)
    assert ids(calls.mailbox.take(10, "1s")) == ["a", "b"]


def test_set_aside(calls: Ledger, clock: ManualClock) -> None:
    """What is set aside is given to nobody, keeps its message handled, and holds up no other;
    until an operator lets it be sent after all.
    """
    handled(calls, "one", deferred(ONE, "a"), deferred(ONE, "b"))
    first, last = calls.mailbox.take(10, "30s")
    calls.mailbox.put_back([PutBack(first, "too large", None)])
    calls.mailbox.sent([last])
    clock.advance(86_400)
    assert calls.mailbox.take(10, "1s") == []
    calls.mailbox.finish([ONE])
    assert state(calls, ONE) is State.HANDLED
    assert calls.mailbox.backlog() == Backlog(waiting=0, set_aside=1, lag_s=0.0)
    assert (calls.mailbox.send_again(), calls.mailbox.send_again()) == (1, 0)
    [again] = calls.mailbox.take(10, "1s")
    assert (again.id, again.attempts, again.error) == ("a", 0, "too large")
    calls.mailbox.sent([again])
    assert state(calls, ONE) is State.COMPLETED


def test_refused_after_it_was_sent(calls: Ledger) -> None:
    """What another has sent meanwhile does not come back."""
    handled(calls, "one", deferred(ONE, "a"))
    taken = calls.mailbox.take(10, "30s")
    calls.mailbox.sent(taken)
    calls.mailbox.put_back([PutBack(taken[0], "late", 0.0)])
    assert calls.mailbox.deferred(ONE) == []


def test_finish(calls: Ledger) -> None:
    """What is handled is completed where nothing waits, and stays where something does."""
    handled(calls, "one")
    handled(calls, "two", deferred(TWO, "a"))
    running = granted(calls.claim(Key("billing", "three")))
    keys = [ONE, TWO, running.key, Key("billing", "unknown")]
    calls.mailbox.finish(keys)
    assert [state(calls, key) for key in keys[:3]] == [
        State.COMPLETED,
        State.HANDLED,
        State.PROCESSING,
    ]


def test_backlog(calls: Ledger, clock: ManualClock) -> None:
    """The backlog counts what waits, and for how long the oldest that could be sent has."""
    assert calls.mailbox.backlog() == Backlog(waiting=0, set_aside=0, lag_s=0.0)
    handled(calls, "one", deferred(ONE, "a", delay_s=10), deferred(ONE, "b", "texts", delay_s=99))
    assert calls.mailbox.backlog() == Backlog(waiting=2, set_aside=0, lag_s=0.0)
    clock.advance(25)
    assert calls.mailbox.backlog() == Backlog(waiting=2, set_aside=0, lag_s=15.0)


def test_whoever_asks_may_send(calls: Ledger) -> None:
    """A redelivery of what is handled finds what is not sent yet, and completes it."""
    former = handled(calls, "one", deferred(ONE, "a"))
    outcome = calls.claim(ONE)
    assert isinstance(outcome, Handled)
    calls.mailbox.sent(calls.mailbox.take(10, "30s", [ONE]))
    calls.complete(outcome.claim)
    with pytest.raises(FencedError):
        calls.complete(former)
    assert state(calls, ONE) is State.COMPLETED


# ---- What becomes of it ------------------------------------------------------------------------


def test_forget_takes_all_along(calls: Ledger) -> None:
    """A record that is forgotten takes its steps and its deferred messages along."""
    claim = granted(calls.claim(ONE))
    calls.keep_step(claim, "charge", 7)
    calls.handled(claim, None, [deferred(ONE, "a")])
    handled(calls, "two", deferred(TWO, "b"))
    calls.forget(ONE)
    assert (calls.find(ONE), calls.steps(ONE), calls.mailbox.deferred(ONE)) == (None, {}, [])
    assert ids(calls.mailbox.deferred(TWO)) == ["b"]


def test_refused_forget_takes_nothing(calls: Ledger) -> None:
    """Where the record stays, its steps stay."""
    calls.keep_step(granted(calls.claim(ONE, "60s")), "charge", 7)
    with pytest.raises(RefusedError):
        calls.forget(ONE)
    assert calls.steps(ONE) == {"charge": 7}


def test_purge_waits_for_what_is_deferred(calls: Ledger, clock: ManualClock) -> None:
    """A record stays while a message of its own waits; then it goes, and its steps with it."""
    claim = granted(calls.claim(ONE))
    calls.keep_step(claim, "charge", 7)
    calls.complete(calls.handled(claim, None, [deferred(ONE, "a")]))
    calls.complete(granted(calls.claim(TWO)))
    clock.advance(31 * 86_400)
    assert calls.purge("30d", batch=1) == 1
    assert calls.find(ONE) is not None
    calls.mailbox.sent(calls.mailbox.take(1, "30s"))
    assert calls.purge("30d") == 1
    assert (calls.find(ONE), calls.steps(ONE)) == (None, {})


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


def test_step_of_an_old_claim(calls: Ledger, clock: ManualClock) -> None:
    """Whose claim is not the newest, or has come to its end, keeps no step."""
    old = granted(calls.claim(ONE, "60s"))
    clock.advance(61)
    claim = granted(calls.claim(ONE, "60s"))
    with pytest.raises(FencedError):
        calls.keep_step(old, "charge", 1)
    calls.handled(claim)
    with pytest.raises(FencedError):
        calls.keep_step(claim, "charge", 2)
    assert calls.steps(ONE) == {}


def test_step_that_is_no_json(calls: Ledger) -> None:
    """A result that is not JSON is refused, and not kept."""
    claim = granted(calls.claim(ONE))
    with pytest.raises(MessageError, match="JSON"):
        calls.keep_step(claim, "charge", object())
    assert calls.steps(ONE) == {}


def test_keys_are_checked(calls: Ledger) -> None:
    """A key that can identify no message is refused."""
    for call in (calls.mailbox.deferred, calls.steps, calls.count_delivery):
        with pytest.raises(MessageError, match="empty id"):
            call(Key("billing", ""))


# ---- Waiting -----------------------------------------------------------------------------------


def test_waiting_is_over_when_something_is_deferred(clock: ManualClock) -> None:
    """Who waits for deferred messages is woken when one can be sent, also by what came before."""
    ledger = Ledger(MemoryStore(clock))
    before, after = (
        threading.Thread(target=ledger.mailbox.wait, args=("10m",), daemon=True) for _ in range(2)
    )
    before.start()
    handled(ledger, "one", deferred(ONE, "a"))
    after.start()
    for waiter in (before, after):
        waiter.join(_DEADLINE_S)
        assert not waiter.is_alive()


def test_waiting_goes_on_beside_other_calls(clock: ManualClock) -> None:
    """Calls that defer nothing do not end the wait: two relays would keep each other awake."""
    ledger = Ledger(MemoryStore(clock))
    handled(ledger, "one", deferred(ONE, "a", delay_s=60))
    over = threading.Event()

    def call() -> None:
        while not over.is_set():
            ledger.find(ONE)
            ledger.mailbox.take(10, "1s")

    caller = threading.Thread(target=call)
    caller.start()
    began = time.monotonic()
    ledger.mailbox.wait("200ms")
    took_s = time.monotonic() - began
    over.set()
    caller.join(_DEADLINE_S)
    assert took_s >= 0.2


# ---- Transactions ------------------------------------------------------------------------------


def test_no_transaction_to_join(ledger: Ledger, redis_url: str) -> None:
    """A ledger in memory, or in Redis, says that it cannot be part of a transaction."""
    for each in (ledger, open_ledger(redis_url)):
        with pytest.raises(ConfigError, match="transaction: a ledger in"), each.transaction(None):
            pass


def test_store_without_transactions(redis_url: str) -> None:
    """In Redis nothing is deferred and no step is kept; whoever tries is told, and all else is
    as anywhere.
    """
    ledger = open_ledger(redis_url)
    claim = granted(ledger.claim(ONE))
    for call in (
        lambda: ledger.handled(claim, None, [deferred(ONE, "a")]),
        lambda: ledger.keep_step(claim, "charge", 1),
        lambda: ledger.mailbox.take(10, "30s"),
    ):
        with pytest.raises(ConfigError, match="Redis has no transactions"):
            call()
    assert (ledger.mailbox.deferred(ONE), ledger.steps(ONE)) == ([], {})
    ledger.handled_many([claim], ["kept"], [[]])
    ledger.mailbox.finish([ONE])
    record = ledger.find(ONE)
    assert record is not None
    assert (record.state, record.result) == (State.COMPLETED, "kept")
    ledger.forget(ONE)
    assert ledger.find(ONE) is None


def test_sent_loads_its_parents_once(calls: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is sent completes its parents with what was loaded to hold them."""
    for id_ in "12":
        handled(calls, id_, deferred(Key("billing", id_), f"mail {id_}"))
    loads: list[list[Key]] = []
    load = MemoryTables.load

    def noted(tables: MemoryTables, keys: Sequence[Key]) -> Any:
        loads.append(sorted(keys))
        return load(tables, keys)

    monkeypatch.setattr(MemoryTables, "load", noted)
    calls.mailbox.sent(calls.mailbox.take(10, "30s"))
    assert loads == [[Key("billing", "1"), Key("billing", "2")]]
    assert calls.counts() == {("billing", State.COMPLETED): 2}
