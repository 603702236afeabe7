"""Threads for the parts of an async chain that are not async."""

import asyncio
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError as FutureCancelled
from contextlib import suppress
from contextvars import copy_context
from queue import SimpleQueue
from typing import Any

from oncely.core.message import Message
from oncely.ledger.async_ledger import running_loop

_Outcome = tuple[Any, BaseException | None]
"""A result or an error. Not as a future: a future changes some errors."""


class Threads:
    """Runs blocking functions, each in a thread, without a limit on their number.

    Unlike an executor of the standard library, its threads do not keep the process from ending,
    and no function waits for a free thread: it might wait for the end of the one that runs there.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._idle = threading.Semaphore(0)
        weakref.finalize(self, self._calls.put, None).atexit = False

    async def run(
        self, function: Callable[..., Any], *args: Any, cancel: Callable[[], None] = lambda: None
    ) -> Any:
        """Run `function` in a thread, in the caller's context; return its result.

        A thread cannot be stopped. If the caller is cancelled, `cancel` is called, which may end
        the wait of the thread. The end of the thread is awaited in any case; if it returns a
        result, that is the result.
        """
        loop = running_loop()
        running: asyncio.Future[_Outcome] = loop.create_future()
        context = copy_context()

        def call() -> None:
            outcome = context.run(_outcome, function, *args)
            # Before the outcome is known: then the next call finds this thread free.
            self._idle.release()
            with suppress(RuntimeError):  # The loop is closed: no task waits any more.
                loop.call_soon_threadsafe(running.set_result, outcome)

        self._calls.put(call)
        if not self._idle.acquire(blocking=False):
            serve = threading.Thread(
                target=_serve, args=(self._calls,), name="oncely-chain", daemon=True
            )
            serve.start()
        while not running.done():
            try:
                await asyncio.wait([running])
            except asyncio.CancelledError:
                cancel()
        return _come_to(running.result())


def _serve(calls: "SimpleQueue[Callable[[], None] | None]") -> None:
    while (call := calls.get()) is not None:
        call()
        # The call refers to its Threads: this thread ends when that is collected.
        del call
    calls.put(None)  # For the next thread.


class Back:
    """Calls the rest of the chain in the loop, from a thread, and waits for it."""

    def __init__(self, call_next: Callable[[Message], Any]) -> None:
        self._call_next = call_next
        self._loop = asyncio.get_running_loop()
        self._running: set[asyncio.Task[Any]] = set()
        self._is_cancelled = False

    def __call__(self, message: Message) -> Any:
        """Call the rest of the chain in the loop, and wait in this thread for the result."""
        called = asyncio.run_coroutine_threadsafe(self._run(message), self._loop)
        try:
            outcome = called.result()
        except FutureCancelled:
            # asyncio's CancelledError is not an Exception: it is not taken for a failure.
            raise asyncio.CancelledError from None
        return _come_to(outcome)

    async def _run(self, message: Message) -> _Outcome:
        if self._is_cancelled:
            raise asyncio.CancelledError
        task: Any = asyncio.current_task()
        self._running.add(task)
        try:
            return await self._call_next(message), None
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 - it is raised in the thread.
            # SystemExit, too: it would end the loop, with all that runs in it.
            return None, error
        finally:
            self._running.discard(task)

    def cancel(self) -> None:
        """Cancel the awaited call, and all later ones; call it in the loop."""
        self._is_cancelled = True
        for task in self._running:
            task.cancel()


def _outcome(function: Callable[..., Any], *args: Any) -> _Outcome:
    try:
        return function(*args), None
    except BaseException as error:  # noqa: BLE001 - it is raised where the thread is awaited.
        return None, error


def _come_to(outcome: _Outcome) -> Any:
    result, error = outcome
    if error is not None:
        raise error
    return result
