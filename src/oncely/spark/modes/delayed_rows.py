"""Delayed rows: what a task asks for again, as another worker holds it or nothing else keeps it."""

import heapq
import itertools
import time
from typing import NamedTuple

from oncely.spark.sink.message_rows import Row


class Delayed(NamedTuple):
    """When to ask for an id again, and since when that goes on (both monotonic)."""

    due: float
    since: float


class DelayedRows:
    """The deliveries of a task that wait in it, by when they are due."""

    def __init__(self) -> None:
        self._rows: list[tuple[float, int, Row]] = []
        """A heap."""
        self._order = itertools.count()
        self._ids: dict[str, Delayed] = {}
        """For every id that waits, until it is settled."""

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def next_due(self) -> float:
        """When the first of them is due (monotonic). There has to be one."""
        return self._rows[0][0]

    def of(self, id_: str) -> Delayed | None:
        """That of an id which is not settled yet."""
        return self._ids.get(id_)

    def put_off(self, row: Row, delayed: Delayed) -> None:
        """Ask again for a row. One that was taken from the ledger goes on waiting there."""
        if row.taken is None:
            self._ids[row.id] = delayed
            heapq.heappush(self._rows, (delayed.due, next(self._order), row))

    def due(self, most: int) -> list[Row]:
        """Take out those that are due, the first ones."""
        due: list[Row] = []
        now = time.monotonic()
        while self._rows and self._rows[0][0] <= now and len(due) < most:
            due.append(heapq.heappop(self._rows)[2])
        return due

    def forget(self, id_: str) -> Delayed | None:
        """Take note that an id is settled, or is asked for; return how it was delayed."""
        return self._ids.pop(id_, None)
