"""InlineCalls: a ledger's calls as coroutines that never wait, for functions that are not async.

What surrounds a handler is written once, as coroutines; for a function that is not async they run
from end to end without an event loop.
"""

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, cast

from oncely._util import clock
from oncely.core.commands import Command, Outcome
from oncely.engine.async_calls import AsyncCalls
from oncely.engine.calls import Calls

T = TypeVar("T")


class InlineCalls(AsyncCalls):
    """The calls of `calls`, done in the caller's own thread."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    @property
    def blocking(self) -> "InlineCalls":
        """These."""
        return self

    async def _settle_one(self, command: Command) -> Outcome:
        return self._calls._settle_one(command)

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """What `function` returns."""
        return function(*args)

    async def pause(self, seconds: float) -> None:
        """Return after that many seconds."""
        clock.sleep(seconds)


def run_inline(steps: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that never waits."""
    try:
        steps.send(None)
    except StopIteration as end:
        return cast(T, end.value)
    raise AssertionError("a coroutine that must not wait has waited")
