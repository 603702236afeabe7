"""Batches as parameters: what differs from row to row goes as a list, what does not, once."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from oncely.stores.sql.record_rows import RowValues

T = TypeVar("T")

MOST_ROWS = 5_000
"""Rows in one statement: enough to make its cost vanish."""
MOST_BYTES = 4_000_000
"""Of metadata and results in one statement: servers take 16 MB, and escapes may double them."""


class Split(NamedTuple):
    """The columns of a batch, by whether their values differ. Of one row none do."""

    varying: Mapping[str, Sequence[Any]]
    constant: Mapping[str, Any]


def split(rows: RowValues) -> Split:
    """Part the columns of one row or more."""
    if len(rows.values) == 1:
        return Split({}, dict(zip(rows.names, rows.values[0], strict=True)))
    return split_columns(dict(zip(rows.names, zip(*rows.values, strict=True), strict=True)))


def split_columns(columns: Mapping[str, Sequence[Any]]) -> Split:
    """The same for columns that are there already."""
    varying: dict[str, Sequence[Any]] = {}
    constant: dict[str, Any] = {}
    for name, values in columns.items():
        if values.count(values[0]) == len(values):
            constant[name] = values[0]
        else:
            varying[name] = list(values)
    return Split(varying, constant)


def batches(items: Sequence[T], weigh: Callable[[T], int] | None = None) -> Iterable[Sequence[T]]:
    """`items` in parts of at most `MOST_ROWS`, and of `MOST_BYTES` as `weigh` tells them."""
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
