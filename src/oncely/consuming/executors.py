"""Where turns run: threads for handlers that are not async, a loop for those that are."""

import asyncio
import logging
import os
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from oncely.core.verdicts import Phase
from oncely.lifecycle.turn import Turn

_log = logging.getLogger(__name__)

_TELL_S = 0.005
"""How long an ended turn may wait for others to be collected together."""
_SHARES = 4
"""Into how many parts each thread's share of a window goes, so that none has too much to do."""
_CLOSE_S = 1.0
"""How long cancelled tasks may take to end."""

T_Turn = TypeVar("T_Turn", bound=Turn)


class Executor(ABC, Generic[T_Turn]):
    """Runs turns, so many at a time, and tells which have ended.

    Nothing here outlives its process, nor keeps that from ending.
    """

    is_stopped = False
    """Whether turns that have not started are given back as they are."""

    def __init__(self) -> None:
        self._ended: deque[T_Turn] = deque()
        self._bell: SimpleQueue[None] = SimpleQueue()
        """Rung when several have ended: whoever collects is not woken for each."""
        self._collect_at = 0.0

    @abstractmethod
    def start(self, turns: Sequence[T_Turn]) -> None:
        """Run these, in their order as far as that goes."""

    def collect(self, timeout_s: float) -> list[T_Turn]:
        """What has ended since; waits at most so long for the bell."""
        is_rung = self._is_rung(timeout_s)
        now = time.monotonic()
        if not (is_rung or self.is_stopped or now >= self._collect_at):
            return []
        self._collect_at = now + _TELL_S
        return [self._ended.popleft() for _ in range(len(self._ended))]

    def ring(self) -> None:
        """Wake whoever collects."""
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
        """Start no more."""
        self.is_stopped = True

    @abstractmethod
    def close(self) -> None:
        """Nothing more is to be run."""


class ThreadExecutor(Executor[T_Turn]):
    """`count` threads. With `run_many`, turns that were started together are first tried together:
    those that it stores are done with.
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
        """As Executor says; each window is parted among the threads."""
        if self._run_many is not None:
            size = -(-len(turns) // self._count)
        else:
            size = max(1, len(turns) // (_SHARES * self._count if self._count > 1 else 1))
        for first in range(0, len(turns), size):
            self._waiting.put(turns[first : first + size])

    def close(self) -> None:
        """Let the threads end."""
        for _ in range(self._count):
            self._waiting.put(None)

    def _work(self) -> None:
        while (turns := self._waiting.get()) is not None:
            if self._run_many is not None and not self.is_stopped:
                self._run_many(turns)
            for turn in turns:
                if not (turn.phase is Phase.STORED or self.is_stopped):
                    self._run(turn)
                if self._pid != os.getpid():
                    return  # The handler has forked: what follows is its parent's.
                self._ended.append(turn)
            self.ring()


class LoopExecutor(Executor[T_Turn]):
    """A loop of asyncio on a thread of its own, in which at most `count` turns run at a time."""

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
        """As Executor says."""
        self._loop.call_soon_threadsafe(self._accept, turns)

    def close(self) -> None:
        """End the loop, and cancel what still runs in it."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        # What does not let itself be cancelled ends with the process.
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
                # Of a task that a handler has begun: the handler is told of it where it waits for
                # its end, and asyncio ends the loop besides, which the other turns still need.
                _log.exception("task_has_exited")

    def _accept(self, turns: Sequence[T_Turn]) -> None:
        self._waiting.extend(turns)
        for _ in range(min(len(turns), self._free)):
            # Counted here, and not by the tasks: one that has ended is a task a little longer.
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
        # Those that end in one round of the loop are told of together.
        if not self._is_ringing:
            self._is_ringing = True
            self._loop.call_soon(self._ring)

    def _ring(self) -> None:
        self._is_ringing = False
        self.ring()
