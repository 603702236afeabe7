"""Executors: threads for handlers that are not async, an event loop for async handlers."""

import asyncio
import os
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from oncely._util.clock import monotonic
from oncely._util.event_log import EventLog
from oncely.core.turn import Turn, TurnState

_log = EventLog(__name__)

_TELL_S = 0.005
"""How long an ended turn may wait for others to be collected together."""
_SHARES = 4
"""Into how many parts each thread's share of a window is split, so that no thread has too much."""
_CLOSE_S = 1.0
"""How long cancelled tasks may take to end."""

T_Turn = TypeVar("T_Turn", bound=Turn)


class Executor(ABC, Generic[T_Turn]):
    """Runs a limited number of turns at a time, and reports which have ended.

    Its threads do not outlive the process, and do not keep it from ending.
    """

    is_stopped = False
    """Whether turns that have not started are returned without running."""

    def __init__(self) -> None:
        self._ended: deque[T_Turn] = deque()
        self._bell: SimpleQueue[None] = SimpleQueue()
        """Set when several turns have ended: the collector is not woken for each."""
        self._collect_at = 0.0

    @abstractmethod
    def start(self, turns: Sequence[T_Turn]) -> None:
        """Run these turns, in their order as far as possible."""

    @property
    def is_behind(self) -> bool:
        """Whether turns wait to be tried together, so that others had better join them."""
        return False

    def collect(self, timeout_s: float) -> list[T_Turn]:
        """The turns that have ended since the last call; waits at most so long."""
        is_rung = self._is_rung(timeout_s)
        now = monotonic()
        if not (is_rung or self.is_stopped or now >= self._collect_at):
            return []
        self._collect_at = now + _TELL_S
        return [self._ended.popleft() for _ in range(len(self._ended))]

    def ring(self) -> None:
        """Wake the thread that waits in `collect`."""
        self._bell.put(None)

    def _is_rung(self, timeout_s: float) -> bool:
        try:
            self._bell.get(timeout_s > 0, timeout_s)
        except Empty:
            return False
        while not self._bell.empty():
            self._bell.get_nowait()
        return True

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
        run_many: Callable[[Sequence[T_Turn]], None] | None = None,
    ) -> None:
        super().__init__()
        self._run = run
        self._run_many = run_many
        self._count = count
        self._pid = os.getpid()
        self._waiting: SimpleQueue[Sequence[T_Turn] | None] = SimpleQueue()
        for number in range(count):
            name = f"oncely-handler-{number + 1}"
            threading.Thread(target=self._work, name=name, daemon=True).start()

    def start(self, turns: Sequence[T_Turn]) -> None:
        """As in Executor; each window is split among the threads."""
        if self._run_many is not None:
            size = -(-len(turns) // self._count)
        else:
            size = max(1, len(turns) // (_SHARES * self._count if self._count > 1 else 1))
        for first in range(0, len(turns), size):
            self._waiting.put(turns[first : first + size])

    @property
    def is_behind(self) -> bool:
        """As in Executor."""
        return self._run_many is not None and not self._waiting.empty()

    def close(self) -> None:
        """Let the threads end."""
        for _ in range(self._count):
            self._waiting.put(None)

    def _work(self) -> None:
        while (turns := self._waiting.get()) is not None:
            if self._run_many is not None and not self.is_stopped:
                self._run_many(turns)
            for turn in turns:
                if not (turn.state >= TurnState.ENDED or self.is_stopped):
                    self._run(turn)
                if self._pid != os.getpid():
                    return  # In a forked child of a handler: the rest is the parent's.
                self._ended.append(turn)
            self.ring()


class LoopExecutor(Executor[T_Turn]):
    """An asyncio event loop on its own thread, in which at most `count` turns run at a time."""

    def __init__(self, run: Callable[[T_Turn], Coroutine[Any, Any, None]], count: int) -> None:
        super().__init__()
        self._run = run
        self._free = count
        self._waiting: deque[T_Turn] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_ringing = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._turn_round, name="oncely-loop", daemon=True)
        self._thread.start()

    def start(self, turns: Sequence[T_Turn]) -> None:
        """As in Executor."""
        self._loop.call_soon_threadsafe(self._accept, turns)

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
        for _ in range(min(len(turns), self._free)):
            # Counted here, and not by the tasks: a task lives a little longer than its turn.
            self._free -= 1
            task = self._loop.create_task(self._work())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _work(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not self.is_stopped:
                await self._run(turn)
            self._tell(turn)
        self._free += 1

    def _tell(self, turn: T_Turn) -> None:
        self._ended.append(turn)
        # The turns that end in one round of the loop are reported together.
        if not self._is_ringing:
            self._is_ringing = True
            self._loop.call_soon(self._ring)

    def _ring(self) -> None:
        self._is_ringing = False
        self.ring()
