"""Handlers in transactions, each with its claim: tried again where they lose."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any, Protocol, TypeVar

from oncely.async_ledger import SteadyLedger
from oncely.claiming.async_calls import AsyncCalls
from oncely.claiming.inbox import Inbox
from oncely.claiming.inline import InlineCalls, run_inline
from oncely.core.errors import EndedError
from oncely.crashpoints import reached
from oncely.handling.around import Asked, Handling
from oncely.handling.held_message import HeldMessage
from oncely.handling.work import JoinedWork
from oncely.ledger import Ledger

T = TypeVar("T")

_TRIES = 20
"""How often a transaction may lose against others before that is an error."""
_LONGEST_WAIT_S = 0.5


class Begins(Protocol):
    """A SQLAlchemy Engine or sessionmaker."""

    def begin(self) -> AbstractContextManager[Any]:
        """A connection or session in a transaction, which is committed in the end."""


class AsyncBegins(Protocol):
    """A SQLAlchemy AsyncEngine or async_sessionmaker."""

    def begin(self) -> AbstractAsyncContextManager[Any]:
        """As Begins, for `async with`."""


def run(handling: Handling, source: Begins, asked: Asked, call: Callable[[Any], Any]) -> Any:
    """What `call` returns, given a connection of `source`; or what a duplicate gets.

    Raises as a function under `once` does.
    """
    work = JoinedWork(handling, asked)

    def transact() -> Any:
        nonlocal work
        work = JoinedWork(handling, asked)
        with (
            source.begin() as connection,
            handling.ledger.transaction(connection) as inbox,
            work.join(InlineCalls(inbox)),
        ):
            if work.is_new:
                work.result = call(connection)
        reached("after_commit")
        return work.result

    try:
        return retried(handling.ledger, transact)
    except Exception as error:
        run_inline(_record(handling, InlineCalls(handling.ledger), work, error))
        raise


def retried(ledger: Ledger, transact: Callable[[], T]) -> T:
    """What `transact`, a transaction with `ledger` in it, returns: again where it only loses."""
    for wait_s in _waits_s():
        try:
            return transact()
        except Exception as error:
            if not _lost(ledger, error, wait_s):
                raise
        time.sleep(wait_s)
    raise AssertionError("after the last try it was raised")


async def run_async(
    handling: Handling, source: AsyncBegins, asked: Asked, call: Callable[[Any], Awaitable[Any]]
) -> Any:
    """As `run`, with an async engine or sessionmaker."""
    for wait_s in _waits_s():
        work = JoinedWork(handling, asked)
        try:
            async with (
                source.begin() as connection,
                handling.ledger.transaction(connection) as inbox,
                work.join(inbox),
            ):
                if work.is_new:
                    work.result = await call(connection)
            reached("after_commit")
            return work.result
        except Exception as error:
            if not _lost(handling.ledger, error, wait_s):
                await _record(handling, SteadyLedger(handling.ledger), work, error)
                raise
        await asyncio.sleep(wait_s)
    raise AssertionError("after the last try it was raised")


def _waits_s() -> Iterator[float]:
    """How long to wait after each try; zero after the last."""
    for lost in range(_TRIES - 1):
        yield min(0.01 * 2**lost, _LONGEST_WAIT_S) * random.uniform(0.5, 1.0)  # noqa: S311
    yield 0.0


def _lost(ledger: Ledger, error: Exception, wait_s: float) -> bool:
    """Whether the transaction only lost against another, and is to be tried again."""
    return wait_s > 0 and ledger.is_contention(error)


async def _record(
    handling: Handling, calls: AsyncCalls, work: JoinedWork, error: Exception
) -> None:
    """Record what the handler did wrong; what the database did is no fault of the message."""
    if work.claim is not None and (work.failed or isinstance(error, EndedError)):
        await handling.record_rolled_back(calls, work.asked, error)


def complete_many(
    inbox: Inbox, held: Sequence[HeldMessage], results: Sequence[Any] | None = None
) -> None:
    """The handlers of these have succeeded: store that, with their results where any are kept, and
    with what they have sent.
    """
    claims = [each.claim for each in held]
    deferred = [each.end() for each in held]
    reached("before_completed")
    if any(deferred):
        inbox.handled_many(claims, results, deferred)
        inbox.finish(
            [each.claim.key for each, sent in zip(held, deferred, strict=True) if not sent]
        )
    else:
        inbox.complete_many(claims, results)
    reached("after_completed")
