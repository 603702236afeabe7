"""Records that stand alike: one says what all are, columns say in what they differ.

Whether a sequence is one of these is asked by its type: `isinstance` is slow for a Sequence, and
single calls ask as well.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import repeat
from typing import Any, final, overload

from oncely.core.record import Key, Record
from oncely.stores.store import Change

_FIELDS = Record._fields[1:]
_made = partial(tuple.__new__, Record)


@final
class AlikeRecords(Sequence[Record]):
    """Records of one consumer that differ in their message ids and in the fields of `columns`, and
    else are as `first`. A record is made when it is looked at.
    """

    __slots__ = ("columns", "first", "keys")

    def __init__(
        self, keys: Sequence[Key], first: Record, columns: Mapping[str, Sequence[Any]] = {}
    ) -> None:
        self.keys = keys
        self.first = first
        self.columns = columns

    def __len__(self) -> int:
        return len(self.keys)

    @overload
    def __getitem__(self, place: int) -> Record: ...

    @overload
    def __getitem__(self, place: slice) -> "AlikeRecords": ...

    def __getitem__(self, place: int | slice) -> "Record | AlikeRecords":
        columns: dict[str, Any] = {name: of[place] for name, of in self.columns.items()}
        if isinstance(place, slice):
            return AlikeRecords(self.keys[place], self.first, columns)
        return self.first._replace(key=self.keys[place], **columns)

    def __iter__(self) -> Iterator[Record]:
        values = map(self.values, _FIELDS)
        return map(_made, zip(self.keys, *values))  # noqa: B905 - what repeats has no end.

    def values(self, name: str) -> Iterable[Any]:
        """What each has in that field; without an end where all have the same."""
        return self.columns.get(name, repeat(getattr(self.first, name)))

    def like(self, first: Record, **columns: Sequence[Any]) -> "AlikeRecords":
        """Records with these keys and columns, and some more, that else are as `first`."""
        return AlikeRecords(self.keys, first, {**self.columns, **columns})

    def in_places(self, places: Sequence[int]) -> "AlikeRecords":
        """Those in these places, in that order."""
        columns = {name: [values[n] for n in places] for name, values in self.columns.items()}
        return AlikeRecords([self.keys[n] for n in places], self.first, columns)


@final
class AlikeChanges(Sequence[Change]):
    """Changes of records that are alike into others that are, in the same order."""

    __slots__ = ("new", "old")

    def __init__(self, old: AlikeRecords, new: AlikeRecords) -> None:
        self.old = old
        self.new = new

    def __len__(self) -> int:
        return len(self.old)

    @overload
    def __getitem__(self, place: int) -> Change: ...

    @overload
    def __getitem__(self, place: slice) -> "AlikeChanges": ...

    def __getitem__(self, place: int | slice) -> "Change | AlikeChanges":
        if isinstance(place, slice):
            return AlikeChanges(self.old[place], self.new[place])
        return Change(self.old[place], self.new[place])

    def __iter__(self) -> Iterator[Change]:
        return map(Change, self.old, self.new)

    @property
    def columns(self) -> Mapping[str, Sequence[Any]]:
        """In which fields the records differ, besides their message ids."""
        return self.old.columns

    def in_places(self, places: Sequence[int]) -> "AlikeChanges":
        """Those in these places, in that order."""
        return AlikeChanges(self.old.in_places(places), self.new.in_places(places))


def keys_of(records: Sequence[Record]) -> Sequence[Key]:
    """Their keys, in order."""
    return records.keys if type(records) is AlikeRecords else [record.key for record in records]
