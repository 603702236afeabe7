"""AsyncLedger: the ledger's calls as coroutines, what goes together, and what cancelling leaves."""

import asyncio
import inspect
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest
from tests.conditions import LIMIT_S
from tests.meddling import MeddlingStore
from tests.processes import printed
from tests.records import granted, record_of
from tests.unit.conftest import Stall

from oncely.core.commands import (
    Granted,
    Handled,
)
from oncely.core.errors import StoreError
from oncely.core.record import Claim, Key, State
from oncely.ledger import group_commit
from oncely.ledger.async_ledger import AsyncLedger
from oncely.ledger.ledger import Ledger

T = TypeVar("T")


@pytest.fixture(autouse=True)
def _nothing_stalls(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is, no batch is taken for stalled unless the test wants it."""
    monkeypatch.setattr(group_commit, "STALL_S", LIMIT_S)


@pytest.fixture
def stalls(_nothing_stalls: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch is taken for stalled soon."""
    monkeypatch.setattr(group_commit, "STALL_S", 0.01)


@pytest.fixture
def calls(ledger: Ledger) -> Iterator[AsyncLedger]:
    """The calls of `ledger` as coroutines."""
    yield AsyncLedger(ledger)
    ledger.close()


@pytest.fixture
def stall(meddling: MeddlingStore) -> Iterator[Stall]:
    """Holds up the next write."""
    stall = Stall()
    meddling.once(stall.hold)
    yield stall
    stall.go_on.set()


@pytest.fixture
def waiting(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> threading.Semaphore:
    """Released for each call that is handed to the threads of the ledger, or waits for them."""
    handed_over = threading.Semaphore(0)
    put = ledger._group_commit.put

    def tell(*calls: Any) -> None:
        put(*calls)
        for _ in calls:
            handed_over.release()

    monkeypatch.setattr(ledger._group_commit, "put", tell)
    return handed_over


async def acquired(semaphore: threading.Semaphore) -> None:
    assert await asyncio.to_thread(semaphore.acquire, timeout=LIMIT_S)


def run(main: Coroutine[Any, Any, T]) -> T:
    """The result of `main` in a loop of its own, or an error when it takes too long."""

    async def within_deadline() -> T:
        return await asyncio.wait_for(main, LIMIT_S)

    return asyncio.run(within_deadline())


async def cancelled(task: "asyncio.Task[Any]") -> None:
    """Cancel the task, and see it end so."""
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, LIMIT_S)


def cancelled_at(stall: Stall, call: Coroutine[Any, Any, object]) -> None:
    """Cancel a call whose write stalls, and let that go on."""

    async def main() -> None:
        task = asyncio.ensure_future(call)
        await stall.is_reached()
        await cancelled(task)
        stall.go_on.set()

    run(main())


def keys_of(number: int) -> list[Key]:
    return [Key("billing", str(n)) for n in range(number)]


# ---- What goes together ------------------------------------------------------------------------


def test_tasks_go_together(
    calls: AsyncLedger, meddling: MeddlingStore, stall: Stall, waiting: threading.Semaphore
) -> None:
    """Calls of tasks that wait at the same time are one exchange with the store."""
    first, *others = keys_of(501)

    async def main() -> None:
        stalled = asyncio.ensure_future(calls.claim(first))
        await stall.is_reached()
        tasks = [asyncio.ensure_future(calls.claim(key)) for key in others]
        for _ in [first, *others]:
            await acquired(waiting)
        stall.go_on.set()
        for task in [stalled, *tasks]:
            granted(await task)

    run(main())
    assert meddling.calls == ["insert", "insert"]


@pytest.mark.usefixtures("stalls")
@pytest.mark.parametrize("by", ["thread", "task"])
def test_stalled_batch(calls: AsyncLedger, ledger: Ledger, stall: Stall, by: str) -> None:
    """Calls behind a batch that hangs go on beside it."""
    first, second = keys_of(2)

    async def main() -> None:
        claiming = calls.claim(first) if by == "task" else asyncio.to_thread(ledger.claim, first)
        stalled = asyncio.ensure_future(claiming)
        await stall.is_reached()
        assert isinstance(await calls.claim(second), Granted)
        assert not stalled.done()
        stall.go_on.set()
        assert isinstance(await stalled, Granted)

    run(main())


def test_thread_that_is_ended(
    ledger: Ledger, meddling: MeddlingStore, stall: Stall, waiting: threading.Semaphore
) -> None:
    """Where the thread that carries out the calls of others is ended, they are told, each by an
    error of its own; the next call goes on.
    """

    def end() -> None:
        raise SystemExit(3)

    first, *others = keys_of(4)
    with ThreadPoolExecutor(4) as pool:
        stalled = pool.submit(ledger.claim, first)
        assert stall.reached.wait(LIMIT_S)
        waits = []
        for key in others:
            waits.append(pool.submit(ledger.claim, key))
            assert waiting.acquire(timeout=LIMIT_S)
        meddling.once(end)
        stall.go_on.set()
        granted(stalled.result(LIMIT_S))
        errors = [each.exception(LIMIT_S) for each in waits]
    assert [type(error) for error in errors] == [StoreError] * 3
    assert len({*map(id, errors)}) == 3
    granted(ledger.claim(others[0]))


@pytest.mark.parametrize(
    "starts", [(group_commit, "start_new_thread"), (threading.Thread, "start")]
)
def test_no_thread_can_be_started(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, starts: tuple[object, str]
) -> None:
    """Where a task needs a thread and none can be started, it is told; a thread needs none."""

    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    first, second, third = keys_of(3)
    with monkeypatch.context() as patched:
        patched.setattr(*starts, refuse)
        with pytest.raises(StoreError, match="can't start new thread"):
            run(AsyncLedger(ledger).claim(first))
        granted(ledger.claim(second))
    granted(run(AsyncLedger(ledger).claim(third)))


def test_error_of_one(
    calls: AsyncLedger, meddling: MeddlingStore, stall: Stall, waiting: threading.Semaphore
) -> None:
    """Where one of several that go together cannot be stored, that is its caller's error alone."""
    refusals = iter([True, False, False, True])  # All together, and then one by one.
    first, *others = keys_of(6)

    def refuse() -> None:
        if next(refusals, False):
            raise StoreError("it is too large")

    async def main() -> list[Any]:
        stalled = asyncio.ensure_future(calls.claim(first))
        await stall.is_reached()
        tasks = [asyncio.ensure_future(calls.claim(key)) for key in others]
        for _ in [first, *others]:
            await acquired(waiting)
        meddling.meddle = refuse
        stall.go_on.set()
        granted(await stalled)
        return await asyncio.gather(*tasks, return_exceptions=True)

    assert [type(each) for each in run(main())] == [Granted] * 2 + [StoreError] + [Granted] * 2


# ---- Cancelled ---------------------------------------------------------------------------------


def test_cancelled_while_it_waits(
    calls: AsyncLedger,
    ledger: Ledger,
    meddling: MeddlingStore,
    stall: Stall,
    waiting: threading.Semaphore,
) -> None:
    """A call that is cancelled while it waits for others is never sent."""
    first, second, third = keys_of(3)

    async def main() -> None:
        stalled = asyncio.ensure_future(calls.claim(first))
        await stall.is_reached()
        await acquired(waiting)
        doomed, other = (asyncio.ensure_future(calls.claim(key)) for key in (second, third))
        await acquired(waiting)
        await acquired(waiting)
        await cancelled(doomed)
        stall.go_on.set()
        granted(await stalled)
        granted(await other)

    run(main())
    assert meddling.calls == ["insert", "insert"]
    assert {record.key for record in ledger.scan()} == {first, third}


def test_cancelled_as_it_asks(
    calls: AsyncLedger, ledger: Ledger, meddling: MeddlingStore, key: Key
) -> None:
    """A call that is cancelled in the turn of the loop in which it was made is never sent."""

    async def main() -> None:
        async def cancel_other() -> None:
            task.cancel()

        task = asyncio.ensure_future(calls.claim(key))
        await asyncio.gather(task, cancel_other(), return_exceptions=True)
        assert task.cancelled()

    run(main())
    ledger.close()
    assert meddling.calls == []


@pytest.mark.parametrize("count", [1, 5])
def test_cancelled_in_flight(calls: AsyncLedger, ledger: Ledger, stall: Stall, count: int) -> None:
    """A task that is cancelled ends at once; what it is granted afterwards is given back, one claim
    or many.
    """
    keys = keys_of(count)
    claiming = calls.claim(keys[0]) if count == 1 else calls.claim_many(keys)
    cancelled_at(stall, claiming)
    ledger.close()
    assert ledger.counts() == {}


def test_right_to_send_is_held_by_nobody(
    calls: AsyncLedger, ledger: Ledger, meddling: MeddlingStore, key: Key
) -> None:
    """After a cancelled task that was to send what is deferred, the next who asks may send it."""
    ledger.handled(granted(ledger.claim(key)))
    stall = Stall()
    # The insert before it finds the record there.
    meddling.once(lambda: meddling.once(stall.hold))
    cancelled_at(stall, calls.claim(key))
    ledger.close()
    assert isinstance(ledger.claim(key), Handled)


def test_cancelled_when_it_is_granted(
    calls: AsyncLedger, ledger: Ledger, key: Key, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task that is cancelled in the moment in which it is granted a claim gives it back."""
    posted = threading.Event()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        post = loop.call_soon_threadsafe

        def tell(*args: Any) -> asyncio.Handle:
            try:
                return post(*args)
            finally:
                posted.set()

        monkeypatch.setattr(loop, "call_soon_threadsafe", tell)
        task = asyncio.ensure_future(calls.claim(key))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        # The loop must not get to hear of it before the task is cancelled.
        assert posted.wait(LIMIT_S)
        await cancelled(task)

    run(main())
    ledger.close()
    assert ledger.find(key) is None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_loop_closed_in_flight(calls: AsyncLedger, ledger: Ledger, key: Key, stall: Stall) -> None:
    """What is granted to a task whose loop was closed meanwhile is given back."""
    loop = asyncio.new_event_loop()
    task = loop.create_task(calls.claim(key))
    loop.run_until_complete(stall.is_reached())
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
    stall.go_on.set()
    ledger.close()
    assert ledger.find(key) is None
    assert not task.done()
    # It was left pending on purpose: nobody has to be told.
    task._log_destroy_pending = False  # type: ignore[attr-defined]


def test_completion_in_flight_ends(
    calls: AsyncLedger, ledger: Ledger, claim: Claim, stall: Stall
) -> None:
    """A completion that is cancelled in flight is stored all the same."""
    cancelled_at(stall, calls.complete(claim, "done"))
    ledger.close()
    record = record_of(ledger, claim.key)
    assert (record.state, record.result) == (State.COMPLETED, "done")


# ---- The process -------------------------------------------------------------------------------

# A task is cancelled while its claim is being stored; giving it back takes until GO_ON. What is
# registered first is the last thing at exit.
CANCELLED_AT_EXIT = """
import atexit, asyncio, threading
atexit.register(lambda: print(sum(ledger.counts().values())))

import oncely
from oncely.stores.memory_store import MemoryStore
from tests.meddling import MeddlingStore

inserting, inserted, go_on = threading.Event(), threading.Event(), threading.Event()

def hold():
    if store.calls == ["insert"]:
        inserting.set()
        inserted.wait(60)
    else:
        go_on.wait(60)

store = MeddlingStore(MemoryStore())
store.meddle = hold
ledger = oncely.Ledger(store)

async def main():
    asyncio.get_running_loop().slow_callback_duration = 60  # What a busy machine takes is no fault.
    task = asyncio.ensure_future(oncely.AsyncLedger(ledger).claim(oncely.Key("billing", "1")))
    await asyncio.to_thread(inserting.wait, 60)
    task.cancel()

asyncio.run(main())
inserted.set()
while "delete" not in store.calls:
    threading.Event().wait(0.001)
GO_ON
"""


@pytest.mark.parametrize(
    ("go_on", "left"),
    [("atexit.register(go_on.set)", 0), ("oncely.ledger.group_commit._PATIENCE_S = 0.1", 1)],
)
def test_exit_gives_back(go_on: str, left: int) -> None:
    """What was granted to a cancelled task is given back before the program ends; a store that
    hangs does not keep it from ending.
    """
    assert printed(CANCELLED_AT_EXIT.replace("GO_ON", go_on), "-X", "dev") == f"{left}\n"


SAME_AS_BEFORE = {"mailbox", "can_defer", "transaction"}
"""Of AsyncLedger, what is not awaited."""
NOT_FOR_TASKS = {
    *("keep", "extend_each", "now_beside", "is_shared", "is_contention", "is_outage"),
    "counts_quickly",
    *("count_untracked", "check_joins", "observe", "observer", "operations", "database_id"),
}
"""Of Ledger, what asks nothing of the store, and what a heartbeat alone does, in its thread."""


def public(kind: type) -> dict[str, Any]:
    """The public members of a class, those that it inherits among them."""
    return {name: each for name, each in inspect.getmembers(kind) if not name.startswith("_")}


def parameters(method: Callable[..., Any]) -> list[tuple[Any, ...]]:
    """What a method takes. Two defaults that are functions count as one."""
    return [
        (each.name, each.kind, each.annotation, callable(each.default) or each.default)
        for each in inspect.signature(method).parameters.values()
    ]


def test_every_call_of_the_ledger_is_there() -> None:
    """Each public method of Ledger is one of AsyncLedger, takes the same, and is awaited."""
    asynchronous = public(AsyncLedger)
    for name, method in public(Ledger).items():
        if name in NOT_FOR_TASKS:
            continue
        twin = asynchronous.pop(name)
        if isinstance(method, property):
            assert isinstance(twin, property), name
            continue
        assert parameters(method) == parameters(twin), name
        is_awaited = inspect.iscoroutinefunction(twin) or inspect.isasyncgenfunction(twin)
        assert is_awaited is (name not in SAME_AS_BEFORE), name
        if inspect.iscoroutinefunction(twin):
            returned = [inspect.signature(each).return_annotation for each in (method, twin)]
            assert returned[0] == returned[1], name
    assert asynchronous.keys() == {"run"}
