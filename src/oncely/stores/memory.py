"""Records in this process's memory: for tests, and for work that ends with the process."""

import threading
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy

from oncely.core.record import Key, Record, State
from oncely.stores.base import Change, Clock, Loaded, Query, Tally


class MemoryStore:
    """A dict behind a lock."""

    def __init__(self, clock: Clock = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._records: dict[Key, Record] = {}

    def insert(self, records: Sequence[Record]) -> set[Key]:
        with self._lock:
            now = self._clock()
            absent = [record for record in records if record.key not in self._records]
            for record in absent:
                self._records[record.key] = _at(record, now)._replace(first_seen=now)
            return {record.key for record in absent}

    def load(self, keys: Collection[Key]) -> Loaded:
        with self._lock:
            found = {key: _own(self._records[key]) for key in keys if key in self._records}
            return Loaded(found, self._clock())

    def swap(self, changes: Sequence[Change]) -> set[Key]:
        written = set()
        with self._lock:
            now = self._clock()
            for old, new in changes:
                stored = self._records.get(old.key)
                if stored is None or stored.version != old.version:
                    continue
                if new is None:
                    del self._records[old.key]
                else:
                    self._records[old.key] = _at(new, now)._replace(first_seen=stored.first_seen)
                written.add(old.key)
        return written

    def scan(self, query: Query) -> Sequence[Record]:
        with self._lock:
            return [
                _own(record)
                for record in sorted(self._fitting(query), key=_last_seen)[: query.limit]
            ]

    def tallies(self) -> Mapping[tuple[str, State], Tally]:
        groups: dict[tuple[str, State], list[Record]] = defaultdict(list)
        with self._lock:
            now = self._clock()
            for record in self._records.values():
                groups[record.key.consumer, record.state].append(record)
            return {name: _tally(records, now) for name, records in groups.items()}

    def purge(self, query: Query, states: Sequence[State]) -> int:
        with self._lock:
            purgeable = [record for record in self._fitting(query) if record.state in states]
            oldest = sorted(purgeable, key=_last_seen)[: query.limit]
            for record in oldest:
                del self._records[record.key]
            return len(oldest)

    def migrate(self) -> None:
        pass

    def migration_sql(self) -> str:
        return ""

    def problems(self) -> Sequence[str]:
        return []

    def size(self) -> int | None:
        return None

    def close(self) -> None:
        pass

    def _fitting(self, query: Query) -> Iterator[Record]:
        now = self._clock()
        for record in self._records.values():
            if query.consumer is not None and record.key.consumer != query.consumer:
                continue
            if query.state is not None and record.state is not query.state:
                continue
            if query.older_than_s is not None and now - record.last_seen <= query.older_than_s:
                continue
            if query.text is not None and query.text not in record.key.message_id:
                continue
            if query.lease_over and not _lease_is_over(record, now):
                continue
            yield record


def _at(record: Record, now: float) -> Record:
    lease_until = None if record.lease_until is None else now + record.lease_until
    return _own(record)._replace(last_seen=now, lease_until=lease_until)


def _own(record: Record) -> Record:
    """A record that shares no part with this one which somebody could change."""
    if record.metadata is None and record.result is None:
        return record
    return record._replace(metadata=deepcopy(record.metadata), result=deepcopy(record.result))


def _lease_is_over(record: Record, now: float) -> bool:
    return record.lease_until is not None and record.lease_until <= now


def _tally(records: Sequence[Record], now: float) -> Tally:
    return Tally(
        count=len(records),
        lease_over=sum(_lease_is_over(record, now) for record in records),
        oldest=min(record.last_seen for record in records),
        duplicates=sum(record.duplicates for record in records),
    )


def _last_seen(record: Record) -> float:
    return record.last_seen
