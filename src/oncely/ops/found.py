"""Rows that were found, as many as were asked for."""

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple, TypeVar

from oncely.core.waiting import WaitingMessage

Row = TypeVar("Row")


class FoundMessages(NamedTuple):
    """Messages that wait, in the order in which they came."""

    messages: Sequence[WaitingMessage]
    more: bool
    """Whether there are others, left out because of the limit."""


def first(rows: Iterable[Row], limit: int) -> tuple[Sequence[Row], bool]:
    """At most `limit` of the rows, and whether there are more."""
    found = [*islice(rows, limit + 1)]
    return found[:limit], len(found) > limit
