"""Converts between records and rows."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import isfinite
from operator import index
from typing import Any, NamedTuple, TypeVar

from sqlalchemy import Table

from oncely.core.cases import Case, Row
from oncely.core.change import Change
from oncely.core.record import Key, Record, State
from oncely.stores.sql.row_values import read
from oncely.stores.store import Believed

T = TypeVar("T")

MOST_ROWS = 5_000
"""Rows in one statement: enough to make its cost vanish."""
MOST_BYTES = 4_000_000
"""Of metadata and results in one statement: servers take 16 MB, and escapes may double them."""

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
    "worker",
)
"""The columns that `record_of` takes first, in its order; times as seconds since 1970, JSON as
text.
"""

INSERTED = (
    *("message_id", "provider", "status", "attempts", "metadata", "fence", "version"),
    *("fingerprint", "worker"),
)
"""The columns that an insert writes as they are given."""

UPDATED = (*INSERTED[2:], "result", "exhausted", "duplicates")
"""The columns that an update may write as they are given."""

WAITING = (
    *("queue", "name", "message_id", "provider", "position", "destination", "own_id", "type"),
    *("body", "headers", "source", "sent_at", "content_type", "ordering_key", "delay_s", "lane"),
    *("attempts", "error", "reason", "set_aside"),
)
"""The columns that are given for a waiting message."""
RENEWED = WAITING[WAITING.index("own_id") :]
"""Those of them that are replaced in a row that is there."""

TIMES = ("first_processed_at", "last_processed_at", "lease_until")


class Columns(NamedTuple):
    """Values for a statement, by the names of their columns: those that differ from row to row, and
    those that do not. In a single row, none differ. `lease_s` is the lease, counted from the write.
    """

    varying: Mapping[str, Sequence[Any]]
    constant: Mapping[str, Any]


_STATES = {state.value: state for state in State}
"""Looked up here: an enum's own lookups would take as long as the rest of a row."""
_WRITTEN: Mapping[str, tuple[str, Callable[[Any], str]]] = {
    "state": ("status", {state: state.value for state in State}.__getitem__),
    "metadata": ("metadata", json.dumps),
    "result": ("result", json.dumps),
}
"""The fields of a change whose columns have other names or values, with those."""
_NO_CHANGE = Change(0, {})


def record_of(table: Table, row: Sequence[Any]) -> Record:
    """The record in a row of `LOADED`. Raises UnreadableRow."""
    (consumer, message_id, status, attempts, fence, first_seen, last_seen, lease_until) = row[:8]
    metadata, result, fingerprint, exhausted, duplicates, version, worker = row[8 : len(LOADED)]
    # A service that shares the table may leave attempts out.
    attempts = 1 if attempts is None else attempts
    try:
        # Not one by one: nearly all rows are as they were written.
        index(attempts | fence | exhausted | duplicates | version | (worker or 0))
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
            # A service that shares the table may have put any JSON there.
            metadata=None if metadata is None else _mapping(json.loads(metadata)),
            result=None if result is None else json.loads(result),
            fingerprint=fingerprint,
            exhausted=bool(exhausted),
            duplicates=duplicates,
            version=version,
            worker=worker,
        )
    except (KeyError, TypeError, ValueError, RecursionError):
        read(table, LOADED, row)
        raise


def columns_of(case: Case) -> Columns:
    """The values that an insert writes, or an update; and those that the update looks for:
    `message_id`, `provider`, `believed`.
    """
    keys, believed, versions, *values = zip(*case.rows, strict=True)
    providers, ids = zip(*keys, strict=True)
    columns: dict[str, Sequence[Any]] = {"message_id": ids, "provider": providers}
    columns["version"] = versions
    if believed[0] is not None:
        columns["believed"] = believed
    own = dict(zip(case.own, values, strict=True))
    constant = {}
    for name, value in case.change.fields.items():
        column, write = _WRITTEN.get(name, (name, None))
        if name not in own:
            constant[column] = value if write is None or value is None else write(value)
        elif write is None:
            columns[column] = own[name]
        else:
            columns[column] = [None if each is None else write(each) for each in own[name]]
    if len(keys) == 1:
        [row] = zip(*columns.values(), strict=True)
        return Columns({}, dict(zip(columns, row, strict=True)) | constant)
    return split_columns(columns, constant)


def removed(rows: Sequence[Believed]) -> Case:
    """The case of a removal."""
    return Case(_NO_CHANGE, (), rows)


def believed(rows: Sequence[Row]) -> Columns:
    """The values that a removal looks for."""
    keys, versions = zip(*rows, strict=True)
    return split_columns({**_of_keys(keys), "believed": versions})


def sought(keys: Sequence[Key]) -> Columns:
    """The values that a load looks for."""
    return split_columns(_of_keys(keys))


def _of_keys(keys: Sequence[Key]) -> dict[str, Sequence[str]]:
    providers, ids = zip(*keys, strict=True)
    return {"message_id": ids, "provider": providers}


def kept(rows: Sequence[Mapping[str, Any]]) -> Columns:
    """The values that an insert of waiting messages writes; each row has all of `WAITING`."""
    return split_columns({name: [row[name] for row in rows] for name in WAITING})


def split_columns(
    columns: Mapping[str, Sequence[Any]], constant: Mapping[str, Any] = {}
) -> Columns:
    """The same for values that are in columns already; and what is `constant` in all rows."""
    varying: dict[str, Sequence[Any]] = {}
    same = {**constant}
    for name, values in columns.items():
        if values.count(values[0]) == len(values):
            same[name] = values[0]
        else:
            varying[name] = list(values)
    return Columns(varying, same)


def batches(items: Sequence[T], weigh: Callable[[T], int] | None = None) -> Iterable[Sequence[T]]:
    """`items` in parts of at most `MOST_ROWS`, and `MOST_BYTES` by the sizes that `weigh` gives."""
    if weigh is None:
        return [items[start : start + MOST_ROWS] for start in range(0, len(items), MOST_ROWS)]
    found: list[list[T]] = []
    weight = MOST_BYTES
    for item in items:
        weight += weigh(item)
        if not found or len(found[-1]) == MOST_ROWS or weight > MOST_BYTES:
            found.append([])
            weight = weigh(item)
        found[-1].append(item)
    return found


def _mapping(metadata: Any) -> Mapping[str, Any] | None:
    if isinstance(metadata, dict):
        return metadata
    return {"metadata": metadata} if metadata else None
