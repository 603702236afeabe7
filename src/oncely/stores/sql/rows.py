"""Between records and rows."""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from oncely.core.errors import StoreError
from oncely.core.record import Key, Record, State
from oncely.stores.base import Change

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
"""The columns that `record_of` takes, in its order; times as seconds since 1970, JSON as text."""

DEFERRED = (
    *("name", "message_id", "provider", "position", "destination", "deferred_id", "type", "body"),
    *("headers", "source", "sent_at", "content_type", "ordering_key", "delay_s", "lane"),
)
"""The columns that are given for a deferred message."""

TIMES = ("first_processed_at", "last_processed_at", "lease_until")

Pair = tuple[Record, Record]
"""What a swap replaces, and by what."""

Columns = Mapping[str, Sequence[Any]]
"""The values of each column, for many rows. `lease_s` is the lease, counted from the write."""


def record_of(row: Sequence[Any]) -> Record:
    """The record in a row of `LOADED`."""
    (consumer, message_id, status, attempts, fence, first_seen, last_seen, lease_until) = row[:8]
    metadata, result, fingerprint, exhausted, duplicates, version = row[8:]
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


def state_of(status: str) -> State:
    """The state that a status column means. Raises StoreError where it means none."""
    try:
        return State(status)
    except ValueError:
        known = ", ".join(State)
        raise StoreError(f"a row has the status {status!r}, which is none of {known}") from None


def inserted(records: Sequence[Record]) -> Columns:
    """What an insert writes; the other columns have their defaults."""
    return {
        "message_id": [record.key.message_id for record in records],
        "provider": [record.key.consumer for record in records],
        "status": [record.state.value for record in records],
        "attempts": [record.attempts for record in records],
        "metadata": [_json(record.metadata) for record in records],
        "fence": [record.fence for record in records],
        "version": [record.version for record in records],
        "lease_s": [record.lease_until for record in records],
        "fingerprint": [record.fingerprint for record in records],
    }


def swapped(changes: Sequence[Pair]) -> Columns:
    """What a swap looks for (`message_id`, `provider`, `believed`) and writes (the rest)."""
    news = [new for _, new in changes]
    return {
        **believed([old for old, _ in changes]),
        "status": [new.state.value for new in news],
        "attempts": [new.attempts for new in news],
        "metadata": [_json(new.metadata) for new in news],
        "fence": [new.fence for new in news],
        "version": [new.version for new in news],
        "lease_s": [new.lease_until for new in news],
        "fingerprint": [new.fingerprint for new in news],
        "result": [_json(new.result) for new in news],
        "exhausted": [new.exhausted for new in news],
        "duplicates": [new.duplicates for new in news],
    }


def believed(records: Sequence[Record]) -> Columns:
    """What a swap or a removal looks for."""
    return {
        "message_id": [record.key.message_id for record in records],
        "provider": [record.key.consumer for record in records],
        "believed": [record.version for record in records],
    }


def key_columns(keys: Sequence[Key]) -> Columns:
    """What a load looks for."""
    return {
        "message_id": [key.message_id for key in keys],
        "provider": [key.consumer for key in keys],
    }


def parted(changes: Sequence[Change]) -> tuple[list[Pair], list[Record]]:
    """The swaps and the removals, each in one order for all: so no two writers deadlock."""
    ordered = sorted(changes, key=_changed_place)
    kept = [(old, new) for old, new in ordered if new is not None]
    return kept, [old for old, new in ordered if new is None]


def by_key(records: Sequence[Record]) -> list[Record]:
    """The records in one order for all writers, which is that of the index."""
    return sorted(records, key=_place)


def by_place(keys: Collection[Key]) -> list[Key]:
    """The keys in that order."""
    return sorted(keys, key=lambda key: key[::-1])


def _mapping(text: str) -> Mapping[str, Any] | None:
    """Metadata; a hand-written service may have put anything there."""
    try:
        metadata = json.loads(text)
    except ValueError:
        metadata = text
    if isinstance(metadata, dict):
        return metadata
    return {"metadata": metadata} if metadata else None


def _json(value: Any) -> str | None:
    return None if value is None else json.dumps(value)


def _place(record: Record) -> tuple[str, ...]:
    # By message id first: among those of one consumer it is what differs.
    return record.key[::-1]


def _changed_place(change: Change) -> tuple[str, ...]:
    return change.old.key[::-1]
