"""Delayed rows: a task claims them again later, as another worker holds them, or for a retry."""

import heapq
import itertools
import time
from typing import NamedTuple

from oncely.spark.sink.message_rows import Row


class Delayed(NamedTuple):
    """When to claim an id again, and since when it is delayed (both monotonic)."""

    due: float
    since: float


class DelayedRows:
    """The deliveries that wait in a task, by their due times."""

    def __init__(self) -> None:
        self._rows: list[tuple[float, int, Row]] = []
        """A heap."""
        self._order = itertools.count()
        self._ids: dict[str, Delayed] = {}
        """For every waiting id, until it is settled."""

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def next_due(self) -> float:
        """When the first row is due (monotonic). There must be one."""
        return self._rows[0][0]

    def of(self, id_: str) -> Delayed | None:
        """The delay of an id that is not settled yet."""
        return self._ids.get(id_)

    def put_off(self, row: Row, delayed: Delayed) -> None:
        """Delay a row. A row that was taken from the ledger waits there instead."""
        if row.taken is None:
            self._ids[row.id] = delayed
            heapq.heappush(self._rows, (delayed.due, next(self._order), row))

    def due(self, most: int) -> list[Row]:
        """Take out the rows that are due, the earliest first."""
        due: list[Row] = []
        now = time.monotonic()
        while self._rows and self._rows[0][0] <= now and len(due) < most:
            due.append(heapq.heappop(self._rows)[2])
        return due

    def forget(self, id_: str) -> Delayed | None:
        """Remove an id that is settled, or is claimed now; return its delay."""
        return self._ids.pop(id_, None)
