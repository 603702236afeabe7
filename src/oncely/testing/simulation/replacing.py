"""While a simulation runs, oncely's modules have its clock, threads and randomness."""

import concurrent.futures
import queue
import random
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from oncely._util.signals import StopEvent
from oncely.testing.simulation.primitives import SimulatedThreads, SimulatedTime

_OWN = "oncely.testing"


@contextmanager
def replaced(
    time_: SimulatedTime, threads: SimulatedThreads, random_: random.Random
) -> Iterator[None]:
    """Whatever a module of oncely has imported of these is another one meanwhile."""
    by_identity: dict[int, Any] = {
        id(time): time_,
        id(random): random_,
        id(threading): threads,
        id(StopEvent): threads.StopEvent,
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
                setattr(module, name, stand_in)
    try:
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
