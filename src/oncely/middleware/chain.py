"""Middleware: what stands around a handler, and the chain that is made of it."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import groupby
from typing import Any, Protocol, runtime_checkable

from oncely.core.errors import ConfigError
from oncely.core.message import Message
from oncely.lifecycle.wrapping import ended, is_async, name_of
from oncely.middleware.threads import Back, Threads

CallNext = Callable[[Message], Any]
"""Goes on with a message: returns the result or, in async middleware, an awaitable of it."""


class BothWays(ABC):
    """Middleware for handlers of both kinds: the chain calls the method that fits."""

    @abstractmethod
    def run(self, message: Message, call_next: CallNext) -> Any:
        """Stand around a handler that is not async."""

    @abstractmethod
    async def run_async(self, message: Message, call_next: CallNext) -> Any:
        """Stand around an async one."""


class Around(BothWays):
    """Middleware that has something to do before and after, the same both ways."""

    @abstractmethod
    def around(self, message: Message) -> AbstractContextManager[Any]:
        """What is entered before, and left after."""

    def run(self, message: Message, call_next: CallNext) -> Any:  # noqa: D102
        with self.around(message):
            return call_next(message)

    async def run_async(self, message: Message, call_next: CallNext) -> Any:  # noqa: D102
        with self.around(message):
            return await call_next(message)


@runtime_checkable
class Choosy(Protocol):
    """Middleware that cannot stand around every handler."""

    def check_handler(self, handler: Callable[..., Any]) -> None:
        """Raise ConfigError where it cannot stand around `handler`."""


@runtime_checkable
class Stoppable(Protocol):
    """Middleware that may wait in a thread before it goes on."""

    def stop(self) -> None:
        """End all waiting at once, by asyncio.CancelledError: nothing of these has begun."""


Middleware = Callable[[Message, CallNext], Any] | BothWays
"""A function of a message and of what goes on with it, sync or async; it returns the result."""

_Step = Callable[[Message, CallNext], Any]


def chained(middlewares: Sequence[Middleware], last: CallNext) -> CallNext:
    """`last` with `middlewares` around it, the first outermost.

    Raises ConfigError where one of them cannot be meant, or is async.
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
    """As `chained`, to be awaited; what is not async runs in a thread, its neighbours that are not
    in the same one.

    Cancelling reaches what is awaited inside. The end of a thread is awaited all the same, and
    where it comes to a result, that is the result.
    """
    for middleware in middlewares:
        check(middleware, last)
    call = last
    steps = [*map(_awaited, middlewares)]
    if not is_async(last):
        # A step like the others: it runs in the thread of its neighbours.
        steps.append(lambda message, _: ended(last, message))
    for on_loop, group in groupby(reversed(steps), is_async):
        if on_loop:
            for step in group:
                call = _link(step, call)
        else:
            call = _in_threads([*group][::-1], call)
    return call


def check(middleware: Any, last: CallNext) -> None:
    """Raise ConfigError where `middleware` cannot be meant, or cannot stand around `last`."""
    if isinstance(middleware, type):
        raise ConfigError(f"middleware {middleware.__name__} is a class; write a call of it")
    if isinstance(middleware, Choosy):
        middleware.check_handler(last)
    if callable(middleware):
        _check_function(middleware)
    elif not isinstance(middleware, BothWays):
        kind = type(middleware).__name__
        raise ConfigError(f"middleware: {kind} is not a function of (message, call_next)")


def _check_function(middleware: _Step) -> None:
    name = name_of(middleware)
    if inspect.isgeneratorfunction(middleware) or inspect.isasyncgenfunction(middleware):
        raise ConfigError(
            f"middleware {name} is a generator; write `return call_next(message)` for its `yield`"
        )
    try:
        signature = inspect.signature(middleware)
    except ValueError:
        return  # What is written in C may not tell.
    try:
        signature.bind(None, None)
    except TypeError:
        raise ConfigError(
            f"middleware {name} takes {signature}; write `def {name}(message, call_next):`"
        ) from None


# ---- Steps: every part of a chain as a function of a message and of what goes on ---------------


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
                f"middleware {name_of(step)} returned what it was to await; "
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
    """Steps that are not async, in one thread, as what can be awaited."""
    threads = Threads()

    async def call(message: Message) -> Any:
        back = Back(call_next)
        return await threads.run(_linked(steps, back), message, cancel=back.cancel)

    return call
