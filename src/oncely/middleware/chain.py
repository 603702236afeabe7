"""Middleware: functions around a handler, and the chain of them."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import groupby
from typing import Any, Protocol, runtime_checkable

from oncely.core.errors import ConfigError
from oncely.core.message import Message
from oncely.lifecycle.wrapping import check_takes, ended, is_async, name_of
from oncely.middleware.threads import Back, Threads

CallNext = Callable[[Message], Any]
"""Calls the rest of the chain: returns the result or, in async middleware, an awaitable of it."""


class BothWays(ABC):
    """Middleware for handlers of both kinds: the chain calls the method that fits."""

    @abstractmethod
    def run(self, message: Message, call_next: CallNext) -> Any:
        """Run around a handler that is not async."""

    @abstractmethod
    async def run_async(self, message: Message, call_next: CallNext) -> Any:
        """Run around an async handler."""


class Around(BothWays):
    """Middleware that is a context manager, the same for both kinds of handlers."""

    @abstractmethod
    def around(self, message: Message) -> AbstractContextManager[Any]:
        """The context in which the rest of the chain runs."""

    def run(self, message: Message, call_next: CallNext) -> Any:  # noqa: D102
        with self.around(message):
            return call_next(message)

    async def run_async(self, message: Message, call_next: CallNext) -> Any:  # noqa: D102
        with self.around(message):
            return await call_next(message)


@runtime_checkable
class Stoppable(Protocol):
    """Middleware that may wait in a thread before it calls the rest of the chain."""

    def stop(self) -> None:
        """End all waits at once, by asyncio.CancelledError: their handlers have not begun."""


Middleware = Callable[[Message, CallNext], Any] | BothWays
"""A function (message, call_next), sync or async, that returns the result."""

_Step = Callable[[Message, CallNext], Any]


def chained(middlewares: Sequence[Middleware], last: CallNext) -> CallNext:
    """`last` with `middlewares` around it, the first outermost.

    Raises ConfigError if one of them is not a middleware, or is async.
    """
    for middleware in middlewares:
        check(middleware, last)
    parts: tuple[Any, ...] = (*middlewares, last)
    for part in filter(is_async, parts):
        what = "handler" if part is last else f"middleware {name_of(part)}"
        raise ConfigError(
            f"{what} is async, and other parts of its chain are not; "
            "write the handler and its middleware as `async def`"
        )
    return _linked([*map(_blocking, middlewares)], partial(ended, last))


def chained_async(
    middlewares: Sequence[Middleware], last: CallNext
) -> Callable[[Message], Awaitable[Any]]:
    """As `chained`, to be awaited. Parts that are not async run in a thread, neighbours in the same
    thread.

    Cancelling cancels what is awaited inside. The end of a thread is awaited in any case; if it
    returns a result, that is the result.
    """
    for middleware in middlewares:
        check(middleware, last)
    call = last
    steps = [*map(_awaited, middlewares)]
    if not is_async(last):
        # The handler is a step like the others: it runs in the thread of its neighbours.
        steps.append(lambda message, _: ended(last, message))
    for on_loop, group in groupby(reversed(steps), is_async):
        if on_loop:
            for step in group:
                call = _link(step, call)
        else:
            call = _in_threads([*group][::-1], call)
    return call


def check(middleware: Any, last: CallNext) -> None:
    """Raise ConfigError if `middleware` is not one, or does not work around `last`."""
    if isinstance(middleware, type):
        raise ConfigError(f"middleware {middleware.__name__} is a class; write a call of it")
    if hasattr(middleware, "check_handler"):
        middleware.check_handler(last)
    if callable(middleware):
        if inspect.isgeneratorfunction(middleware) or inspect.isasyncgenfunction(middleware):
            raise ConfigError(
                f"middleware {name_of(middleware)} is a generator; "
                "write `return call_next(message)` for its `yield`"
            )
        check_takes(middleware, "middleware", ("message", "call_next"))
    elif not isinstance(middleware, BothWays):
        kind = type(middleware).__name__
        raise ConfigError(f"middleware: {kind} is not a function of (message, call_next)")


def _blocking(middleware: Middleware) -> _Step:
    step = middleware.run if isinstance(middleware, BothWays) else middleware
    return lambda message, call_next: ended(step, message, call_next)


def _awaited(middleware: Middleware) -> _Step:
    if not isinstance(middleware, BothWays) and not is_async(middleware):
        return _blocking(middleware)
    step = middleware.run_async if isinstance(middleware, BothWays) else middleware

    async def awaited(message: Message, call_next: CallNext) -> Any:
        result = await step(message, call_next)
        if inspect.iscoroutine(result):
            result.close()
            raise ConfigError(
                f"middleware {name_of(step)} returned an awaitable instead of its result; "
                "write `return await call_next(message)`"
            )
        return result

    return awaited


def _linked(steps: Sequence[_Step], call_next: CallNext) -> CallNext:
    for step in reversed(steps):
        call_next = _link(step, call_next)
    return call_next


def _link(step: _Step, call_next: CallNext) -> CallNext:
    return lambda message: step(message, call_next)


def _in_threads(steps: Sequence[_Step], call_next: CallNext) -> CallNext:
    """Steps that are not async, in one thread, as an awaitable function."""
    threads = Threads()

    async def call(message: Message) -> Any:
        back = Back(call_next)
        return await threads.run(_linked(steps, back), message, cancel=back.cancel)

    return call
