"""Tools for tests of the ledger: a clock moved by hand, a race."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

T = TypeVar("T")

_DEADLINE_S = 30.0


class AdvancingClock(Protocol):
    """A clock that a test can move. How the store reads it is the store's own matter."""

    def advance(self, seconds: float) -> None:
        """Let that much time pass for the store."""


class ManualClock:
    """A clock that stands still until it is moved; hand it to a store as its `clock`."""

    def __init__(self, now: float = 1_700_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        """Seconds since 1970."""
        return self.now

    def advance(self, seconds: float) -> None:
        """Let that much time pass."""
        self.now += seconds


def at_once(runners: int, call: Callable[[int], T]) -> list[T]:
    """The results of `call(0)`, `call(1)`, ..., which threads start at the same time."""
    start = threading.Barrier(runners, timeout=_DEADLINE_S)

    def run(number: int) -> T:
        start.wait()
        return call(number)

    with ThreadPoolExecutor(runners) as pool:
        return list(pool.map(run, range(runners), timeout=_DEADLINE_S))
