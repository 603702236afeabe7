"""Batches: as many rows as go into one statement."""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")

MOST_ROWS = 5_000
"""Rows in one statement: enough to make its cost vanish."""
MOST_BYTES = 4_000_000
"""Of metadata and results in one statement: servers take 16 MB, and escapes may double them."""


def batches(items: Sequence[T], weigh: Callable[[T], int] | None = None) -> Iterable[Sequence[T]]:
    """`items` in parts of at most `MOST_ROWS`, and `MOST_BYTES` by the sizes that `weigh` gives."""
    if weigh is None:
        return [items[start : start + MOST_ROWS] for start in range(0, len(items), MOST_ROWS)]
    found: list[list[T]] = []
    weight = MOST_BYTES
    for item in items:
        weight += weigh(item)
        if not found or len(found[-1]) == MOST_ROWS or weight > MOST_BYTES:
            found.append([])
            weight = weigh(item)
        found[-1].append(item)
    return found
