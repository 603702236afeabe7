"""The clock of this process: how long things take here, and waiting. Tests replace it, and let time
pass for all stores that this process opens.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """The machine's own clock, which never goes back."""

    # Kept here: tests of users that freeze the time replace it in the module `time`. Waiting would
    # never end there, and a lease would seem to be over, or to last for ever.
    monotonic = staticmethod(time.monotonic)
    """Seconds since some fixed moment."""

    def sleep(self, seconds: float) -> None:
        """Return after that many seconds."""
        time.sleep(seconds)

    async def pause(self, seconds: float) -> None:
        """As `sleep`, in a task of asyncio."""
        import asyncio  # Programs without tasks do not need it.

        await asyncio.sleep(seconds)

    def wait(self, event: threading.Event, seconds: float) -> bool:
        """Return when `event` is set, or after that many seconds; whether it is set."""
        return event.wait(seconds)


_clock = Clock()


def monotonic() -> float:
    """Seconds since some fixed moment."""
    return _clock.monotonic()


def sleep(seconds: float) -> None:
    """Return after that many seconds."""
    _clock.sleep(seconds)


async def pause(seconds: float) -> None:
    """As `sleep`, in a task of asyncio."""
    await _clock.pause(seconds)


def wait(event: threading.Event, seconds: float) -> bool:
    """Return when `event` is set, or after that many seconds; whether it is set."""
    return _clock.wait(event, seconds)


@contextmanager
def replaced_by(clock: Clock) -> Iterator[None]:
    """Inside the block, all code of this process goes by `clock`."""
    global _clock  # noqa: PLW0603 - for the whole process, on purpose.
    former, _clock = _clock, clock
    try:
        yield
    finally:
        _clock = former


_passed_s = 0.0
"""The time that a test has let pass for stores."""


def pass_for_stores(seconds: float) -> None:
    """Let so many seconds pass at once for every store in this process, and in those it forks."""
    global _passed_s  # noqa: PLW0603 - for the whole process, on purpose.
    _passed_s += seconds


def undo_passing() -> None:
    """Every store goes by its own clock again."""
    global _passed_s  # noqa: PLW0603 - as above.
    _passed_s = 0.0


def moved_time() -> float | None:
    """The time for stores, in seconds since 1970, where a test has let some pass; None where none
    has: a store goes by its own clock then.
    """
    return time.time() + _passed_s if _passed_s else None


def wall_time() -> float:
    """The time for a store that has no clock of its own, in seconds since 1970."""
    return time.time() + _passed_s
