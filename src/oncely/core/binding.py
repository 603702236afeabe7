"""Binding: which events a broker routes into a queue."""

from typing import NamedTuple


class Binding(NamedTuple):
    """A queue, and the events that are routed into it."""

    queue: str
    exchange: str = ""
    """Of a broker; empty for queues in the database itself, and in memory."""
    pattern: str = ""
    """The types of events that are routed; empty: none, it only says that the queue exists."""
