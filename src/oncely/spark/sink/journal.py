"""The journal: the begun handlers, for the successor of a process that dies in one."""

import struct
import threading
from collections.abc import Collection
from mmap import mmap
from typing import NamedTuple

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
        self.clear()

    def begin(self, number: int, fence: int) -> None:
        """Record that a handler begins."""
        with self._lock:
            slot = self._slots.get(number)
            if slot is None:
                slot = self._free.pop() if self._free else len(self._slots)
            self._slots[number] = slot
            _ENTRY.pack_into(self._memory, _at(slot), number, fence, _FREE)
            _WORD.pack_into(self._memory, 0, max(len(self._slots) + len(self._free), slot + 1))
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
                    self._free.append(slot)

    def clear(self) -> None:
        """Remove all entries."""
        with self._lock:
            _WORD.pack_into(self._memory, 0, 0)
            self._slots: dict[int, int] = {}
            """The places of the entries, by their numbers."""
            self._free: list[int] = []
            """Unused places before the last one."""

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
