"""Where a task begins: at the start, or where a process that died has left it.

A process tells its successor how far it has come, and its journal has the handlers that it began.
"""

import struct
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from mmap import mmap
from typing import NamedTuple

from oncely.core.record import Key
from oncely.ledger.arguments import new_token
from oncely.spark.sink.counts import Counts

_WORD = struct.Struct("<q")
_ENTRY = struct.Struct("<qqq")
_STATE = _ENTRY.size - _WORD.size
"""The place of the state in an entry."""
_FREE, _BEGUN, _RETURNED = range(3)
CAPACITY = 100_000
"""The most begun handlers whose ends are not stored."""


class Entry(NamedTuple):
    """A handler that was begun, and whose end was not stored."""

    number: int
    """The number of its row."""
    fence: int
    """The fence of its claim."""
    has_returned: bool
    """Whether it had succeeded, with nothing to store except that."""


class Journal:
    """Begun handlers, in memory that outlives the process that writes it. Thread-safe."""

    def __init__(self) -> None:
        self._memory = mmap(-1, _at(CAPACITY))
        self._lock = threading.Lock()
        self._slots: dict[int, int] = {}
        """The places of the entries, by their numbers."""
        self._next = 0
        """The place of the next entry. Places are used again once no entry is left."""

    def begin(self, number: int, fence: int) -> None:
        """Record that a handler begins."""
        with self._lock:
            slot = self._slots.setdefault(number, self._next)
            self._next = max(self._next, slot + 1)
            _ENTRY.pack_into(self._memory, _at(slot), number, fence, _FREE)
            _WORD.pack_into(self._memory, 0, self._next)
            # The state is written last: an entry is visible only when it is complete.
            self._mark(slot, _BEGUN)

    def returned(self, number: int) -> None:
        """Record that the handler has succeeded, with nothing to store except that."""
        with self._lock:
            self._mark(self._slots[number], _RETURNED)

    def forget(self, numbers: Collection[int]) -> None:
        """Remove the entries of these, whose ends are stored."""
        with self._lock:
            for number in numbers:
                slot = self._slots.pop(number, None)
                if slot is not None:
                    self._mark(slot, _FREE)
            if not self._slots:
                self._next = 0

    def clear(self) -> None:
        """Remove all entries."""
        with self._lock:
            _WORD.pack_into(self._memory, 0, 0)
            self._slots.clear()
            self._next = 0

    def entries(self) -> list[Entry]:
        """The begun handlers."""
        (count,) = _WORD.unpack_from(self._memory, 0)
        found = [_ENTRY.unpack_from(self._memory, _at(slot)) for slot in range(count)]
        return [
            Entry(number, fence, state == _RETURNED)
            for number, fence, state in found
            if state != _FREE
        ]

    def _mark(self, slot: int, state: int) -> None:
        _WORD.pack_into(self._memory, _at(slot) + _STATE, state)


def _at(slot: int) -> int:
    return _WORD.size + slot * _ENTRY.size


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
