"""A sample of the records."""

from collections.abc import Sequence
from typing import NamedTuple


class Sample(NamedTuple):
    """Rows from all over the table."""

    rows: Sequence[tuple[str, str, int]]
    """Consumer, status and duplicates of each."""
    total: float
    """About how many rows the table has."""
