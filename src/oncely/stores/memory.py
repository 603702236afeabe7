"""Records in this process's memory: for tests, and for work that ends with the process."""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import islice
from typing import Any, TypeVar

from oncely.core.errors import ConfigError
from oncely.core.record import Key, Record, State
from oncely.stores.base import (
    Backlog,
    Change,
    Clock,
    Inside,
    Joined,
    KeyRange,
    Loaded,
    Query,
    Tally,
    Wanted,
)
from oncely.stores.memory_tables import Tables, own

T = TypeVar("T")


class MemoryStore:
    """Tables behind a lock."""

    has_transactions = True

    def __init__(self, clock: Clock = time.time) -> None:
        self._clock = clock
        # Whoever waits for deferred messages waits for this.
        self._lock = threading.Condition()
        self._tables = Tables(clock, self._lock.notify_all)

    def insert(self, records: Sequence[Record]) -> set[Key]:
        return self.transaction(lambda inside: inside.insert(records))

    def load(self, keys: Collection[Key]) -> Loaded:
        return self.transaction(lambda inside: inside.load(keys))

    def swap(self, changes: Sequence[Change]) -> set[Key]:
        return self.transaction(lambda inside: inside.swap(changes))

    def transaction(self, work: Callable[[Inside], T]) -> T:
        with self._lock:
            try:
                done = work(self._tables)
            except BaseException:
                self._tables.roll_back()
                raise
            self._tables.commit()
            return done

    def within(self, connection: Any) -> AbstractContextManager[Joined]:  # noqa: ARG002 - the protocol's.
        raise ConfigError(
            "transaction: a ledger in memory cannot be part of a database's transaction; open "
            "the ledger on that database, as in open_ledger(engine)"
        )

    def is_contention(self, error: Exception) -> bool:  # noqa: ARG002 - nobody is lost against.
        return False

    def backlog(self) -> Backlog:
        with self._lock:
            return self._tables.backlog()

    def send_again(self) -> int:
        return self.transaction(lambda _: self._tables.send_again())

    def wait_for_deferred(self, timeout_s: float) -> None:
        with self._lock:
            self._lock.wait_for(self._tables.some_can_be_sent, timeout_s)

    def scan(self, query: Query) -> Sequence[Record]:
        with self._lock:
            return [
                own(record)
                for record in sorted(self._fitting(query), key=_last_seen)[: query.limit]
            ]

    def key_ranges(self, number: int) -> Sequence[KeyRange]:  # noqa: ARG002 - the protocol's.
        return [KeyRange()]

    def read(self, keys: KeyRange, wanted: Wanted) -> Iterator[Sequence[Record]]:
        with self._lock:
            found = [own(record) for record in self._tables.records.values()]
        yield [
            record for record in found if keys.holds(record.key.message_id) and wanted.holds(record)
        ]

    def tallies(self) -> Mapping[tuple[str, State], Tally]:
        groups: dict[tuple[str, State], list[Record]] = defaultdict(list)
        with self._lock:
            now = self._clock()
            for record in self._tables.records.values():
                groups[record.key.consumer, record.state].append(record)
            return {name: _tally(records, now) for name, records in groups.items()}

    def purge(self, query: Query, states: Sequence[State]) -> int:
        def purge(_: Inside) -> int:
            fitting = [record for record in self._fitting(query) if record.state in states]
            oldest = sorted(fitting, key=_last_seen)
            purged = (record for record in oldest if self._tables.purge(record.key))
            count = sum(1 for _ in islice(purged, query.limit))
            self._tables.purge_steps(query.consumer, query.older_than_s or 0.0)
            return count

        return self.transaction(purge)

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
        for record in self._tables.records.values():
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
