"""Handlers in transactions with their claims: repeated where a transaction loses against others."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from oncely._util.crash_points import reached
from oncely._util.event_log import EventLog
from oncely._util.pauses import pause_s
from oncely.core.errors import EndedError, StoreUnavailable
from oncely.core.record import Claim
from oncely.core.rules import is_newest
from oncely.core.turn import Progress, Turn, after_end, leaves_doubt
from oncely.ledger.async_ledger import running_loop
from oncely.ledger.driver import Driver, SyncDriver, run_inline
from oncely.ledger.inbox import AsyncInboxDriver
from oncely.lifecycle.lifecycle import Lifecycle
from oncely.lifecycle.work import JoinedWork

_log = EventLog(__name__)

_TRIES = 20
"""How often a transaction may lose against others before that is an error."""
_BROKEN_OFF = 5
"""How often a transaction may lose its connection once its handler has begun: a server may end
sessions in which nothing happens for less time than the handler takes.
"""
_FIRST_WAIT_S = 0.01
_LONGEST_WAIT_S = 0.5


class TransactionSource(Protocol):
    """A SQLAlchemy Engine or sessionmaker."""

    def begin(self) -> AbstractContextManager[Any]:
        """A connection or session in a transaction, which is committed in the end."""


class AsyncTransactionSource(Protocol):
    """A SQLAlchemy AsyncEngine or async_sessionmaker."""

    def begin(self) -> AbstractAsyncContextManager[Any]:
        """As TransactionSource, for `async with`."""


def run(
    lifecycle: Lifecycle, source: TransactionSource, turn: Turn, call: Callable[[Any], Any]
) -> Any:
    """What `call` returns, given a connection of `source`; or what a duplicate gets.

    Raises as a function under `once` does. The turn's `ending` says what follows.
    """
    tries = _Tries(lifecycle, lifecycle.sync_driver, turn)
    try:
        for wait_s in _waits_s():
            tries.begin()
            try:
                with (
                    source.begin() as connection,
                    lifecycle.ledger.transaction(connection) as inbox,
                    tries.work(SyncDriver(inbox, is_joined=True)) as work,
                ):
                    if work.is_new:
                        work.result = call(connection)
                run_inline(tries.note_committed(work))
                break
            except Exception as error:
                if not tries.has_lost(error, wait_s):
                    raise
            time.sleep(wait_s)
            if run_inline(tries.is_stored()):
                break
    except BaseException as error:
        run_inline(lifecycle.after_rollback(tries.driver, turn, error))
        raise
    lifecycle.keep_retention()
    return tries.result


def run_together(
    lifecycle: Lifecycle,
    source: TransactionSource,
    turns: Sequence[Turn],
    run_all: Callable[[Any, Driver], bool],
) -> bool:
    """Let `run_all` run the handlers of these, given a connection of `source` and its driver, in
    one transaction with their claims. Return whether all are settled: all have succeeded, and that
    is stored; or one has ended the transaction, and all are in doubt. Else the turns are as they
    were, but for those whose error leaves a doubt, which have ended.
    """
    try:
        with (
            source.begin() as connection,
            lifecycle.ledger.transaction(connection) as inbox,
        ):
            driver = SyncDriver(inbox, is_joined=True)
            run_inline(lifecycle.claim(driver, turns))
            if not run_all(connection, driver):
                raise _UndoneError
            run_inline(lifecycle.store_joined(driver, [t for t in turns if t.claim is not None]))
            reached("before_commit")
    except _UndoneError:
        pass
    except EndedError as error:
        _log.info(
            "a handler has ended the transaction of %(count)s messages of '%(consumer)s' itself: "
            "%(reason)s",
            exc_info=True,
            extra={"event": "window_ended", **lifecycle.logged_of(turns)},
        )
        # A handler that has ended the transaction has ended it for all of them.
        if not error.is_undone:
            run_inline(lifecycle.leave_in_doubt(lifecycle.sync_driver, turns, error))
            return True
    except Exception as error:  # noqa: BLE001 - running each alone shows what is wrong.
        if not lifecycle.meets_outage(error):
            _log.info(
                "the transaction of %(count)s messages of '%(consumer)s' was rolled back: "
                "%(reason)s; each message gets its own",
                exc_info=True,
                extra={"event": "window_undone", **lifecycle.logged_of(turns)},
            )
    else:
        lifecycle.note_committed(turns)
        lifecycle.keep_retention()
        return True
    for turn in turns:
        raised = turn.error
        turn.undone()
        has_lost = isinstance(raised, Exception) and lifecycle.ledger.is_contention(raised)
        if raised is not None and not has_lost and leaves_doubt(lifecycle.policy, raised):
            # Run alone now, it might have its effect twice.
            run_inline(lifecycle.record_failure(lifecycle.sync_driver, turn, raised))
    return False


class _UndoneError(Exception):
    """A handler has failed: nothing of the transaction must be stored."""


async def run_async(
    lifecycle: Lifecycle,
    source: AsyncTransactionSource,
    turn: Turn,
    call: Callable[[Any], Awaitable[Any]],
) -> Any:
    """As `run`, with an async engine or sessionmaker."""
    running_loop()  # Else SQLAlchemy raises an error of its own, which helps nobody.
    tries = _Tries(lifecycle, lifecycle.async_driver, turn)
    try:
        for wait_s in _waits_s():
            tries.begin()
            try:
                async with (
                    source.begin() as connection,
                    lifecycle.ledger.transaction(connection) as inbox,
                    tries.work(AsyncInboxDriver(inbox)) as work,
                ):
                    if work.is_new:
                        work.result = await call(connection)
                await tries.note_committed(work)
                break
            except Exception as error:
                if not tries.has_lost(error, wait_s):
                    raise
            await asyncio.sleep(wait_s)
            if await tries.is_stored():
                break
    except BaseException as error:
        await lifecycle.after_rollback(tries.driver, turn, error)
        raise
    await tries.driver.run(lifecycle.keep_retention)
    return tries.result


@dataclass(eq=False)
class _Tries:
    """The tries of one message, each in its own transaction: finds out whether one that broke off
    at its commit is stored after all.
    """

    lifecycle: Lifecycle
    driver: Driver
    turn: Turn
    result: Any = None
    """The result of the last try that came to its commit."""
    _written: Claim | None = None
    """The claim of that try: nobody knows whether it is stored."""
    _work: JoinedWork | None = None
    """What runs in the transaction of this try, once that has begun."""
    _broken_off: int = 0

    def begin(self) -> None:
        """Begin the next try."""
        self.turn.undone()
        self._work = None

    def work(self, driver: Driver) -> JoinedWork:
        """What runs in the transaction of `driver`."""
        self._work = JoinedWork(self.lifecycle, self.turn, driver)
        return self._work

    async def is_stored(self) -> bool:
        """Whether the transaction whose commit was not answered is stored."""
        claim = self._written
        if claim is None:
            return False
        try:
            record = await self.driver.run(self.lifecycle.ledger.find, claim.key)
        except StoreUnavailable:
            return False
        is_stored = record is not None and record.is_handled and is_newest(claim, record)
        if is_stored:
            self.turn.ended_as(after_end(self.lifecycle.policy, claim.attempts, None))
            self.lifecycle.note_committed([self.turn])
        return is_stored

    async def note_committed(self, work: JoinedWork) -> None:
        """A try is committed: its result stays, or that of the try before."""
        # The commit of the try before may have gone on after its record was looked for.
        if work.is_new or not await self.is_stored():
            self.lifecycle.note_committed([self.turn])
            self.result = work.result

    def has_lost(self, error: Exception, wait_s: float) -> bool:
        """Whether a try only lost against others, or its connection, and another may follow."""
        ledger = self.lifecycle.ledger
        if self._work is not None and self._work.is_written:
            self._written, self.result = self.turn.claim, self._work.result
        elif self.turn.progress >= Progress.RUNNING and ledger.is_outage(error):
            self._broken_off += 1
            if self._broken_off == _BROKEN_OFF:
                # It fails as with an error of its own, since the server was there each time.
                self.turn.raised(error)
                return False
        if isinstance(error, StoreUnavailable) and error is not self.turn.error:
            # The connection was lost during the try, and the transaction with it; or it was of no
            # use from the first: ended while it stood idle, say. Its pool has dropped it.
            cause = error.__cause__
            was_useless = isinstance(cause, Exception) and ledger.is_contention(cause)
            return wait_s > 0 and (self.turn.claim is not None or was_useless)
        return wait_s > 0 and ledger.is_contention(error)


def _waits_s() -> Iterator[float]:
    """How long to wait after each try; zero after the last."""
    for lost in range(_TRIES - 1):
        yield pause_s(lost, _FIRST_WAIT_S, _LONGEST_WAIT_S)
    yield 0.0
