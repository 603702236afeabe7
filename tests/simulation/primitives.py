"""What stands for the standard library's clocks, threads and locks while a simulation runs."""

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from tests.simulation.scheduler import Killed, Scheduler, SimulatedTask

EPOCH = 1_700_000_000.0
"""When every simulation begins, in seconds since 1970."""

OnThreadError = Callable[[str, BaseException], None]


class SimulatedLock:
    """As threading.Lock; with `reentrant`, as RLock."""

    def __init__(self, scheduler: Scheduler, *, reentrant: bool = False) -> None:
        self._scheduler = scheduler
        self._reentrant = reentrant
        self._owner: SimulatedTask | None = None
        self._depth = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        current = self._scheduler.current
        if self._depth and not (self._reentrant and self._owner is current):
            limit_s = None if blocking and timeout < 0 else max(timeout, 0.0)
            if not blocking or not self._scheduler.wait(lambda: not self._depth, limit_s):
                return False
        self._owner = current
        self._depth += 1
        return True

    def release(self) -> None:
        current = self._scheduler.current
        if self._depth:
            self._depth -= 1
        elif current is None or not current.process.is_dead:
            raise RuntimeError("release unlocked lock")

    def locked(self) -> bool:
        return self._depth > 0

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class SimulatedEvent:
    """As threading.Event."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        return self._scheduler.wait(self.is_set, timeout)


class SimulatedStopEvent(SimulatedEvent):
    """As StopEvent of oncely."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        self.on_asked: Callable[[], object] = lambda: None


class SimulatedCondition:
    """As threading.Condition."""

    def __init__(self, scheduler: Scheduler, lock: SimulatedLock | None = None) -> None:
        self._scheduler = scheduler
        self._lock = lock or SimulatedLock(scheduler, reentrant=True)
        self._waiting: list[list[bool]] = []

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        told = [False]
        self._waiting.append(told)
        self._lock.release()
        try:
            return self._scheduler.wait(lambda: told[0], timeout)
        finally:
            if told in self._waiting:
                self._waiting.remove(told)
            with contextlib.suppress(Killed):
                self._lock.acquire()

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        until = None if timeout is None else self._scheduler.now + timeout
        while not predicate():
            left_s = None if until is None else until - self._scheduler.now
            if (left_s is not None and left_s <= 0) or self._scheduler.current is None:
                return predicate()
            self.wait(left_s)
        return True

    def notify(self, n: int = 1) -> None:
        for told in self._waiting[:n]:
            told[0] = True
        del self._waiting[:n]

    def notify_all(self) -> None:
        self.notify(len(self._waiting))


class SimulatedQueue:
    """As queue.SimpleQueue."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._items: deque[Any] = deque()

    def put(self, item: Any) -> None:
        self._items.append(item)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        if not self._items and block:
            self._scheduler.wait(lambda: bool(self._items), timeout)
        if not self._items:
            raise queue.Empty
        return self._items.popleft()

    def get_nowait(self) -> Any:
        return self.get(block=False)

    def empty(self) -> bool:
        return not self._items


class SimulatedThread:
    """As threading.Thread: it belongs to the process that starts it, and ends with it."""

    def __init__(
        self,
        threads: "SimulatedThreads",
        *,
        target: Callable[..., object],
        name: str = "thread",
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        daemon: bool | None = None,
    ) -> None:
        self._threads = threads
        self._call = partial(target, *args, **(kwargs or {}))
        self.name = name
        self._task: SimulatedTask | None = None

    def start(self) -> None:
        scheduler = self._threads.scheduler
        if scheduler.current is None:
            raise RuntimeError("only a simulated process starts threads in a simulation")
        scheduler.check()
        self._task = scheduler.spawn(scheduler.current.process, self._run, self.name)
        self._task.thread = self

    def _run(self) -> None:
        try:
            self._call()
        except Killed:
            raise
        except BaseException as error:  # noqa: BLE001 - whoever judges is told.
            self._threads.on_error(self.name, error)

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.is_over

    def join(self, timeout: float | None = None) -> None:
        self._threads.scheduler.wait(lambda: not self.is_alive(), timeout)


class SimulatedFuture(Future[Any]):
    """As concurrent.futures.Future; while a thread waits for it, the simulation goes on."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__()
        self._scheduler = scheduler

    def result(self, timeout: float | None = None) -> Any:
        self._scheduler.wait(self.done, timeout)
        return super().result(0)


class SimulatedPool:
    """As concurrent.futures.ThreadPoolExecutor."""

    def __init__(
        self, threads: "SimulatedThreads", max_workers: int = 1, thread_name_prefix: str = "pool"
    ) -> None:
        self._threads = threads
        self._most = max_workers
        self._name = thread_name_prefix
        self._started: list[SimulatedThread] = []
        self._calls = SimulatedQueue(threads.scheduler)

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> SimulatedFuture:
        future = SimulatedFuture(self._threads.scheduler)
        self._calls.put((future, partial(function, *args, **kwargs)))
        if len(self._started) < self._most:
            thread = self._threads.Thread(target=self._work, name=self._name)
            self._started.append(thread)
            thread.start()
        return future

    def shutdown(self, wait: bool = True) -> None:
        for _ in self._started:
            self._calls.put(None)
        for thread in self._started if wait else ():
            thread.join()

    def _work(self) -> None:
        while (item := self._calls.get()) is not None:
            future, call = item
            try:
                future.set_result(call())
            except Killed:
                raise
            except BaseException as error:  # noqa: BLE001 - the waiting thread gets it.
                future.set_exception(error)


class SimulatedThreads:
    """As the module `threading`, and what else makes threads."""

    def __init__(self, scheduler: Scheduler, on_error: OnThreadError) -> None:
        self.scheduler = scheduler
        self.on_error = on_error
        self.Lock = partial(SimulatedLock, scheduler)
        self.RLock = partial(SimulatedLock, scheduler, reentrant=True)
        self.Event = partial(SimulatedEvent, scheduler)
        self.StopEvent = partial(SimulatedStopEvent, scheduler)
        self.Condition = partial(SimulatedCondition, scheduler)
        self.Thread = partial(SimulatedThread, self)
        self.SimpleQueue = partial(SimulatedQueue, scheduler)
        self.ThreadPoolExecutor = partial(SimulatedPool, self)

    def get_ident(self) -> int:
        return 0 if self.scheduler.current is None else self.scheduler.current.ident

    def main_thread(self) -> SimulatedTask | threading.Thread:
        current = self.scheduler.current
        main = None if current is None else current.process.main
        return threading.main_thread() if main is None else main

    def current_thread(self) -> Any:
        current = self.scheduler.current
        return threading.current_thread() if current is None else current.thread or current

    def start_new_thread(self, function: Callable[..., object], args: Sequence[Any]) -> None:
        self.Thread(target=function, args=args).start()

    def __getattr__(self, name: str) -> Any:
        return getattr(threading, name)


class SimulatedTime:
    """As the module `time`: each process has clocks of its own."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def time(self) -> float:
        # Wrong by hours, perhaps.
        current = self._scheduler.current
        offset_s = 0.0 if current is None else current.process.wall_offset_s
        return EPOCH + self._scheduler.now + offset_s

    def monotonic(self) -> float:
        current = self._scheduler.current
        offset_s = 0.0 if current is None else current.process.monotonic_offset_s
        return self._scheduler.now + offset_s

    perf_counter = monotonic

    def sleep(self, seconds: float) -> None:
        self._scheduler.sleep(seconds)

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)
