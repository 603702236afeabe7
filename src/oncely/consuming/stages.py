"""Stages: work on batches on a thread of its own, while others are received and claimed."""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")

_MOST = 2
"""The number of batches at work at a time: more would only wait for each other."""


class Stage(Generic[T]):
    """Does `work` to one batch after another; `ring` is called as soon as one is done."""

    def __init__(
        self, name: str, work: Callable[[Sequence[T]], object], ring: Callable[[], object]
    ) -> None:
        self._work = work
        self._ring = ring
        self._thread = ThreadPoolExecutor(1, name)
        self._under_way: deque[tuple[Future[object], Sequence[T]]] = deque()
        self._done: list[T] = []

    def put(self, batch: Sequence[T]) -> None:
        """Add a batch; waits while too many are at work. Like the other methods, it raises the
        error of an earlier batch.
        """
        while len(self._under_way) >= _MOST:
            self._take_first()
        future = self._thread.submit(self._work, batch)
        self._under_way.append((future, batch))
        future.add_done_callback(lambda _: self._ring())

    def collect(self) -> list[T]:
        """The results since the last call, in order."""
        while self._under_way and self._under_way[0][0].done():
            self._take_first()
        done, self._done = self._done, []
        return done

    def wait(self) -> list[T]:
        """The results, when all batches are done."""
        while self._under_way:
            self._take_first()
        return self.collect()

    def close(self) -> None:
        """Wait for the batches at work; no more may be put."""
        self._thread.shutdown()

    def _take_first(self) -> None:
        future, batch = self._under_way.popleft()
        future.result()
        self._done += batch
