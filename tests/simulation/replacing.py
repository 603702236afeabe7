"""While a simulation runs, oncely's modules have its clock, threads and randomness."""

import _thread
import concurrent.futures
import queue
import random
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, cast

from tests.simulation.primitives import SimulatedThreads, SimulatedTime

from oncely._util.chance import CHANCE
from oncely._util.clock import Clock, replaced_by
from oncely._util.signals import StopEvent

_OWN = "oncely.testing"


class _Here:
    """A stand-in for the thread that simulates. All others, which have begun before, have the
    original: one that drew from the simulation's randomness would make it another one.
    """

    def __init__(self, stand_in: Any, original: Any) -> None:
        self._stand_in = stand_in
        self._original = original
        self._thread = threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._seen(), name)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._seen()(*args, **options)

    def _seen(self) -> Any:
        return self._stand_in if threading.get_ident() == self._thread else self._original


class _SimulatedClock(Clock):
    def __init__(self, time_: SimulatedTime) -> None:
        self._time = time_

    def monotonic(self) -> float:
        return self._time.monotonic()


@contextmanager
def replaced(
    time_: SimulatedTime, threads: SimulatedThreads, random_: random.Random
) -> Iterator[None]:
    """Within the block, replace these in every module of oncely that has imported them."""
    by_identity: dict[int, Any] = {
        id(time): time_,
        id(CHANCE): random_,
        id(threading): threads,
        id(StopEvent): threads.StopEvent,
        id(_thread.start_new_thread): threads.start_new_thread,
        id(queue.SimpleQueue): threads.SimpleQueue,
        id(concurrent.futures.ThreadPoolExecutor): threads.ThreadPoolExecutor,
    }
    for name in ("time", "monotonic", "perf_counter", "sleep"):
        by_identity[id(getattr(time, name))] = getattr(time_, name)
    for name in ("Thread", "Event", "Lock", "RLock", "Condition", "get_ident"):
        by_identity[id(getattr(threading, name))] = getattr(threads, name)
    former: list[tuple[ModuleType, str, Any]] = []
    for module in _modules():
        for name, value in list(vars(module).items()):
            stand_in = by_identity.get(id(value))
            if stand_in is not None:
                former.append((module, name, value))
                setattr(module, name, _Here(stand_in, value))
    clock = cast(Clock, _Here(_SimulatedClock(time_), Clock()))
    try:
        with replaced_by(clock):
            yield
    finally:
        for module, name, value in former:
            setattr(module, name, value)


def _modules() -> list[ModuleType]:
    return [
        module
        for name, module in sorted(sys.modules.items())
        if name.partition(".")[0] == "oncely" and not name.startswith(_OWN) and module is not None
    ]
