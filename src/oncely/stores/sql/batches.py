"""Batches: as many rows as go into one statement."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")

MOST_ROWS = 5_000
"""Rows in one statement: enough to make its cost vanish."""
MOST_BYTES = 4_000_000
"""Of metadata and results in one statement: servers take 16 MB, and escapes may double them."""


def batches(items: Sequence[T], weigh: Callable[[T], int] | None = None) -> Iterable[Sequence[T]]:
    """`items` in parts of at most `MOST_ROWS`, and `MOST_BYTES` by the sizes that `weigh` gives."""
    if weigh is not None:
        return _weighed(items, weigh)
    return [items[start : start + MOST_ROWS] for start in range(0, len(items), MOST_ROWS)]


def _weighed(items: Sequence[T], weigh: Callable[[T], int]) -> Iterator[Sequence[T]]:
    batch: list[T] = []
    weight = 0
    for item in items:
        weight += weigh(item)
        if batch and (len(batch) == MOST_ROWS or weight > MOST_BYTES):
            yield batch
            batch, weight = [], weigh(item)
        batch.append(item)
    if batch:
        yield batch
