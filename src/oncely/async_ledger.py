"""AsyncLedger: the ledger's calls as coroutines. Those of many tasks go to the store together."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextvars import copy_context
from functools import partial
from typing import Any, TypeVar

from oncely.claiming.async_calls import AsyncCalls
from oncely.claiming.batching import STALL_S, Batcher, Call, Phase, Posts
from oncely.claiming.inbox import JoinedTransaction
from oncely.claiming.inline import InlineCalls
from oncely.claiming.request import (
    Metadata,
    Request,
    to_give_back,
)
from oncely.core.commands import (
    ClaimOutcome,
    Outcome,
)
from oncely.core.policy import Duration, Finding, Policy
from oncely.core.record import Key, Record, State
from oncely.ledger import Ledger
from oncely.stores.base import Backlog, KeyRange, Tally, Wanted

T = TypeVar("T")


class AsyncLedger(AsyncCalls):
    """The calls of `ledger` as coroutines, for any number of tasks and event loops.

    Each method is the one of Ledger by its name. A task that is cancelled ends at once, and what
    it is granted after that is given back; whatever else it asked for may still be done. The
    loop is never blocked: single calls are carried out by threads of the ledger's own, the
    others by the loop's default executor.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._calls = self._ledger = ledger
        self._batcher = ledger._batcher

    @property
    def blocking(self) -> InlineCalls:
        """The same calls, for functions that are not async."""
        return InlineCalls(self._ledger)

    async def _settle_one(self, request: Request) -> Outcome:
        call = _tasks_here(self._batcher).call(request)
        try:
            await call.future
        except (asyncio.CancelledError, GeneratorExit):
            self._batcher.abandon(call)
            raise
        return call.value()

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """What `function`, which may block, returns: called in a thread of the loop's executor."""
        return await asyncio.to_thread(function, *args)

    async def claim_many(
        self,
        keys: Sequence[Key],
        lease: Duration | None = None,
        policy: Policy = Policy(),
        *,
        fingerprints: Sequence[str | None] | None = None,
        metadata: Metadata = None,
        finding: Finding | None = None,
        in_doubt: Record | None = None,
    ) -> list[ClaimOutcome]:
        """`claim` for each."""
        claiming = _Claiming(
            partial(
                self._ledger.claim_many,
                keys,
                lease,
                policy,
                fingerprints=fingerprints,
                metadata=metadata,
                finding=finding,
                in_doubt=in_doubt,
            ),
            self._batcher,
        )
        try:
            return await asyncio.to_thread(claiming.run)
        except (asyncio.CancelledError, GeneratorExit):
            claiming.abandon()
            raise

    # ---- Looking -------------------------------------------------------------------------------

    async def now(self) -> float:
        """The store's clock, seconds since 1970."""
        return await asyncio.to_thread(self._ledger.now)

    async def find_many(self, keys: Collection[Key]) -> Mapping[Key, Record]:
        """The records of those of `keys` that have one."""
        return await asyncio.to_thread(self._ledger.find_many, keys)

    async def key_ranges(self, number: int) -> Sequence[KeyRange]:
        """At most `number` ranges that together hold every key."""
        return await asyncio.to_thread(self._ledger.key_ranges, number)

    async def read(
        self, keys: KeyRange = KeyRange(), wanted: Wanted = Wanted()
    ) -> AsyncIterator[Sequence[Record]]:
        """The records of a range that are wanted, page by page, for `async for`."""
        pages = self._ledger.read(keys, wanted)
        while (page := await asyncio.to_thread(next, pages, None)) is not None:
            yield page

    async def waiting(self, keys: Collection[Key]) -> set[Key]:
        """Those of `keys` with deferred messages that wait to be sent, or are set aside."""
        return await asyncio.to_thread(self._ledger.waiting, keys)

    async def scan(
        self,
        consumer: str | None = None,
        state: State | str | None = None,
        older_than: Duration | None = None,
        limit: int = 100,
        *,
        text: str | None = None,
        lease_over: bool = False,
    ) -> AsyncIterator[Record]:
        """The records that fit, longest unseen first, for `async for`."""
        scan = partial(self._ledger.scan, text=text, lease_over=lease_over)
        for record in await asyncio.to_thread(scan, consumer, state, older_than, limit):
            yield record

    async def counts(self) -> Mapping[tuple[str, State], int]:
        """How many records each consumer has in each state."""
        return await asyncio.to_thread(self._ledger.counts)

    async def tallies(self) -> Mapping[tuple[str, State], Tally]:
        """What each consumer's records in each state add up to."""
        return await asyncio.to_thread(self._ledger.tallies)

    async def size(self) -> int | None:
        """The bytes that the records take up, where the store can tell."""
        return await asyncio.to_thread(self._ledger.size)

    async def problems(self) -> Sequence[str]:
        """What is wrong with the schema or the settings of the store, a sentence each."""
        return await asyncio.to_thread(self._ledger.problems)

    # ---- Transactions, deferred messages that wait ---------------------------------------------

    def transaction(self, connection: Any) -> JoinedTransaction:
        """The ledger's calls inside the caller's own transaction, for `async with`."""
        return self._ledger.transaction(connection)

    async def backlog(self) -> Backlog:
        """What deferred messages wait to be sent."""
        return await asyncio.to_thread(self._ledger.backlog)

    async def send_again(self) -> int:
        """Let the deferred messages that were set aside be sent after all."""
        return await asyncio.to_thread(self._ledger.send_again)

    async def wait_for_deferred(self, timeout: Duration) -> None:  # noqa: ASYNC109 - as Ledger's.
        """Return as soon as messages may have been deferred; a thread waits as long."""
        await asyncio.to_thread(self._ledger.wait_for_deferred, timeout)

    # ---- For operators -------------------------------------------------------------------------

    async def migrate(self) -> None:
        """Create or upgrade the schema."""
        await asyncio.to_thread(self._ledger.migrate)

    async def migration_sql(self) -> str:
        """What `migrate` would do now, as SQL."""
        return await asyncio.to_thread(self._ledger.migration_sql)

    async def reset(self, key: Key, *, by: str = "", why: str = "") -> None:
        """Allow a record that has failed or is in doubt to run again."""
        await asyncio.to_thread(self._ledger.reset, key, by=by, why=why)

    async def forget(self, key: Key, *, found: Record | None = None) -> None:
        """Remove a record that nobody works on."""
        await asyncio.to_thread(self._ledger.forget, key, found=found)

    async def purge(
        self,
        older_than: Duration = "30d",
        consumer: str | None = None,
        batch: int = 1_000,
        *,
        on_batch: Callable[[int], None] = lambda _: None,
    ) -> int:
        """Remove old records; `on_batch` is called in another thread."""
        purge = partial(self._ledger.purge, on_batch=on_batch)
        return await asyncio.to_thread(purge, older_than, consumer, batch)

    async def purge_found(self, found: Sequence[Record]) -> set[Key]:
        """Remove those of `found` that are still as they were found."""
        return await asyncio.to_thread(self._ledger.purge_found, found)

    async def purge_steps(self, older_than: Duration, consumer: str | None = None) -> None:
        """Remove steps kept longer ago, of messages that have no record."""
        await asyncio.to_thread(self._ledger.purge_steps, older_than, consumer)

    async def close(self) -> None:
        """Give back connections and threads; a later call opens them again."""
        await asyncio.to_thread(self._ledger.close)


class SteadyLedger(AsyncLedger):
    """An AsyncLedger whose single calls come to their end before a cancelled task hears of that.

    So nothing is under way any more when the task has ended. What it was granted is given back.
    """

    async def _settle_one(self, request: Request) -> Outcome:
        call, stop = await self._to_the_end(request)
        if stop is None:
            return call.value()
        if not isinstance(call.result, Exception) and (undo := to_give_back(call.result)):
            await self._to_the_end(undo)
        raise stop

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """What `function`, which may block, returns."""
        # A future of the executor, and no task: the end of asyncio.run cancels all tasks.
        call = partial(copy_context().run, function, *args)
        done = asyncio.get_running_loop().run_in_executor(None, call)
        stop = None
        while not done.done():
            try:
                await asyncio.shield(done)
            except asyncio.CancelledError as error:
                stop = error
            except Exception:  # noqa: BLE001, S110 - `result` raises it.
                pass
        result = done.result()
        if stop is not None:
            raise stop
        return result

    async def _to_the_end(
        self, request: Request
    ) -> tuple["_TaskCall", asyncio.CancelledError | None]:
        call = _tasks_here(self._batcher).call(request)
        stop = None
        while call.phase is not Phase.DONE:
            try:
                await call.future
            except asyncio.CancelledError as error:
                stop = error
                call.future = asyncio.get_running_loop().create_future()
            except GeneratorExit:
                self._batcher.abandon(call)
                raise
        return call, stop


class _TaskCall(Call[Request, Outcome]):
    """A call for which a task waits."""

    __slots__ = ("_tasks", "future")

    def __init__(self, request: Request, future: "asyncio.Future[None]", tasks: "_Tasks") -> None:
        super().__init__(request)
        self.future = future
        self._tasks = tasks

    def tell(self, posts: Posts) -> None:
        posts.setdefault(self._tasks, []).append(self)


class _Tasks:
    """The tasks of one event loop: their calls go to the batcher together, and come back so."""

    def __init__(self, loop: asyncio.AbstractEventLoop, batcher: Batcher[Request, Outcome]) -> None:
        self.loop = loop
        self._batcher = batcher
        self._calls: list[_TaskCall] = []
        self._watches = False

    def call(self, request: Request) -> _TaskCall:
        if not self._calls:
            # Once the tasks that can run now have all had their turn.
            self.loop.call_soon(self._hand_over)
        call = _TaskCall(request, self.loop.create_future(), self)
        self._calls.append(call)
        return call

    def post(self, calls: list[_TaskCall]) -> bool:
        try:
            self.loop.call_soon_threadsafe(_wake, calls)
        except RuntimeError:  # The loop is closed.
            return False
        return True

    def _hand_over(self) -> None:
        calls, self._calls = self._calls, []
        self._watch_while(self._batcher.submit(calls))

    def _watch_while(self, some_wait: bool) -> None:
        if some_wait and not self._watches:
            self._watches = True
            self.loop.call_later(STALL_S, self._push)

    def _push(self) -> None:
        self._watches = False
        self._watch_while(self._batcher.push())


def _wake(calls: Sequence[_TaskCall]) -> None:
    for call in calls:
        if not call.future.done():
            call.future.set_result(None)


def _tasks_here(batcher: Batcher[Request, Outcome]) -> _Tasks:
    """Those of the event loop that runs in this thread, of every AsyncLedger over one ledger."""
    loop = asyncio.get_running_loop()
    tasks: _Tasks | None = getattr(batcher.here, "tasks", None)
    if tasks is None or tasks.loop is not loop:
        tasks = batcher.here.tasks = _Tasks(loop, batcher)
    return tasks


class _Claiming:
    """One `claim_many`, whose claims are given back when its task goes away meanwhile."""

    def __init__(
        self, call: Callable[[], list[ClaimOutcome]], batcher: Batcher[Request, Outcome]
    ) -> None:
        self._call = call
        self._batcher = batcher
        self._lock = threading.Lock()
        self._outcomes: list[ClaimOutcome] = []
        self._gone = False

    def run(self) -> list[ClaimOutcome]:
        outcomes = self._call()
        with self._lock:
            self._outcomes = outcomes
            gone = self._gone
        if gone:
            self._batcher.give_back(outcomes)
        return outcomes

    def abandon(self) -> None:
        with self._lock:
            self._gone = True
            outcomes = self._outcomes
        self._batcher.give_back(outcomes)
