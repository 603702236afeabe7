"""`once`: when the function runs, what its callers get, and what is recorded."""

import asyncio
import inspect
import os
import signal
import threading
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any, NamedTuple, cast

import pytest
from tests.conditions import LIMIT_S
from tests.logs import events_in
from tests.meddling import MeddlingStore, away
from tests.records import granted, record_of
from tests.unit.conftest import Stall

from oncely._util import clock as process_clock
from oncely._util.signals import told_to_stop
from oncely.barrier import idempotent_consumer, message_context
from oncely.core.errors import (
    BusyError,
    ExhaustedError,
    FencedError,
    InDoubtError,
    MismatchError,
    StoreUnavailable,
)
from oncely.core.policy import Policy
from oncely.core.record import Key, State
from oncely.ledger.ledger import Ledger
from oncely.once import once
from oncely.testing import ManualClock


class Order(NamedTuple):
    """What the functions of these tests are called with."""

    id: str = "abc-123"
    amount: Any = 10


Charge = Callable[[Order], Any]
Decorate = Callable[..., Charge]


@pytest.fixture(params=["sync", "async"])
def decorated(request: pytest.FixtureRequest, ledger: Ledger) -> Decorate:
    """Decorates a function as it is, or as a coroutine function, and calls it either way."""

    def decorate(function: Charge, **options: Any) -> Charge:
        guard: Callable[[Any], Any] = once(
            ledger, consumer="billing", key=lambda order: order.id, **options
        )
        if request.param == "sync":
            return cast(Charge, guard(function))

        async def coroutine(order: Order) -> Any:
            return function(order)

        wrapped = guard(coroutine)
        return lambda order: asyncio.run(wrapped(order))

    return decorate


@pytest.fixture
def runs() -> list[Order]:
    """The orders with which a function ran."""
    return []


def raising(error: BaseException) -> Charge:
    """A function that raises."""

    def charge(order: Order) -> None:
        raise error

    return charge


# ---- Running once ------------------------------------------------------------------------------


def test_runs_once(decorated: Decorate, ledger: Ledger, key: Key, runs: list[Order]) -> None:
    """The function runs for the first delivery of an id, and for no other. The first caller gets
    the result as it is, a duplicate None, where none is kept.
    """
    result = object()

    def note(order: Order) -> object:
        runs.append(order)
        return result

    charge = decorated(note)
    results = [charge(order) for order in (Order(), Order(), Order("other"), Order())]
    assert results == [result, None, result, None]
    assert runs == [Order(), Order("other")]
    assert record_of(ledger, key).state is State.COMPLETED


@pytest.mark.parametrize("options", [{"keep_result": True}, {"policy": Policy(results="keep")}])
@pytest.mark.parametrize("result", [{"paid": [10, "€"]}, 0, False, "", None])
def test_duplicates_get_the_kept_result(
    decorated: Decorate, options: dict[str, Any], result: Any
) -> None:
    """Where results are kept, a duplicate gets an equal one."""
    charge = decorated(lambda order: result, **options)
    assert [charge(Order()), charge(Order())] == [result, result]


def test_handled_before(decorated: Decorate, ledger: Ledger, key: Key, runs: list[Order]) -> None:
    """What was handled and never completed is completed, and does not run again."""
    ledger.release(ledger.handled(granted(ledger.claim(key))))
    assert decorated(runs.append)(Order()) is None
    assert runs == []
    assert record_of(ledger, key).state is State.COMPLETED


def test_arguments(ledger: Ledger) -> None:
    """`key` and `fingerprint` are called with the function's own arguments, by name too."""
    seen: list[tuple[Any, ...]] = []

    def note(first: str, /, second: int, *, third: str = "c") -> str:
        seen.append((first, second, third))
        return first

    guard = once(ledger, consumer="billing", key=note, fingerprint=note)

    @guard
    def charge(first: str, /, second: int, *, third: str = "c") -> None:
        seen.append((first, second, third))

    charge("a", second=2, third="x")
    assert seen == [("a", 2, "x")] * 3


def test_names_of_arguments(ledger: Ledger) -> None:
    """Arguments may have the names of what the decorators themselves use."""
    names = dict.fromkeys(("function", "call", "turn", "work", "self", "args", "kwargs"), "abc")

    def given(**named: str) -> dict[str, str]:
        return named

    charge = once(ledger, consumer="billing", key=lambda **named: named["function"])(given)
    receive = idempotent_consumer(ledger)(given)
    with message_context(message_id="abc", consumer_queue="mailing"):
        assert charge(**names) == receive(**names) == names


def test_methods(ledger: Ledger) -> None:
    """A method can be decorated like any function."""

    class Billing:
        @once(ledger, consumer="billing", key=lambda self, order: order.id, keep_result=True)
        def charge(self, order: Order) -> str:
            return f"charged {order.amount}"

    assert [Billing().charge(Order()) for _ in range(2)] == ["charged 10", "charged 10"]


def test_wraps(ledger: Ledger) -> None:
    """The decorated function keeps its name and documentation, and whether it is a coroutine's."""

    def charge(order: Order) -> None:
        """Charge it."""

    async def charge_async(order: Order) -> None:
        """Charge it."""

    guard = once(ledger, consumer="billing", key=lambda order: order.id)
    assert (guard(charge).__name__, guard(charge).__doc__) == ("charge", "Charge it.")
    assert inspect.iscoroutinefunction(guard(charge_async))
    assert not inspect.iscoroutinefunction(guard(charge))


# ---- What is not granted -----------------------------------------------------------------------


def test_mismatch(decorated: Decorate, runs: list[Order]) -> None:
    """The same id with another fingerprint raises MismatchError; an equal one is a duplicate."""
    charge = decorated(runs.append, fingerprint=lambda order: order.amount)
    charge(Order())
    charge(Order())
    with pytest.raises(MismatchError, match="abc-123"):
        charge(Order(amount=11))
    assert runs == [Order()]


@pytest.mark.parametrize(
    ("one", "same", "other"),
    [
        (1, 1.0, "1"),
        (10**20, 1e20, Decimal(10**20)),
        ({"b": (0.0, 1), "a": 1.50}, {"a": 1.5, "b": [-0.0, 1.0]}, {}),
        (Decimal("1.10"), Decimal("1.1"), 1.1),
        (
            datetime(2024, 2, 29, 1, tzinfo=UTC),
            datetime(2024, 2, 28, 20, tzinfo=timezone(timedelta(hours=-5))),
            "2024-02-29",
        ),
        (None, None, "None"),
        ([1], [1.0], "[1]"),
    ],
)
def test_fingerprints_of_equal_values(
    decorated: Decorate, runs: list[Order], one: Any, same: Any, other: Any
) -> None:
    """A repetition that writes a number otherwise, or an instant in another zone, is the same; of
    different types none are. None is a fingerprint like any other.
    """
    charge = decorated(runs.append, fingerprint=lambda order: order.amount)
    charge(Order(amount=one))
    charge(Order(amount=same))
    assert len(runs) == 1
    with pytest.raises(MismatchError):
        charge(Order(amount=other))


def test_fingerprint_of_all_arguments(decorated: Decorate) -> None:
    """With fingerprint=True all arguments count; the order of names in a mapping does not."""
    charge = decorated(lambda order: None, fingerprint=True)
    charge(Order(amount={"net": 1, "tax": 2}))
    charge(Order(amount={"tax": 2, "net": 1}))
    with pytest.raises(MismatchError):
        charge(Order(amount={"tax": 2, "net": 3}))


# ---- Failures ----------------------------------------------------------------------------------


def test_error_is_recorded_and_raised(
    decorated: Decorate, ledger: Ledger, key: Key, runs: list[Order]
) -> None:
    """An error is recorded, and raised as it was; the function runs again, and may succeed."""
    error = ValueError("no address")
    with pytest.raises(ValueError, match="no address") as caught:
        decorated(raising(error))(Order())
    assert caught.value is error
    record = record_of(ledger, key)
    assert (record.state, record.error) == (State.FAILED, "ValueError: no address")
    decorated(runs.append)(Order())
    assert runs == [Order()]


def test_tries_are_spent(decorated: Decorate, ledger: Ledger, key: Key) -> None:
    """After its tries a message is exhausted at once, with its last error, and raises so."""
    charge = decorated(raising(ValueError("no")), policy=Policy(tries=2))
    for exhausted in (False, True):
        with pytest.raises(ValueError, match="no"):
            charge(Order())
        assert record_of(ledger, key).exhausted is exhausted
    with pytest.raises(ExhaustedError, match="ValueError: no"):
        charge(Order())


def test_store_away_before(decorated: Decorate, meddling: MeddlingStore, runs: list[Order]) -> None:
    """When the store cannot be reached the call raises StoreUnavailable, and nothing runs."""
    meddling.meddle = away
    with pytest.raises(StoreUnavailable):
        decorated(runs.append)(Order())
    assert runs == []


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("error", [None, ValueError("no address")])
def test_store_away_after(
    decorated: Decorate,
    meddling: MeddlingStore,
    clock: ManualClock,
    caplog: pytest.LogCaptureFixture,
    error: ValueError | None,
) -> None:
    """When its end cannot be recorded the result is returned all the same, and an error is raised
    as it was; that is logged. It is in doubt later.
    """

    def charge(order: Order) -> str:
        meddling.meddle = away
        if error:
            raise error
        return "charged"

    charged = decorated(charge, policy=Policy(on_in_doubt="hold"))
    if error is None:
        assert charged(Order()) == "charged"
    else:
        with pytest.raises(ValueError, match="no address") as caught:
            charged(Order())
        assert caught.value is error
    assert "storing_failed" in events_in(caplog)
    # With its reason: no place in a program is at fault.
    assert not any(record.exc_info for record in caplog.records)
    meddling.meddle = lambda: None
    with pytest.raises(BusyError, match=r"abc-123.* worker, until .* UTC unless it is extended"):
        charged(Order())
    clock.advance(301)
    with pytest.raises(InDoubtError):
        charged(Order())


@pytest.mark.parametrize(("error", "raised"), [(None, FencedError), (KeyError(), KeyError)])
def test_fenced_after_takeover(
    decorated: Decorate,
    rival: Ledger,
    clock: ManualClock,
    key: Key,
    error: Exception | None,
    raised: type[Exception],
) -> None:
    """When another worker took the message over, the call raises FencedError after it ran, or its
    own error; it changes nothing for the new holder.
    """

    def charge(order: Order) -> None:
        clock.advance(301)
        granted(rival.claim(key))
        if error:
            raise error

    with pytest.raises(raised):
        decorated(charge)(Order())
    record = record_of(rival, key)
    assert (record.state, record.fence) == (State.PROCESSING, 2)


class _Beating(process_clock.Clock):
    """A clock on which a heartbeat is always due."""

    def wait(self, event: threading.Event, seconds: float) -> bool:
        return super().wait(event, 0.001)


def test_long_function_keeps_its_claim(
    ledger: Ledger, meddling: MeddlingStore, clock: ManualClock, key: Key
) -> None:
    """A function that runs longer than its lease keeps the message: the claim is extended."""
    extended = threading.Semaphore(0)

    @once(ledger, consumer="billing", key=lambda order: order.id, lease="60s")
    def charge(order: Order) -> None:
        meddling.meddle = extended.release
        for _ in range(3):
            clock.advance(50)
            # One may have begun before that.
            assert all(extended.acquire(timeout=LIMIT_S) for _ in range(2))
        meddling.meddle = lambda: None
        with pytest.raises(BusyError):
            charge(order)

    with process_clock.replaced_by(_Beating()):
        charge(Order())
    assert record_of(ledger, key).fence == 1
    assert record_of(ledger, key).state is State.COMPLETED


# ---- Ended by what is not an Exception ----------------------------------------------------------


@pytest.mark.parametrize(
    "end",
    [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError()],
    ids=lambda end: type(end).__name__,
)
def test_whatever_ends_it_is_a_failure(
    decorated: Decorate, ledger: Ledger, key: Key, end: BaseException
) -> None:
    """What is not an Exception is a failed attempt as well, and goes on as it was."""
    with pytest.raises(type(end)) as caught:
        decorated(raising(end))(Order())
    assert caught.value is end
    record = record_of(ledger, key)
    assert (record.state, record.attempts) == (State.FAILED, 1)
    assert type(end).__name__ in str(record.error)


@pytest.mark.parametrize("policy", [Policy(), Policy(on_in_doubt="hold")])
def test_process_that_is_stopping(
    decorated: Decorate, ledger: Ledger, key: Key, policy: Policy
) -> None:
    """While this process is being stopped, what is ended so has not failed: it is released or,
    where it must not repeat, left in doubt.
    """
    former = signal.getsignal(signal.SIGTERM)
    with told_to_stop():
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(SystemExit):
            decorated(raising(SystemExit()), policy=policy)(Order())
    assert signal.getsignal(signal.SIGTERM) is former
    record = ledger.find(key)
    assert (record is None) is (policy.on_in_doubt == "retry")
    assert record is None or record.state is State.PROCESSING


async def within_deadline(awaited: Awaitable[Any]) -> Any:
    """The result of `awaited`, or an error when it takes too long."""
    return await asyncio.wait_for(awaited, LIMIT_S)


async def stalled_call(charge: Callable[[Order], Awaitable[Any]], stall: Stall) -> Any:
    """A call, as soon as it stalls."""
    task = asyncio.ensure_future(charge(Order()))
    await stall.is_reached()
    return task


@pytest.fixture
def charge_async(ledger: Ledger, runs: list[Order]) -> Callable[[Order], Awaitable[Any]]:
    """A coroutine function that runs once and notes that."""

    @once(ledger, consumer="billing", key=lambda order: order.id)
    async def charge(order: Order) -> str:
        runs.append(order)
        return "charged"

    return charge


def test_cancelled_while_running(ledger: Ledger, key: Key) -> None:
    """A call cancelled while its function runs has failed, and ends cancelled."""

    async def main() -> None:
        running = asyncio.Event()

        @once(ledger, consumer="billing", key=lambda order: order.id)
        async def charge(order: Order) -> None:
            running.set()
            await asyncio.Event().wait()

        task = asyncio.ensure_future(charge(Order()))
        await within_deadline(running.wait())
        assert ledger.find(key) is not None
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await within_deadline(task)

    asyncio.run(main())
    assert record_of(ledger, key).state is State.FAILED


@pytest.mark.parametrize("times", [1, 2])
def test_cancelled_while_claiming(
    charge_async: Callable[[Order], Awaitable[Any]],
    ledger: Ledger,
    meddling: MeddlingStore,
    key: Key,
    runs: list[Order],
    times: int,
) -> None:
    """A call cancelled while it claims releases what it is granted, however often it is cancelled.

    Otherwise a message that nobody handles would be held, and extended, for ever.
    """
    stall = Stall()
    meddling.once(stall.hold)

    async def main() -> None:
        task = await stalled_call(charge_async, stall)
        for _ in range(times):
            task.cancel()
            await asyncio.sleep(0)
        stall.go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await within_deadline(task)

    asyncio.run(main())
    assert runs == []
    assert ledger.find(key) is None


def test_cancelled_while_completing(
    charge_async: Callable[[Order], Awaitable[Any]],
    ledger: Ledger,
    meddling: MeddlingStore,
    key: Key,
) -> None:
    """A call cancelled while it completes is completed: the effect has happened."""
    ledger.keep_retention("billing", Policy().retention)  # Or the call would, as its second write.
    stall = Stall()
    meddling.once(lambda: meddling.once(stall.hold))

    async def main() -> None:
        task = await stalled_call(charge_async, stall)
        task.cancel()
        await asyncio.sleep(0)
        stall.go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await within_deadline(task)

    asyncio.run(main())
    assert record_of(ledger, key).state is State.COMPLETED
