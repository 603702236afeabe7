"""Middleware: what stands around a handler, and the chain that is made of it."""

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import CancelledError as FutureCancelled
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from contextvars import copy_context
from itertools import groupby
from typing import Any, Protocol, runtime_checkable

from oncely.core.errors import ConfigError
from oncely.core.message import Message
from oncely.handling.wrapping import ended, is_async, name_of

CallNext = Callable[[Message], Any]
"""Goes on with a message: returns the result or, in async middleware, an awaitable of it."""

_THREADS = 32


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
    return _linked([*map(_blocking, middlewares), _innermost(last)], _nothing)


def chained_async(
    middlewares: Sequence[Middleware], last: CallNext, threads: int = _THREADS
) -> Callable[[Message], Awaitable[Any]]:
    """As `chained`, to be awaited; what is not async runs in a thread.

    Neighbours that are not async share the thread; each such group has up to `threads` of them, so
    that those that wait for an inner group cannot use up what that needs. Cancelling reaches what
    is awaited inside. A thread cannot be stopped: its end is awaited, and where it comes to a
    result all the same, that is the result.
    """
    for middleware in middlewares:
        check(middleware, last)
    call: CallNext = _nothing
    steps = [*map(_awaited, middlewares), _awaited_last(last)]
    for on_loop, group in groupby(reversed(steps), is_async):
        if on_loop:
            for step in group:
                call = _link(step, call)
        else:
            call = _Threads([*group][::-1], call, threads)
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
        raise ConfigError(f"middleware: {kind} is no function of (message, call_next)")


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


def _innermost(last: CallNext) -> _Step:
    return lambda message, _: ended(last, message)


def _awaited_last(last: CallNext) -> _Step:
    if not is_async(last):
        return _innermost(last)

    async def awaited(message: Message, _: CallNext) -> Any:
        return await last(message)

    return awaited


def _nothing(_: Message) -> Any:
    raise AssertionError("nothing stands behind the handler")


def _linked(steps: Iterable[_Step], call_next: CallNext) -> CallNext:
    for step in reversed([*steps]):
        call_next = _link(step, call_next)
    return call_next


def _link(step: _Step, call_next: CallNext) -> CallNext:
    return lambda message: step(message, call_next)


# ---- Threads between coroutines ----------------------------------------------------------------


class _Threads:
    """Steps that are not async, as one that is."""

    def __init__(self, steps: Sequence[_Step], call_next: CallNext, threads: int) -> None:
        self._steps = steps
        self._call_next = call_next
        # Not the loop's own threads: all of those may be waiting for what runs in here.
        self._pool = ThreadPoolExecutor(threads, "oncely-middleware")

    async def __call__(self, message: Message) -> Any:
        back = _Back(self._call_next)
        call = _linked(self._steps, back)
        submitted = self._pool.submit(copy_context().run, _outcome, call, message)
        running = asyncio.wrap_future(submitted)
        while not running.done():
            try:
                await asyncio.wait([running])
            except asyncio.CancelledError:
                if submitted.cancel():
                    raise
                back.cancel()
        return _come_to(running.result())


_Outcome = tuple[Any, BaseException | None]
"""A result, or an error: on their way through futures some errors become others."""


def _outcome(call: CallNext, message: Message) -> _Outcome:
    try:
        return call(message), None
    except BaseException as error:  # noqa: BLE001 - it is raised where the thread is awaited.
        return None, error


def _come_to(outcome: _Outcome) -> Any:
    result, error = outcome
    if error is not None:
        raise error
    return result


class _Back:
    """The way of one message from a thread back to the loop: calls and waits."""

    def __init__(self, call_next: CallNext) -> None:
        self._call_next = call_next
        self._loop = asyncio.get_running_loop()
        self._running: set[asyncio.Task[Any]] = set()
        self._is_cancelled = False

    def __call__(self, message: Message) -> Any:
        called = asyncio.run_coroutine_threadsafe(self._run(message), self._loop)
        try:
            outcome = called.result()
        except FutureCancelled:
            # The other one is no Exception: nobody takes it for a failure.
            raise asyncio.CancelledError from None
        return _come_to(outcome)

    async def _run(self, message: Message) -> _Outcome:
        if self._is_cancelled:
            raise asyncio.CancelledError
        task: Any = asyncio.current_task()
        self._running.add(task)
        try:
            return await self._call_next(message), None
        except Exception as error:  # noqa: BLE001 - it is raised in the thread.
            return None, error
        finally:
            self._running.discard(task)

    def cancel(self) -> None:
        """Cancel what is awaited, and all that comes; to be called in the loop."""
        self._is_cancelled = True
        for task in self._running:
            task.cancel()
