"""Batches: as many rows as go into one statement."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar, cast

from oncely.stores.alike import AlikeChanges, AlikeRecords

T = TypeVar("T")

MOST_ROWS = 5_000
"""Rows in one statement: enough to make its cost vanish."""
MOST_BYTES = 4_000_000
"""Of metadata and results in one statement: servers take 16 MB, and escapes may double them."""
_WEIGHED = {"metadata", "result"}
"""The fields of a record on which its size depends."""


def batches(items: Sequence[T], weigh: Callable[[T], int] | None = None) -> Iterable[Sequence[T]]:
    """`items` in parts of at most `MOST_ROWS`, and `MOST_BYTES` by the sizes that `weigh` gives."""
    most = MOST_ROWS
    if weigh is not None and items:
        if not isinstance(items, AlikeRecords | AlikeChanges) or items.columns.keys() & _WEIGHED:
            return _weighed(items, weigh)
        most = max(1, min(MOST_ROWS, MOST_BYTES // max(1, weigh(cast(T, items[0])))))
    return [items[start : start + most] for start in range(0, len(items), most)]


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
