"""Batches as parameters: what differs from row to row goes as a list, what does not, once."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from oncely.stores.sql.rows import Columns

T = TypeVar("T")

BATCH = 5_000
"""Rows in one statement: enough to make its cost vanish, and short enough for every limit."""


class Split(NamedTuple):
    """The columns of a batch, by whether their values differ. Of one row none do."""

    varying: Mapping[str, Sequence[Any]]
    constant: Mapping[str, Any]


def split(columns: Columns) -> Split:
    """Part the columns of one row or more."""
    varying: dict[str, Sequence[Any]] = {}
    constant: dict[str, Any] = {}
    for name, values in columns.items():
        if values.count(values[0]) == len(values):
            constant[name] = values[0]
        else:
            varying[name] = values
    return Split(varying, constant)


def batches(items: Sequence[T]) -> Iterator[Sequence[T]]:
    """`items` in parts of at most `BATCH`."""
    for start in range(0, len(items), BATCH):
        yield items[start : start + BATCH]
