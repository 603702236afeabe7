"""Items that are due later."""

import math
from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import count
from typing import Generic, TypeVar

from oncely._util.clock import monotonic

T = TypeVar("T")


class Later(Generic[T]):
    """Items, by the moments (of `clock.monotonic`) at which they are due."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, T]] = []
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[T]:
        return (item for _, _, item in self._heap)

    @property
    def next_due(self) -> float:
        """When the first item is due. There must be one."""
        return self._heap[0][0]

    def add(self, due: float, item: T) -> None:
        """Keep an item until then."""
        heappush(self._heap, (due, next(self._numbers), item))

    def take(self, most: float = math.inf) -> list[T]:
        """Take out items that are due, at most so many, the earliest first."""
        now = monotonic()
        due: list[T] = []
        while self._heap and self._heap[0][0] <= now and len(due) < most:
            due.append(heappop(self._heap)[2])
        return due
