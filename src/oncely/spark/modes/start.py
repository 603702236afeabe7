"""Where a task begins: at nothing, or where a process that died in it has left it."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from oncely.core.record import Key
from oncely.engine.request import new_token
from oncely.spark.sink.counts import Counts
from oncely.spark.sink.journal import Entry, Journal, size


def _nobody(_: Sequence[int], __: Counts) -> None:
    """Hear it."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """What a task goes on from."""

    token: int = field(default_factory=new_token)
    """Those of its rows follow it, by their numbers."""
    counts: Counts = field(default_factory=Counts)
    inherited: Sequence[Entry] = ()
    """Handlers that a process had begun that died, and had not stored the ends of."""
    culprit: int | None = None
    """The only one of these in which the process can have died."""
    adopted: Mapping[int, Key] = field(default_factory=dict)
    """Messages that it had taken from where they waited, by the numbers that they have here."""
    is_alone: bool = False
    """Whether each message is to have a transaction of its own: something else kills than the
    handlers.
    """
    first_adopted: int = -1
    """The first number, and then downwards, for messages that are taken from where they waited."""
    began_at: float = field(default_factory=time.monotonic)
    """When the task began: `time.monotonic()`, which is the same for all processes of a machine."""
    death: str = ""
    """How that process has died."""
    journal: Journal = field(default_factory=lambda: Journal(bytearray(size())))
    tell: Callable[[Sequence[int], Counts], None] = _nobody
    """Is told the numbers of rows that are settled, and what the task has come to with them."""
    adopt: Callable[[int, Key], None] = lambda _, __: None
    """Is told the number that a message has here which was taken from where it waited."""
