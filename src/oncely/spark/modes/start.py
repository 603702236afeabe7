"""Where a task begins: at the start, or where a process that died has left it."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from oncely.core.record import Key
from oncely.ledger.arguments import new_token
from oncely.spark.sink.counts import Counts
from oncely.spark.sink.journal import Entry, Journal


@dataclass(kw_only=True)
class TaskState:
    """How far a task has come, as one process tells the next."""

    token: int = field(default_factory=new_token)
    """Those of its rows follow it, by their numbers."""
    counts: Counts = field(default_factory=Counts)
    inherited: dict[int, Entry] = field(default_factory=dict)
    """Handlers that a process had begun, and whose ends were not stored when it died, by the
    numbers of their rows."""
    culprit: int | None = None
    """The only handler of these in which the process can have died."""
    adopted: dict[int, Key] = field(default_factory=dict)
    """Messages that the process had taken from the ledger, by their numbers here."""
    is_alone: bool = False
    """Whether each message gets a transaction of its own: something other than the handlers kills
    the process.
    """
    began_at: float = field(default_factory=time.monotonic)
    """`time.monotonic()` at the task's beginning; the same clock in all processes of a machine."""
    death: str = ""
    """How the process died."""


@dataclass(kw_only=True)
class Start(TaskState):
    """The state from which a task goes on, and what it tells of itself."""

    journal: Journal = field(default_factory=Journal)
    tell: Callable[[Sequence[int], Counts], None] = lambda _, __: None
    """Called with the numbers of settled rows, and the task's counts with them."""
    adopt: Callable[[int, Key], None] = lambda _, __: None
    """Called with the number of a message that was taken from the ledger, and its key."""
