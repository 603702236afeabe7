"""Converts between records and rows."""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from math import isfinite
from operator import index
from typing import Any, NamedTuple, cast

from sqlalchemy import Table

from oncely.core.record import Key, Record, State
from oncely.stores.alike import AlikeChanges, AlikeRecords
from oncely.stores.sql.row_values import read
from oncely.stores.store import Change

LOADED = (
    "provider",
    "message_id",
    "status",
    "attempts",
    "fence",
    "first_processed_at",
    "last_processed_at",
    "lease_until",
    "metadata",
    "result",
    "fingerprint",
    "exhausted",
    "duplicates",
    "version",
)
"""The columns that `record_of` takes first, in its order; times as seconds since 1970, JSON as
text.
"""

INSERTED = (
    *("message_id", "provider", "status", "attempts", "metadata", "fence", "version"),
    "fingerprint",
)
"""The columns that an insert writes as they are given."""

SWAPPED = (*INSERTED[2:], "result", "exhausted", "duplicates")
"""The columns that a swap writes as they are given."""

WAITING = (
    *("queue", "name", "message_id", "provider", "position", "destination", "own_id", "type"),
    *("body", "headers", "source", "sent_at", "content_type", "ordering_key", "delay_s", "lane"),
    *("attempts", "error", "reason", "set_aside"),
)
"""The columns that are given for a waiting message."""
RENEWED = WAITING[WAITING.index("own_id") :]
"""Those of them that are replaced in a row that is there."""

TIMES = ("first_processed_at", "last_processed_at", "lease_until")

Pair = tuple[Record, Record]
"""The record that a swap replaces, and the new one."""


class Columns(NamedTuple):
    """Values for a statement, by the names of their columns: those that differ from row to row, and
    those that do not. In a single row, none differ. `lease_s` is the lease, counted from the write.
    """

    varying: Mapping[str, Sequence[Any]]
    constant: Mapping[str, Any]
    rows: int
    """How many."""

    def each(self) -> Iterator[dict[str, Any]]:
        """Each row, by the names of its columns."""
        for values in zip(*self.varying.values(), strict=True) if self.varying else [()]:
            yield {**self.constant, **dict(zip(self.varying, values, strict=True))}


_STATUSES = {state: state.value for state in State}
_STATES = {state.value: state for state in State}
"""Looked up here: an enum's own lookups would take as long as the rest of a row."""
_BELIEVED = ("message_id", "provider", "believed")
_WRITTEN = ("status", "attempts", "metadata", "fence", "version", "lease_s", "fingerprint")


def record_of(table: Table, row: Sequence[Any]) -> Record:
    """The record in a row of `LOADED`. Raises UnreadableRow."""
    (consumer, message_id, status, attempts, fence, first_seen, last_seen, lease_until) = row[:8]
    metadata, result, fingerprint, exhausted, duplicates, version = row[8 : len(LOADED)]
    # A service that shares the table may leave attempts out.
    attempts = 1 if attempts is None else attempts
    try:
        # Not one by one: nearly all rows are as they were written.
        index(attempts | fence | exhausted | duplicates | version)
        moments = first_seen + last_seen + (0.0 if lease_until is None else lease_until)
        if not isfinite(moments) or type(consumer + message_id + (fingerprint or "")) is not str:
            raise ValueError
        return Record(
            key=Key(consumer, message_id),
            state=_STATES[status],
            attempts=attempts,
            fence=fence,
            first_seen=first_seen,
            last_seen=last_seen,
            lease_until=lease_until,
            metadata=None if metadata is None else _mapping(metadata),
            result=None if result is None else json.loads(result),
            fingerprint=fingerprint,
            exhausted=bool(exhausted),
            duplicates=duplicates,
            version=version,
        )
    except (KeyError, TypeError, ValueError, RecursionError):
        read(table, LOADED, row)
        raise


def completed_since(rows: Iterable[Sequence[Any]], since: float) -> dict[str, float]:
    """Of rows of `LOADED` that are completed and were last seen after `since`, the message ids and
    when each was first seen. To make records of the rows would take longer than to read them.
    """
    is_completed = State.COMPLETED.value
    return {
        message_id: first_seen
        for _, message_id, status, _, _, first_seen, last_seen, *_ in rows
        if status == is_completed and last_seen > since
    }


def inserted(records: Sequence[Record]) -> Columns:
    """The values that an insert writes; the other columns get their defaults."""

    def row(record: Record) -> tuple[Any, ...]:
        return *_of_key(record.key), *_written(record)

    names = ("message_id", "provider", *_WRITTEN)
    if type(records) is AlikeRecords and len(records) > 1:
        return _of_alike(names, row(records.first), records)
    return in_columns(names, map(row, records))


def swapped(changes: Sequence[Pair]) -> Columns:
    """The values that a swap looks for (`message_id`, `provider`, `believed`) and writes (the
    others).
    """

    def row(change: Pair) -> tuple[Any, ...]:
        old, new = change
        written = (_json(new.result), new.exhausted, new.duplicates)
        return *_of_key(old.key), old.version, *_written(new), *written

    names = (*_BELIEVED, *_WRITTEN, "result", "exhausted", "duplicates")
    if type(changes) is AlikeChanges and len(changes) > 1:
        first = row((changes.old.first, changes.new.first))
        return _of_alike(names, first, changes.new, _believed(changes.old))
    return in_columns(names, map(row, changes))


def believed(records: Sequence[Record]) -> Columns:
    """The values that a swap or a removal looks for."""

    def row(record: Record) -> tuple[Any, ...]:
        return *_of_key(record.key), record.version

    if type(records) is AlikeRecords and len(records) > 1:
        return _of_alike(_BELIEVED, row(records.first), records, _believed(records))
    return in_columns(_BELIEVED, map(row, records))


def sought(keys: Sequence[Key]) -> Columns:
    """The values that a load looks for."""
    return in_columns(_BELIEVED[:2], map(_of_key, keys))


def kept(rows: Sequence[Mapping[str, Any]]) -> Columns:
    """The values that an insert of waiting messages writes; each row has all of `WAITING`."""
    return in_columns(WAITING, ([row[name] for name in WAITING] for row in rows))


def in_columns(names: Sequence[str], rows: Iterable[Sequence[Any]]) -> Columns:
    """Rows of these columns, one or more."""
    values = [*rows]
    if len(values) == 1:
        return Columns({}, dict(zip(names, values[0], strict=True)), 1)
    return split_columns(dict(zip(names, zip(*values, strict=True), strict=True)))


def split_columns(columns: Mapping[str, Sequence[Any]]) -> Columns:
    """The same for values that are in columns already."""
    varying: dict[str, Sequence[Any]] = {}
    constant: dict[str, Any] = {}
    count = 0
    for name, values in columns.items():
        count = len(values)
        if values.count(values[0]) == count:
            constant[name] = values[0]
        else:
            varying[name] = list(values)
    return Columns(varying, constant, count)


def _of_alike(
    names: Sequence[str],
    first: Sequence[Any],
    records: AlikeRecords,
    more: Mapping[str, Sequence[Any]] = {},
) -> Columns:
    """Rows of records that are alike, of which the values of the first are `first`; `more` are
    columns in which the rows differ as well.
    """
    ids = [key.message_id for key in records.keys]
    varying: dict[str, Sequence[Any]] = {"message_id": ids, **more}
    for name in records.columns.keys() & names:
        values = records.columns[name]
        varying[name] = [*map(_json, values)] if name == "metadata" else values
    columns = zip(names, first, strict=True)
    constant = {name: value for name, value in columns if name not in varying}
    return Columns(varying, constant, len(records))


def _believed(records: AlikeRecords) -> Mapping[str, Sequence[Any]]:
    """The versions of these, where they differ, as a swap or a removal looks for them."""
    versions = records.columns.get("version")
    return {} if versions is None else {"believed": versions}


def parted(changes: Sequence[Change]) -> tuple[Sequence[Pair], Sequence[Record]]:
    """The swaps and the removals, each in the same order for all writers, so that none deadlock."""
    if type(changes) is AlikeChanges:
        alike = changes.at_indexes(_order(changes.old.keys))
        return cast(Sequence[Pair], alike), []
    ordered = sorted(changes, key=lambda change: _of_key(change.old.key))
    kept = [(old, new) for old, new in ordered if new is not None]
    return kept, [old for old, new in ordered if new is None]


def by_key(records: Sequence[Record]) -> Sequence[Record]:
    """The records in the same order for all writers, that of the index."""
    if type(records) is AlikeRecords:
        return records.at_indexes(_order(records.keys))
    if len(records) == 1:
        return list(records)
    return sorted(records, key=lambda record: _of_key(record.key))


def _order(keys: Sequence[Key]) -> Sequence[int]:
    """The places of the keys of one consumer, in that order."""
    ids = [key.message_id for key in keys]
    return sorted(range(len(ids)), key=ids.__getitem__)


def olds(pairs: Sequence[Pair]) -> Sequence[Record]:
    """The records that these replace."""
    return pairs.old if type(pairs) is AlikeChanges else [old for old, _ in pairs]


def by_index(keys: Collection[Key]) -> list[Key]:
    """The keys in that order."""
    return sorted(keys, key=_of_key)


def _mapping(text: str) -> Mapping[str, Any] | None:
    """Metadata; a service that shares the table may have put any JSON there."""
    metadata = json.loads(text)
    if isinstance(metadata, dict):
        return metadata
    return {"metadata": metadata} if metadata else None


def _of_key(key: Key) -> tuple[str, str]:
    # By message id first, as in the index: most keys of a batch have the same consumer.
    return key.message_id, key.consumer


def _written(record: Record) -> tuple[Any, ...]:
    """The values of `_WRITTEN`."""
    return (
        _STATUSES[record.state],
        record.attempts,
        _json(record.metadata),
        record.fence,
        record.version,
        record.lease_until,
        record.fingerprint,
    )


def _json(value: Any) -> str | None:
    return None if value is None else json.dumps(value)
