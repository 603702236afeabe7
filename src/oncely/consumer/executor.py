"""Executor: runs turns, in threads or, where handlers are async, in an event loop."""

import asyncio
import math
import os
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from contextvars import copy_context
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from oncely._util.clock import monotonic
from oncely._util.event_log import EventLog
from oncely.core.turn import Progress, Turn, TurnState

_log = EventLog(__name__)

_TELL_S = 0.005
"""How long an ended turn may wait for others to be collected together."""
_LEARNS = 0.3
"""The weight of the last observation in the moving average of how long a turn takes."""
_GROWS = 4
_UNTRIED = 64
"""The largest window after only duplicates were seen: a new message may take long."""
_QUICK_S = 0.2
"""A handler faster than this is quick: messages may wait for it, and need no other worker."""
SLOW_S = 3.0
"""A handler slower than this is slow: no message waits for it that another worker may have."""
_WINDOW_S = 0.1
"""A window is handled in about this time: a killed process leaves no more than that in doubt, and
other workers find work while a slow handler runs."""
_CLOSE_S = 1.0
"""How long cancelled tasks may take to end."""

T_Turn = TypeVar("T_Turn", bound=Turn)


class Executor(ABC, Generic[T_Turn]):
    """Runs `count` turns at a time, and reports which have ended. It says how many it can take, by
    how long turns have taken lately: at most `most` together.

    Each turn runs in a copy of the context in which the executor was made: a context variable that
    one handler sets is not there for the next. The threads do not outlive the process, and do not
    keep it from ending.
    """

    is_stopped = False
    """Whether turns that have not started are returned without running."""

    def __init__(self, count: int, most: int = 1) -> None:
        self._count = count
        self._most = most
        self._context = copy_context()
        self._ended: deque[T_Turn] = deque()
        self._bell: SimpleQueue[None] = SimpleQueue()
        """Set when several turns have ended: the collector is not woken for each."""
        self._collect_at = self._ring_at = 0.0
        self._turn_s: float | None = None
        """Seconds that one turn takes."""
        self._window = count
        """How many turns are claimed together."""
        self._quick_at = -math.inf
        """`clock.monotonic()` when the last quick turn ended."""

    # ---- How many it can take ------------------------------------------------------------------

    def room(self, under_way: int) -> int:
        """How many more turns may be taken."""
        if self._turn_s is not None and self._turn_s > SLOW_S:
            return self._count - under_way
        return min(self._window, 2 * self._window - under_way)

    def free(self, under_way: int) -> int:
        """How many more turns would begin soon: as many as there are idle handlers; any number, if
        handlers end quickly.
        """
        are_quick = monotonic() - self._quick_at < _QUICK_S
        return self._most if are_quick else self._count - under_way

    def learn(self, turns: Sequence[T_Turn]) -> None:
        """Learn from the time that these turns have taken."""
        run, sum_s = 0, 0.0
        for turn in turns:
            if turn.took_s < _QUICK_S:
                self._quick_at = monotonic()
            if turn.progress > Progress.WAITING:
                run, sum_s = run + 1, sum_s + turn.took_s
        if not run:
            self._widen(min(self._most, _UNTRIED))
            return
        mean_s = sum_s / run
        before_s = mean_s if self._turn_s is None else self._turn_s
        self._turn_s = before_s + _LEARNS * (mean_s - before_s)
        fitting = math.ceil(self._count * _WINDOW_S / max(self._turn_s, 1e-6))
        if fitting > self._window:
            self._widen(min(self._most, fitting))
        else:
            self._window = max(self._count, fitting)

    def _widen(self, most: int) -> None:
        # Slowly: the first turns may differ from the others.
        self._window = max(self._window, min(most, _GROWS * self._window))

    # ---- Running -------------------------------------------------------------------------------

    @abstractmethod
    def start(self, turns: Sequence[T_Turn]) -> None:
        """Run these turns, in their order as far as possible."""

    @abstractmethod
    def withdraw(self) -> list[T_Turn]:
        """Take back those that have not begun; these do not run."""

    @property
    def is_behind(self) -> bool:
        """Whether turns wait to be tried together, so that others had better join them."""
        return False

    def collect(self, timeout_s: float) -> list[T_Turn]:
        """The turns that have ended since the last call; waits at most so long."""
        is_rung = True
        try:
            self._bell.get(timeout_s > 0, timeout_s)
            while not self._bell.empty():
                self._bell.get_nowait()
        except Empty:
            is_rung = False
        now = monotonic()
        if not (is_rung or self.is_stopped or now >= self._collect_at):
            return []
        self._collect_at = now + _TELL_S
        ended: list[T_Turn] = []
        while self._ended:
            ended.append(self._ended.popleft())
        return ended

    def ring(self, _: object = None) -> None:
        """Wake the thread that waits in `collect`."""
        self._bell.put(None)

    def _tell(self, turn: T_Turn, *, is_last: bool) -> None:
        """A turn has ended. Turns that end within a moment are reported together."""
        self._ended.append(turn)
        if is_last or monotonic() >= self._ring_at:
            self.ring()
            self._ring_at = monotonic() + _TELL_S

    def stop(self) -> None:
        """Start no more turns."""
        self.is_stopped = True

    @abstractmethod
    def close(self) -> None:
        """Free the threads; no more turns may be started."""


class ThreadExecutor(Executor[T_Turn]):
    """`count` threads. With `run_many`, turns that were started together are first tried together;
    those that it stores are done.
    """

    def __init__(
        self,
        run: Callable[[T_Turn], None],
        count: int,
        most: int = 1,
        run_many: Callable[[Sequence[T_Turn]], None] | None = None,
    ) -> None:
        super().__init__(count, most)
        self._run = run
        self._run_many = run_many
        self._pid = os.getpid()
        self._waiting: SimpleQueue[Sequence[T_Turn] | None] = SimpleQueue()
        for number in range(count):
            name = f"oncely-handler-{number + 1}"
            threading.Thread(target=self._work, name=name, daemon=True).start()

    def start(self, turns: Sequence[T_Turn]) -> None:
        """As in Executor; those that are tried together are split among the threads."""
        size = 1 if self._run_many is None else -(-len(turns) // self._count)
        for first in range(0, len(turns), size):
            self._waiting.put(turns[first : first + size])

    def withdraw(self) -> list[T_Turn]:
        left: list[T_Turn] = []
        with suppress(Empty):
            while turns := self._waiting.get_nowait():
                left += turns
        return left

    @property
    def is_behind(self) -> bool:
        return self._run_many is not None and not self._waiting.empty()

    def close(self) -> None:
        """Let the threads end."""
        for _ in range(self._count):
            self._waiting.put(None)

    def _work(self) -> None:
        while (turns := self._waiting.get()) is not None:
            if self._run_many is not None and not self.is_stopped:
                self._context.copy().run(self._run_many, turns)
            for turn in turns:
                if not (turn.state >= TurnState.ENDED or self.is_stopped):
                    self._context.copy().run(self._run, turn)
                if self._pid != os.getpid():
                    return  # In a forked child of a handler: the rest is the parent's.
                self._tell(turn, is_last=self._waiting.empty() and turn is turns[-1])


class LoopExecutor(Executor[T_Turn]):
    """An asyncio event loop on its own thread, in which at most `count` turns run at a time."""

    def __init__(
        self, run: Callable[[T_Turn], Coroutine[Any, Any, None]], count: int, most: int = 1
    ) -> None:
        super().__init__(count, most)
        self._run = run
        self._free = count
        self._waiting: deque[T_Turn] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._turn_round, name="oncely-loop", daemon=True)
        self._thread.start()

    def start(self, turns: Sequence[T_Turn]) -> None:
        self._loop.call_soon_threadsafe(self._accept, turns)

    def withdraw(self) -> list[T_Turn]:
        left: list[T_Turn] = []
        with suppress(IndexError):
            while True:
                left.append(self._waiting.popleft())
        return left

    def close(self) -> None:
        """End the loop, and cancel the tasks that still run in it."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        # A task that ignores its cancellation ends with the process.
        self._thread.join(_CLOSE_S)

    def _turn_round(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._run_until_stopped()
            for task in self._tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*self._tasks, return_exceptions=True))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            self._loop.close()

    def _run_until_stopped(self) -> None:
        while True:
            try:
                self._loop.run_forever()
                return
            except (SystemExit, KeyboardInterrupt):
                # Raised by a task that a handler has started. A handler that awaits the task gets
                # the error, too. asyncio ends the loop for it, but the other turns still need it.
                _log.exception(
                    "a task that a handler started has raised %(reason)s; other messages go on",
                    extra={"event": "task_exited"},
                )

    def _accept(self, turns: Sequence[T_Turn]) -> None:
        self._waiting.extend(turns)
        self._begin()

    def _begin(self) -> None:
        with suppress(IndexError):  # The last one was withdrawn.
            while self._free and self._waiting:
                work = self._work(self._waiting.popleft())
                # Counted here, and not by the tasks: a task lives a little longer than its turn.
                self._free -= 1
                task = self._loop.create_task(work, context=self._context.copy())
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _work(self, turn: T_Turn) -> None:
        if not self.is_stopped:
            await self._run(turn)
        self._free += 1
        self._begin()
        self._tell(turn, is_last=not self._waiting)
