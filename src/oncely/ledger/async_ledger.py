"""AsyncLedger: the ledger's calls as coroutines. Those of many tasks go to the store together."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from contextvars import copy_context
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from oncely.core.commands import ClaimOutcome, Command, Outcome
from oncely.core.errors import ConfigError
from oncely.core.record import Record
from oncely.ledger.arguments import to_give_back
from oncely.ledger.async_calls import AsyncCalls, awaited
from oncely.ledger.driver import Driver
from oncely.ledger.group_commit import Call, GroupCommit
from oncely.ledger.inbox import JoinedTransaction
from oncely.ledger.ledger import Ledger
from oncely.ledger.mailbox import LedgerMailbox
from oncely.stores.store import KeyRange, Wanted

T = TypeVar("T")
P = ParamSpec("P")


def running_loop() -> asyncio.AbstractEventLoop:
    """The loop that runs in this thread. Raises ConfigError where none does, as under trio."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise ConfigError(
            "async: no event loop of asyncio runs here; write asyncio.run(main()), or under trio "
            "call one that is not async: await trio.to_thread.run_sync(function)"
        ) from None


def _giving_back(
    claim_many: Callable[Concatenate[Ledger, P], Sequence[ClaimOutcome]],
) -> Callable[Concatenate["AsyncLedger", P], Coroutine[Any, Any, Sequence[ClaimOutcome]]]:
    """`awaited`; the claims of a task that is cancelled before its answer are given back."""

    @wraps(claim_many)
    async def method(
        self: "AsyncLedger", /, *args: P.args, **kwargs: P.kwargs
    ) -> Sequence[ClaimOutcome]:
        claimed: Future[Sequence[ClaimOutcome]] = Future()

        def claim() -> Sequence[ClaimOutcome]:
            claimed.set_result(claim_many(self._ledger, *args, **kwargs))
            return claimed.result()

        try:
            return await AsyncLedger.run(self, claim)
        except (asyncio.CancelledError, GeneratorExit):
            # At once where they are granted already, else by the thread that asks for them.
            claimed.add_done_callback(lambda done: self._group_commit.give_back(done.result()))
            raise

    return method


def _listed(
    call: Callable[Concatenate[Ledger, P], Iterator[T]],
) -> Callable[Concatenate["AsyncLedger", P], AsyncIterator[T]]:
    """The call of that name for `async for`, with the same arguments; all is read at once."""

    @wraps(call)
    async def method(self: "AsyncLedger", /, *args: P.args, **kwargs: P.kwargs) -> AsyncIterator[T]:
        for each in await self.run(lambda: [*call(self._ledger, *args, **kwargs)]):
            yield each

    return method


class AsyncLedger(AsyncCalls):
    """The calls of `ledger` as coroutines, for any number of tasks and event loops.

    Each method is the one of Ledger by its name. A task that is cancelled ends at once: a claim
    that it is granted after that is given back, and anything else that it asked for may still be
    done. The loop is never blocked: single calls are carried out by threads of the ledger's own,
    the others by the loop's default executor.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._calls = self._ledger = ledger
        self._group_commit = ledger._group_commit

    @property
    def mailbox(self) -> LedgerMailbox:
        """The messages that wait. Its calls block: hand them to `run`."""
        return self._ledger.mailbox

    async def _settle_one(self, command: Command) -> Outcome:
        running_loop()
        call, done = _asked(self._group_commit, command)
        try:
            await done
        except BaseException:
            self._group_commit.abandon(call)
            raise
        return call.outcome()

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """What `function`, which may block, returns: called in a thread of the loop's executor."""
        running_loop()
        return await asyncio.to_thread(function, *args)

    claim_many = _giving_back(Ledger.claim_many)

    now = awaited(Ledger.now)
    find_many = awaited(Ledger.find_many)
    key_ranges = awaited(Ledger.key_ranges)

    async def read(
        self, keys: KeyRange = KeyRange(), wanted: Wanted = Wanted()
    ) -> AsyncIterator[Sequence[Record]]:
        """The records of a range that are wanted, page by page, for `async for`."""
        pages = self._ledger.read(keys, wanted)
        while (page := await self.run(next, pages, None)) is not None:
            yield page

    scan = _listed(Ledger.scan)
    counts = awaited(Ledger.counts)
    of_message = awaited(Ledger.of_message)
    tallies = awaited(Ledger.tallies)
    window = awaited(Ledger.window)
    size = awaited(Ledger.size)
    problems = awaited(Ledger.problems)
    check_privileges = awaited(Ledger.check_privileges)
    dead = _listed(Ledger.dead)
    waiting = _listed(Ledger.waiting)

    def transaction(self, connection: Any) -> JoinedTransaction:
        """The ledger's calls inside the caller's own transaction, for `async with`."""
        return self._ledger.transaction(connection)

    migrate = awaited(Ledger.migrate)
    migration_sql = awaited(Ledger.migration_sql)
    reset = awaited(Ledger.reset)
    happened = awaited(Ledger.happened)
    forget = awaited(Ledger.forget)
    erase = awaited(Ledger.erase)
    end_claim = awaited(Ledger.end_claim)
    retry_dead = awaited(Ledger.retry_dead)
    discard_dead = awaited(Ledger.discard_dead)
    discard = awaited(Ledger.discard)
    keep_retention = awaited(Ledger.keep_retention)
    retentions = awaited(Ledger.retentions)
    purge = awaited(Ledger.purge)
    purge_found = awaited(Ledger.purge_found)
    purge_steps = awaited(Ledger.purge_steps)
    close = awaited(Ledger.close)


class AsyncDriver(Driver):
    """A driver for the tasks of any event loop. What it does ends before a cancelled task gets its
    CancelledError.

    So nothing is under way any more when the task has ended. A claim that it was granted is given
    back.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.calls = ledger
        self._group_commit = ledger._group_commit

    async def settle(self, commands: Sequence[Command]) -> Sequence[Outcome | Exception]:
        """A single command goes together with those of other tasks."""
        if len(commands) == 1:
            running_loop()
            return [await _settled_to_the_end(self._group_commit, commands[0])]
        return await self.run(self.calls._settle_each, commands)

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """What `function`, which may block, returns."""
        # A future of the executor, not a task: the end of asyncio.run cancels all tasks.
        call = partial(copy_context().run, function, *args)
        done = running_loop().run_in_executor(None, call)
        if (stop := await _until_done(done)) is not None:
            # Read, and not used: otherwise asyncio logs that an exception was never retrieved.
            done.exception()
            raise stop
        return done.result()


# ---- Single calls of tasks, in group commit ----------------------------------------------------


async def _settled_to_the_end(group_commit: GroupCommit, command: Command) -> Outcome:
    """The outcome of `command`. A task that is cancelled ends when it is carried out, and what it
    was granted is given back.
    """
    call, done = _asked(group_commit, command)
    try:
        stop = await _until_done(done)
    except BaseException:
        group_commit.abandon(call)
        raise
    if stop is None:
        return call.outcome()
    with suppress(Exception, asyncio.CancelledError):
        if (giving_back := to_give_back(call.outcome())) is not None:
            await _settled_to_the_end(group_commit, giving_back)
    raise stop


async def _until_done(future: "asyncio.Future[Any]") -> asyncio.CancelledError | None:
    """Wait until `future` is done, also where the task is cancelled meanwhile; return the error
    that the task gets for that. The future's own error stays in it.
    """
    stop = None
    while not future.done():
        try:
            await asyncio.shield(future)
        except asyncio.CancelledError as error:
            stop = error
        except Exception:  # noqa: BLE001, S110 - see above.
            pass
    return stop


def _asked(group_commit: GroupCommit, command: Command) -> "tuple[Call, asyncio.Future[None]]":
    loop = asyncio.get_running_loop()
    done = loop.create_future()

    def tell(_: Call) -> None:
        if not done.done():
            done.set_result(None)

    if loop not in group_commit.asked:
        # After all tasks that can run now: a worker that wakes for the first would not see more.
        loop.call_soon(_hand_over, group_commit, loop)
        group_commit.asked[loop] = []
    group_commit.asked[loop].append(asked := (Call(command, tell, loop), done))
    return asked


def _hand_over(group_commit: GroupCommit, loop: asyncio.AbstractEventLoop) -> None:
    asked = group_commit.asked.pop(loop, ())
    group_commit.put(*[call for call, done in asked if not done.cancelled()])
    loop.call_later(group_commit.stall_s, group_commit.hurry)
