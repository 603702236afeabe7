"""RateLimited: limits the messages per second, to protect the services that handlers call."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

from oncely.core.errors import ConfigError
from oncely.core.message import Message
from oncely.middleware.chain import BothWays, CallNext


class RateLimited(BothWays):
    """Lets `per_second` messages through on average, and up to `burst` at once after a pause.

    The others wait for their turn, in the order of arrival (a token bucket). One object is one
    limit, for all threads and tasks of the process and for all consumers that use it. Raises
    ConfigError for a rate or a burst that lets nothing through.
    """

    def __init__(
        self,
        per_second: float,
        burst: int = 1,
        *,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[threading.Event, float], bool] = threading.Event.wait,
        sleep: Callable[[float], Awaitable[Any]] = asyncio.sleep,
    ) -> None:
        if not isinstance(per_second, int | float) or not per_second > 0:
            raise ConfigError(f"per_second: {per_second!r} lets nothing through; write 10, or 0.5")
        if type(burst) is not int or burst < 1:
            raise ConfigError(f"burst: {burst!r} is not a whole number of 1 or more")
        self._interval_s = 1 / per_second
        self._ahead_s = (burst - 1) / per_second
        self._clock = clock
        self._wait = wait
        self._sleep = sleep
        self._lock = threading.Lock()
        self._next = clock() - self._ahead_s
        self._stopping = threading.Event()

    def run(self, message: Message, call_next: CallNext) -> Any:  # noqa: D102
        stopping, wait_s = self._take_turn()
        if wait_s > 0 and self._wait(stopping, wait_s):
            raise asyncio.CancelledError
        return call_next(message)

    async def run_async(self, message: Message, call_next: CallNext) -> Any:  # noqa: D102
        _, wait_s = self._take_turn()
        if wait_s > 0:
            await self._sleep(wait_s)
        return await call_next(message)

    def stop(self) -> None:
        """Raise asyncio.CancelledError in all waiting threads; later messages wait again.

        Waiting tasks are ended by cancelling them.
        """
        with self._lock:
            stopping, self._stopping = self._stopping, threading.Event()
        stopping.set()

    def _take_turn(self) -> tuple[threading.Event, float]:
        """The event that ends the wait early, and the length of the wait in seconds."""
        with self._lock:
            now = self._clock()
            # A pause of any length allows at most one burst.
            turn = max(self._next, now - self._ahead_s)
            self._next = turn + self._interval_s
            return self._stopping, turn - now
