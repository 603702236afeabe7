"""Named points in the code at which a test kills the process, to see what a crash there leaves."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

from oncely.core.errors import ConfigError

ENVIRONMENT = "ONCELY_CRASH_POINT"
"""Names a point, as in "after_claim:3": there the process kills itself the third time."""

_armed: dict[str, Callable[[], object]] = {}
_watchers: list[Callable[[str], object]] = []


def reached(name: str) -> None:
    """The point `name` is reached: nothing happens, unless it is armed."""
    for watcher in _watchers:
        watcher(name)
    if _armed and name in _armed:
        _armed[name]()


@contextmanager
def watched_by(watcher: Callable[[str], object]) -> Iterator[None]:
    """Inside the block, call `watcher` with the name of every point that any thread reaches, before
    the action that is armed there.
    """
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


def arm(name: str, action: Callable[[], object]) -> None:
    """Call `action` whenever the point is reached."""
    _armed[name] = action


def kill_at(name: str, nth: int = 1) -> None:
    """Let the process kill itself when the point is reached the `nth` time."""
    times = count(1)

    def kill() -> None:
        if next(times) == nth:
            # No cleaning up, as when the machine is gone.
            os.kill(os.getpid(), signal.SIGKILL)

    arm(name, kill)


def disarm() -> None:
    """Let all points do nothing again."""
    _armed.clear()


def told_point(told: object, where: str) -> tuple[str, int]:
    """The name and the count in a setting such as "after_claim:3".

    Raises ConfigError where it does not name a point; the text begins with `where` it was set.
    """
    name, colon, nth = told.partition(":") if isinstance(told, str) else ("", "", "")
    if not name or (colon and not (nth.isascii() and nth.isdigit() and int(nth))):
        raise ConfigError(
            f'{where}: {told!r} names no point; write "after_claim", or "after_claim:3" '
            "for the third time"
        )
    return name, int(nth or 1)


if ENVIRONMENT in os.environ:
    kill_at(*told_point(os.environ[ENVIRONMENT], ENVIRONMENT))
