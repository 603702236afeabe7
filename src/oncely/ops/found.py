"""Rows that were found, as many as were asked for."""

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Generic, NamedTuple, TypeVar

Row = TypeVar("Row")


class Found(NamedTuple, Generic[Row]):
    """Rows, in the order that was asked for."""

    rows: Sequence[Row]
    more: bool
    """Whether there are others, left out because of the limit."""


def first(rows: Iterable[Row], limit: int) -> Found[Row]:
    """At most `limit` of the rows."""
    found = [*islice(rows, limit + 1)]
    return Found(found[:limit], len(found) > limit)
