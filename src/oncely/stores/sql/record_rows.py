"""Between records and rows."""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from oncely.core.errors import StoreError
from oncely.core.record import Key, Record, State
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
"""Those that a swap does."""

WAITING = (
    *("queue", "name", "message_id", "provider", "position", "destination", "own_id", "type"),
    *("body", "headers", "source", "sent_at", "content_type", "ordering_key", "delay_s", "lane"),
    *("attempts", "error", "reason", "set_aside"),
)
"""The columns that are given for a message that waits."""
RENEWED = WAITING[WAITING.index("own_id") :]
"""Those of them that are given anew for one that is there."""

TIMES = ("first_processed_at", "last_processed_at", "lease_until")

Pair = tuple[Record, Record]
"""What a swap replaces, and by what."""


class RowValues(NamedTuple):
    """Values for a statement. `lease_s` is the lease, counted from the write."""

    names: Sequence[str]
    """Of the columns."""
    values: Sequence[Sequence[Any]]
    """Of each row, one for each column."""


_STATUSES = {state: state.value for state in State}
_STATES = {state.value: state for state in State}
"""To ask a state for its value, or the other way about, takes as long as the rest of its row."""
_BELIEVED = ("message_id", "provider", "believed")
_WRITTEN = ("status", "attempts", "metadata", "fence", "version", "lease_s", "fingerprint")


def record_of(row: Sequence[Any]) -> Record:
    """The record in a row of `LOADED`."""
    (consumer, message_id, status, attempts, fence, first_seen, last_seen, lease_until) = row[:8]
    metadata, result, fingerprint, exhausted, duplicates, version = row[8 : len(LOADED)]
    return Record(
        key=Key(consumer, message_id),
        state=state_of(status),
        # A row written by hand may tell less, and more, than ours do.
        attempts=1 if attempts is None else attempts,
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


def completed_since(rows: Iterable[Sequence[Any]], since: float) -> dict[str, float]:
    """Of rows of `LOADED` that are completed, and were last seen after `since`, the message ids and
    when they were first seen. To make records of them would take longer than to read them.
    """
    is_completed = State.COMPLETED.value
    return {
        message_id: first_seen
        for _, message_id, status, _, _, first_seen, last_seen, *_ in rows
        if status == is_completed and last_seen > since
    }


def state_of(status: str) -> State:
    """The state that a status column means. Raises StoreError where it means none."""
    try:
        return _STATES[status]
    except KeyError:
        known = ", ".join(State)
        raise StoreError(f"a row has the status {status!r}, which is none of {known}") from None


def inserted(records: Sequence[Record]) -> RowValues:
    """What an insert writes; the other columns have their defaults."""
    names = ("message_id", "provider", *_WRITTEN)
    return RowValues(names, [(*_of_key(record.key), *_written(record)) for record in records])


def swapped(changes: Sequence[Pair]) -> RowValues:
    """What a swap looks for (`message_id`, `provider`, `believed`) and writes (the rest)."""
    return RowValues(
        (*_BELIEVED, *_WRITTEN, "result", "exhausted", "duplicates"),
        [
            (
                *(*_of_key(old.key), old.version, *_written(new)),
                *(_json(new.result), new.exhausted, new.duplicates),
            )
            for old, new in changes
        ],
    )


def believed(records: Sequence[Record]) -> RowValues:
    """What a swap or a removal looks for."""
    return RowValues(_BELIEVED, [(*_of_key(record.key), record.version) for record in records])


def sought(keys: Sequence[Key]) -> RowValues:
    """What a load looks for."""
    return RowValues(_BELIEVED[:2], [_of_key(key) for key in keys])


def kept(rows: Sequence[Mapping[str, Any]]) -> RowValues:
    """What an insert of messages that wait writes; each row has all of `WAITING`."""
    return RowValues(WAITING, [[row[name] for name in WAITING] for row in rows])


def parted(changes: Sequence[Change]) -> tuple[list[Pair], list[Record]]:
    """The swaps and the removals, each in one order for all: so no two writers deadlock."""
    ordered = sorted(changes, key=lambda change: _of_key(change.old.key))
    kept = [(old, new) for old, new in ordered if new is not None]
    return kept, [old for old, new in ordered if new is None]


def by_key(records: Sequence[Record]) -> list[Record]:
    """The records in one order for all writers, which is that of the index."""
    if len(records) == 1:
        return list(records)
    return sorted(records, key=lambda record: _of_key(record.key))


def by_place(keys: Collection[Key]) -> list[Key]:
    """The keys in that order."""
    return sorted(keys, key=_of_key)


def _mapping(text: str) -> Mapping[str, Any] | None:
    """Metadata; a hand-written service may have put anything there."""
    try:
        metadata = json.loads(text)
    except ValueError:
        metadata = text
    if isinstance(metadata, dict):
        return metadata
    return {"metadata": metadata} if metadata else None


def _of_key(key: Key) -> tuple[str, str]:
    # By message id first: among those of one consumer it is what differs.
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
