"""The clock of this process: how long things take here, and waiting. Tests replace it."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """The machine's own clock, which never goes back."""

    def monotonic(self) -> float:
        """Seconds since any moment."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Return after so long."""
        time.sleep(seconds)

    async def pause(self, seconds: float) -> None:
        """As `sleep`, in a task of asyncio."""
        import asyncio  # Programs without tasks do not need it.

        await asyncio.sleep(seconds)

    def wait(self, event: threading.Event, seconds: float) -> bool:
        """Return when `event` is set, at the latest after so long; whether it is."""
        return event.wait(seconds)


_clock = Clock()


def monotonic() -> float:
    """Seconds since any moment."""
    return _clock.monotonic()


def sleep(seconds: float) -> None:
    """Return after so long."""
    _clock.sleep(seconds)


async def pause(seconds: float) -> None:
    """As `sleep`, in a task of asyncio."""
    await _clock.pause(seconds)


def wait(event: threading.Event, seconds: float) -> bool:
    """Return when `event` is set, at the latest after so long; whether it is."""
    return _clock.wait(event, seconds)


@contextmanager
def replaced_by(clock: Clock) -> Iterator[None]:
    """Let everybody in this process go by `clock` meanwhile."""
    global _clock  # noqa: PLW0603 - for the whole process, on purpose.
    former, _clock = _clock, clock
    try:
        yield
    finally:
        _clock = former
