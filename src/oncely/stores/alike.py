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
    def __getitem__(self, index: int) -> Record: ...

    @overload
    def __getitem__(self, index: slice) -> "AlikeRecords": ...

    def __getitem__(self, index: int | slice) -> "Record | AlikeRecords":
        columns: dict[str, Any] = {name: of[index] for name, of in self.columns.items()}
        if isinstance(index, slice):
            return AlikeRecords(self.keys[index], self.first, columns)
        return self.first._replace(key=self.keys[index], **columns)

    def __iter__(self) -> Iterator[Record]:
        values = map(self.values, _FIELDS)
        return map(_made, zip(self.keys, *values))  # noqa: B905 - what repeats has no end.

    def values(self, name: str) -> Iterable[Any]:
        """What each has in that field; without an end where all have the same."""
        return self.columns.get(name, repeat(getattr(self.first, name)))

    def like(self, first: Record, **columns: Sequence[Any]) -> "AlikeRecords":
        """Records with these keys and columns, and some more, that else are as `first`."""
        return AlikeRecords(self.keys, first, {**self.columns, **columns})

    def at_indexes(self, indexes: Sequence[int]) -> "AlikeRecords":
        """Those in these places, in that order."""
        columns = {name: [values[n] for n in indexes] for name, values in self.columns.items()}
        return AlikeRecords([self.keys[n] for n in indexes], self.first, columns)


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
    def __getitem__(self, index: int) -> Change: ...

    @overload
    def __getitem__(self, index: slice) -> "AlikeChanges": ...

    def __getitem__(self, index: int | slice) -> "Change | AlikeChanges":
        if isinstance(index, slice):
            return AlikeChanges(self.old[index], self.new[index])
        return Change(self.old[index], self.new[index])

    def __iter__(self) -> Iterator[Change]:
        return map(Change, self.old, self.new)

    @property
    def columns(self) -> Mapping[str, Sequence[Any]]:
        """In which fields the records differ, besides their message ids."""
        return self.old.columns

    def at_indexes(self, indexes: Sequence[int]) -> "AlikeChanges":
        """Those in these places, in that order."""
        return AlikeChanges(self.old.at_indexes(indexes), self.new.at_indexes(indexes))


def keys_of(records: Sequence[Record]) -> Sequence[Key]:
    """Their keys, in order."""
    return records.keys if type(records) is AlikeRecords else [record.key for record in records]
