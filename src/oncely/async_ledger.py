"""AsyncLedger: the ledger's calls as coroutines. Those of many tasks go to the store together."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

from oncely.batching import STALL_S, Batcher, Call, Phase, Posts
from oncely.core.errors import describe
from oncely.core.policy import Duration, Finding, Policy, lease_seconds
from oncely.core.record import Claim, Key, Record, State
from oncely.core.rules import (
    ClaimOutcome,
    Complete,
    Extend,
    Fail,
    Held,
    MarkHandled,
    Outcome,
    Release,
    WriteOutcome,
)
from oncely.ledger import Ledger
from oncely.request import (
    Request,
    json_value,
    raise_if_fenced,
    renewed,
    to_claim,
    to_give_back,
    to_write,
)
from oncely.stores.base import Tally


class AsyncLedger:
    """The calls of `ledger` as coroutines, for any number of tasks and event loops.

    Each method is the one of Ledger by its name. A task that is cancelled ends at once, and what
    it is granted after that is given back; whatever else it asked for may still be done. The
    loop is never blocked: single calls are carried out by threads of the ledger's own, the
    others by the loop's default executor.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._batcher = ledger._batcher

    # ---- Asking for claims ---------------------------------------------------------------------

    async def claim(
        self,
        key: Key,
        lease: Duration | None = None,
        policy: Policy = Policy(),
        *,
        fingerprint: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        finding: Finding | None = None,
    ) -> ClaimOutcome:
        """Ask for the right to process the message `key` now."""
        [request] = to_claim([key], lease, policy, [fingerprint], metadata, finding)
        return cast(ClaimOutcome, await self._outcome(request))

    async def claim_many(
        self,
        keys: Sequence[Key],
        lease: Duration | None = None,
        policy: Policy = Policy(),
        *,
        fingerprints: Sequence[str | None] | None = None,
        metadata: Mapping[str, Any] | None = None,
        finding: Finding | None = None,
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
            ),
            self._batcher,
        )
        try:
            return await asyncio.to_thread(claiming.run)
        except (asyncio.CancelledError, GeneratorExit):
            claiming.abandon()
            raise

    # ---- With a claim --------------------------------------------------------------------------

    async def handled(self, claim: Claim) -> Claim:
        """The handler has succeeded; deferred messages may still wait."""
        return renewed(claim, await self._written(MarkHandled(claim)))

    async def handled_many(self, claims: Sequence[Claim]) -> list[WriteOutcome]:
        """`handled` for each."""
        return await asyncio.to_thread(self._ledger.handled_many, claims)

    async def complete(self, claim: Claim, result: Any = None) -> None:
        """Nothing is left to do."""
        raise_if_fenced(await self._written(Complete(claim, json_value(result))))

    async def complete_many(
        self, claims: Sequence[Claim], results: Sequence[Any] | None = None
    ) -> list[WriteOutcome]:
        """`complete` for each."""
        return await asyncio.to_thread(self._ledger.complete_many, claims, results)

    async def fail(self, claim: Claim, error: BaseException | str, final: bool = False) -> None:
        """The handler has failed."""
        raise_if_fenced(await self._written(Fail(claim, describe(error), final)))

    async def fail_many(
        self, claims: Sequence[Claim], errors: Sequence[BaseException | str], final: bool = False
    ) -> list[WriteOutcome]:
        """`fail` for each."""
        return await asyncio.to_thread(self._ledger.fail_many, claims, errors, final)

    async def release(self, claim: Claim) -> None:
        """Give the claim back as if it had never been granted."""
        raise_if_fenced(await self._written(Release(claim)))

    async def release_many(self, claims: Sequence[Claim]) -> list[WriteOutcome]:
        """`release` for each."""
        return await asyncio.to_thread(self._ledger.release_many, claims)

    async def extend(self, claim: Claim, lease: Duration) -> Claim:
        """Renew the lease."""
        return renewed(claim, await self._written(Extend(claim, lease_seconds(lease))))

    async def extend_many(self, claims: Sequence[Claim], lease: Duration) -> list[WriteOutcome]:
        """`extend` for each."""
        return await asyncio.to_thread(self._ledger.extend_many, claims, lease)

    async def _written(self, command: Held) -> WriteOutcome:
        return cast(WriteOutcome, await self._outcome(to_write(command)))

    async def _outcome(self, request: Request) -> Outcome:
        call = _tasks_here(self._batcher).call(request)
        try:
            await call.future
        except (asyncio.CancelledError, GeneratorExit):
            self._batcher.abandon(call)
            raise
        return call.value()

    # ---- Looking -------------------------------------------------------------------------------

    async def now(self) -> float:
        """The store's clock, seconds since 1970."""
        return await asyncio.to_thread(self._ledger.now)

    async def find(self, key: Key) -> Record | None:
        """The record of `key`, if there is one."""
        return await asyncio.to_thread(self._ledger.find, key)

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

    async def close(self) -> None:
        """Give back connections and threads; a later call opens them again."""
        await asyncio.to_thread(self._ledger.close)


class SteadyLedger(AsyncLedger):
    """An AsyncLedger whose single calls come to their end before a cancelled task hears of that.

    So nothing is under way any more when the task has ended. What it was granted is given back.
    """

    async def _outcome(self, request: Request) -> Outcome:
        call, stop = await self._to_the_end(request)
        if stop is None:
            return call.value()
        if not isinstance(call.result, Exception) and (undo := to_give_back(call.result)):
            await self._to_the_end(undo)
        raise stop

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
