"""Driver: how a message's lifecycle reaches a ledger: it settles commands, calls, and pauses.

What surrounds a handler is written once, as coroutines over a driver. For a function that is not
async they run from end to end without an event loop.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar, cast

from oncely._util import clock
from oncely.core.commands import Command, Outcome
from oncely.ledger.ledger_calls import LedgerCalls

T = TypeVar("T")


class Driver(ABC):
    """What a lifecycle needs of a ledger, or of a ledger in a caller's transaction."""

    calls: LedgerCalls
    """What `run` may be given: these may block."""
    is_joined: bool = False
    """Whether it works in a caller's transaction, which keeps other workers away."""
    may_block: bool = True
    """Whether a function that is not async can use the same ledger, by a SyncDriver."""

    @abstractmethod
    async def settle(self, commands: Sequence[Command]) -> Sequence[Outcome | Exception]:
        """One outcome for each, in order; an error that concerns one may stand in its place."""

    @abstractmethod
    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """What `function`, which may block, returns."""

    async def pause(self, seconds: float) -> None:
        """Return after that many seconds."""
        await clock.pause(seconds)


class SyncDriver(Driver):
    """Does everything in the caller's own thread, and never waits for an event loop."""

    def __init__(self, calls: LedgerCalls, *, is_joined: bool = False) -> None:
        self.calls = calls
        self.is_joined = is_joined

    async def settle(self, commands: Sequence[Command]) -> Sequence[Outcome | Exception]:
        """A single command goes together with those of other threads."""
        if len(commands) == 1:
            return [self.calls._settle_one(commands[0])]
        return self.calls._settle_each(commands)

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        return function(*args)

    async def pause(self, seconds: float) -> None:
        clock.sleep(seconds)


def run_inline(steps: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that never waits."""
    try:
        steps.send(None)
    except StopIteration as end:
        return cast(T, end.value)
    raise AssertionError("a coroutine that must not wait has waited")
