"""Binding: what brings messages into a queue."""

from typing import NamedTuple


class Binding(NamedTuple):
    """What brings messages into a queue."""

    queue: str
    exchange: str = ""
    """Of a broker; empty for queues in the database itself, and in memory."""
    pattern: str = ""
    """The types of events that it takes; empty: none, and there is such a queue."""
