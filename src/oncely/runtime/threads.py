"""Where turns run: threads for handlers that are not async, a loop for those that are."""

import asyncio
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from queue import Empty, SimpleQueue
from typing import Any

from oncely.runtime.turn import Turn

_TELL_S = 0.005
"""How long an ended turn may wait for others to be told of together."""
_SHARES = 4
"""Into how many parts each thread's share of a window goes, so that none has too much to do."""

RunMany = Callable[[Sequence[Turn]], None]


class Place(ABC):
    """Runs turns, so many at a time, and tells which have ended.

    Nothing here outlives its process, nor keeps that from ending.
    """

    is_stopped = False
    """Whether turns that have not started are given back as they are."""

    def __init__(self) -> None:
        self._ended: SimpleQueue[Sequence[Turn]] = SimpleQueue()

    @abstractmethod
    def start(self, turns: Sequence[Turn]) -> None:
        """Run these, in their order as far as that goes."""

    def collect(self, timeout_s: float) -> list[Turn]:
        """What has ended since; waits at most so long for the first."""
        turns: list[Turn] = []
        try:
            turns += self._ended.get(timeout=timeout_s) if timeout_s else self._ended.get_nowait()
            while True:
                turns += self._ended.get_nowait()
        except Empty:
            return turns

    def stop(self) -> None:
        """Start no more."""
        self.is_stopped = True

    @abstractmethod
    def close(self) -> None:
        """Nothing more is to be run."""


class Threads(Place):
    """`count` threads. With `run_many`, turns that were started together run together."""

    def __init__(
        self, run: Callable[[Turn], None], count: int, run_many: RunMany | None = None
    ) -> None:
        super().__init__()
        self._run = run
        self._run_many = run_many
        self._count = count
        self._waiting: SimpleQueue[Sequence[Turn] | None] = SimpleQueue()
        for number in range(count):
            name = f"oncely-handler-{number + 1}"
            threading.Thread(target=self._work, name=name, daemon=True).start()

    def start(self, turns: Sequence[Turn]) -> None:
        """As Place says; each window is parted among the threads."""
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
            if self._run_many is not None:
                if not self.is_stopped:
                    self._run_many(turns)
                self._ended.put(turns)
            else:
                self._run_each(turns)

    def _run_each(self, turns: Sequence[Turn]) -> None:
        ended: list[Turn] = []
        tell_at = time.monotonic() + _TELL_S
        for turn in turns:
            if not self.is_stopped:
                self._run(turn)
            ended.append(turn)
            if time.monotonic() >= tell_at:
                self._ended.put(ended)
                ended, tell_at = [], time.monotonic() + _TELL_S
        if ended:
            self._ended.put(ended)


class Loop(Place):
    """A loop of asyncio on a thread of its own, in which at most `count` turns run at a time."""

    def __init__(self, run: Callable[[Turn], Coroutine[Any, Any, None]], count: int) -> None:
        super().__init__()
        self._run = run
        self._count = count
        self._waiting: deque[Turn] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._told: list[Turn] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._turn_round, name="oncely-loop", daemon=True)
        self._thread.start()

    def start(self, turns: Sequence[Turn]) -> None:
        """As Place says."""
        self._loop.call_soon_threadsafe(self._accept, turns)

    def close(self) -> None:
        """End the loop, and cancel what still runs in it."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _turn_round(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            for task in self._tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*self._tasks, return_exceptions=True))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            self._loop.close()

    def _accept(self, turns: Sequence[Turn]) -> None:
        self._waiting.extend(turns)
        for _ in range(min(len(turns), self._count - len(self._tasks))):
            task = self._loop.create_task(self._work())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _work(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not self.is_stopped:
                await self._run(turn)
            self._tell(turn)

    def _tell(self, turn: Turn) -> None:
        # Those that end in one round of the loop are told of together.
        if not self._told:
            self._loop.call_soon(self._tell_all)
        self._told.append(turn)

    def _tell_all(self) -> None:
        self._ended.put(self._told)
        self._told = []
