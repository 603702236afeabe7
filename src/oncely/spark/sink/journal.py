"""The journal: which handlers were begun, for whoever comes after a process that dies in one."""

import struct
import threading
from collections.abc import Collection
from mmap import mmap
from typing import NamedTuple

_WORD = struct.Struct("<q")
_ENTRY = struct.Struct("<qqq")
_STATE = _ENTRY.size - _WORD.size
"""Where an entry says what it is."""
_FREE, _BEGUN, _RETURNED = range(3)
CAPACITY = 100_000
"""So many handlers may have begun whose ends are not stored."""


class Entry(NamedTuple):
    """A handler that was begun, and whose end was not stored."""

    number: int
    """Of its row."""
    fence: int
    """Of the claim under which it ran."""
    has_returned: bool
    """Whether it had succeeded, and left nothing that is to be stored with its end."""


class Journal:
    """Begun handlers, in memory that outlives the process that writes it. For any thread."""

    def __init__(self, memory: "mmap | bytearray | None" = None) -> None:
        self._memory = mmap(-1, size()) if memory is None else memory
        self._lock = threading.Lock()
        self.clear()

    def begin(self, number: int, fence: int) -> None:
        """A handler begins."""
        with self._lock:
            place = self._places.get(number)
            if place is None:
                place = self._free.pop() if self._free else len(self._places)
            self._places[number] = place
            _ENTRY.pack_into(self._memory, _at(place), number, fence, _FREE)
            _WORD.pack_into(self._memory, 0, max(len(self._places) + len(self._free), place + 1))
            # Last, and at once: an entry is there when it is whole.
            self._mark(place, _BEGUN)

    def returned(self, number: int) -> None:
        """It has succeeded, and nothing but that is to be stored."""
        with self._lock:
            self._mark(self._places[number], _RETURNED)

    def forget(self, numbers: Collection[int]) -> None:
        """The ends of these are stored."""
        with self._lock:
            for number in numbers:
                place = self._places.pop(number, None)
                if place is not None:
                    self._mark(place, _FREE)
                    self._free.append(place)

    def clear(self) -> None:
        """Nothing is begun."""
        with self._lock:
            _WORD.pack_into(self._memory, 0, 0)
            self._places: dict[int, int] = {}
            """Of the entries, by their numbers."""
            self._free: list[int] = []
            """Places before the last that are not used."""

    def entries(self) -> list[Entry]:
        """What was begun."""
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
    """In bytes, of a journal's memory."""
    return _WORD.size + CAPACITY * _ENTRY.size


def _at(place: int) -> int:
    return _WORD.size + place * _ENTRY.size
