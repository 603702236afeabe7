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

    def __init__(self, memory: "mmap | bytearray | None" = None) -> None:
        self._memory = mmap(-1, size()) if memory is None else memory
        self._lock = threading.Lock()
        self.clear()

    def begin(self, number: int, fence: int) -> None:
        """Record that a handler begins."""
        with self._lock:
            place = self._places.get(number)
            if place is None:
                place = self._free.pop() if self._free else len(self._places)
            self._places[number] = place
            _ENTRY.pack_into(self._memory, _at(place), number, fence, _FREE)
            _WORD.pack_into(self._memory, 0, max(len(self._places) + len(self._free), place + 1))
            # The state is written last: an entry is visible only when it is complete.
            self._mark(place, _BEGUN)

    def returned(self, number: int) -> None:
        """Record that the handler has succeeded, with nothing to store except that."""
        with self._lock:
            self._mark(self._places[number], _RETURNED)

    def forget(self, numbers: Collection[int]) -> None:
        """Remove the entries of these, whose ends are stored."""
        with self._lock:
            for number in numbers:
                place = self._places.pop(number, None)
                if place is not None:
                    self._mark(place, _FREE)
                    self._free.append(place)

    def clear(self) -> None:
        """Remove all entries."""
        with self._lock:
            _WORD.pack_into(self._memory, 0, 0)
            self._places: dict[int, int] = {}
            """The places of the entries, by their numbers."""
            self._free: list[int] = []
            """Unused places before the last one."""

    def entries(self) -> list[Entry]:
        """The begun handlers."""
        (count,) = _WORD.unpack_from(self._memory, 0)
        found = [_ENTRY.unpack_from(self._memory, _at(place)) for place in range(count)]
        return [
            Entry(number, fence, state == _RETURNED)
            for number, fence, state in found
            if state != _FREE
        ]

    def _mark(self, place: int, state: int) -> None:
        _WORD.pack_into(self._memory, _at(place) + _STATE, state)


def size() -> int:
    """The size of a journal's memory, in bytes."""
    return _WORD.size + CAPACITY * _ENTRY.size


def _at(place: int) -> int:
    return _WORD.size + place * _ENTRY.size
