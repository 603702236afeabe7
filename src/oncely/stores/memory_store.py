"""Records in this process's memory: for tests, and for work that ends with the process."""

import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import islice
from operator import attrgetter
from typing import Any, Concatenate, ParamSpec, TypeVar

from oncely._util.clock import wall_time
from oncely._util.forking import afresh_in_children
from oncely.core.message import Message
from oncely.core.record import Key, Record, State
from oncely.core.waiting import WaitingMessage
from oncely.stores.memory_tables import MemoryTables, own
from oncely.stores.notifications import Notifications, ProcessSignal
from oncely.stores.store import (
    CallersTransaction,
    Clock,
    KeyRange,
    Listing,
    Look,
    Query,
    Store,
    Tally,
    Transaction,
    Wanted,
    Window,
    lease_is_over,
    never_joined,
)

P = ParamSpec("P")
T = TypeVar("T")

_LOOK_S = 0.05
"""How often to poll, besides being woken: a held message may have become free."""


def _alone(
    call: Callable[Concatenate[MemoryTables, P], T],
) -> Callable[Concatenate[Any, P], T]:
    """A call of the tables that is a transaction by itself."""

    def method(store: "MemoryStore", /, *args: P.args, **options: P.kwargs) -> T:
        return store.transaction(lambda _: call(store._tables, *args, **options))

    return method


class MemoryStore(Store):
    """Tables behind a lock."""

    has_transactions = True

    def __init__(self, clock: Clock = wall_time) -> None:
        self._clock = clock
        self.notifications = Notifications(ProcessSignal(), _LOOK_S)
        self._tables = MemoryTables(clock, self.notifications.signal.send)
        self._bindings: set[tuple[str, str]] = set()
        self.start_afresh()
        afresh_in_children(self)

    def start_afresh(self) -> None:
        """Undo the open transaction of another thread of the parent: called in a forked child."""
        # Of C, as the lock of ProcessSignal.
        self._lock = threading.RLock()
        self._tables.roll_back()

    insert = _alone(MemoryTables.insert)
    horizons = _alone(MemoryTables.horizons)
    load = _alone(MemoryTables.load)
    update = _alone(MemoryTables.update)
    delete = _alone(MemoryTables.delete)
    forget_until = _alone(MemoryTables.forget_until)

    def transaction(self, work: Callable[[Transaction], T]) -> T:
        with self._lock:
            try:
                done = work(self._tables)
            except BaseException:
                self._tables.roll_back()
                raise
            self._tables.commit()
            return done

    def within(self, connection: Any) -> AbstractContextManager[CallersTransaction]:  # noqa: ARG002 - the protocol's.
        raise never_joined("in memory")

    def check_joins(self, source: object) -> None:  # noqa: ARG002 - the protocol's.
        raise never_joined("in memory")

    backlogs = _alone(MemoryTables.backlogs)

    def free_in_s(self, queue: str) -> float | None:
        with self._lock:
            return self._tables.free_in_s(queue)

    def listed(self, listing: Listing) -> Iterator[WaitingMessage]:
        with self._lock:
            return iter(self._tables.listed(listing))

    def wait_for_messages(self, timeout_s: float) -> None:
        signal = self.notifications.signal
        seen = signal.count
        with self._lock:
            some_can_be_sent = self._tables.some_can_be_sent()
        if not some_can_be_sent:
            signal.wait(seen, timeout_s)

    def put(self, queue: str, messages: Sequence[Message]) -> None:
        """Put messages into the queue of that name: all, or none."""
        waiting = WaitingMessage.queued(queue, messages)
        self.transaction(lambda transaction: transaction.keep(waiting))

    def bind(self, queue: str, topics: Collection[str]) -> None:
        """Let events of these topics into the queue; the topic "" only says that it is there."""
        with self._lock:
            self._bindings.update((queue, topic) for topic in topics)

    def bindings(self, queue: str | None = None) -> Sequence[tuple[str, str]]:
        """Queues and topics, as they were bound, of one queue or of all."""
        with self._lock:
            return sorted(each for each in self._bindings if queue in (None, each[0]))

    def scan(self, query: Query) -> Sequence[Record]:
        with self._lock:
            return [own(record) for record in self._fitting(query)[: query.limit]]

    def of_message(self, message_id: str) -> Sequence[Record]:
        with self._lock:
            found = [
                own(record)
                for record in self._tables.records.values()
                if record.key.message_id == message_id
            ]
        return sorted(found, key=attrgetter("key"))

    def window(self, look: Look) -> Window:
        with self._lock:
            now = self._clock()
            keys = sorted(
                (message_id, consumer)
                for consumer, message_id in self._tables.records
                if message_id.startswith(look.begins)
                and (look.after is None or message_id > look.after)
            )
            # The records of one id stay together.
            last = keys[look.size - 1][0] if len(keys) > look.size else None
            part = [key for key in keys if last is None or key[0] <= last]
            rows = []
            for message_id, consumer in part:
                record = self._tables.records[Key(consumer, message_id)]
                fits = any(query.holds(record, now) for query in look.fits)
                rows.append((message_id, consumer, fits))
        return Window.of(rows, look.limit, is_last=len(part) == len(keys))

    def read(self, keys: KeyRange, wanted: Wanted) -> Iterator[Sequence[Record]]:
        with self._lock:
            found = [own(record) for record in self._tables.records.values()]
        yield [
            record for record in found if keys.holds(record.key.message_id) and wanted.holds(record)
        ]

    def tallies(
        self,
        most: int | None = None,  # noqa: ARG002 - all are read.
    ) -> Mapping[tuple[str, State], Tally]:
        groups: dict[tuple[str, State], list[Record]] = defaultdict(list)
        with self._lock:
            now = self._clock()
            for record in self._tables.records.values():
                groups[record.key.consumer, record.state].append(record)
            return {
                name: Tally(
                    count=len(records),
                    lease_over=sum(lease_is_over(record, now) for record in records),
                    oldest=min(record.last_seen for record in records),
                    duplicates=sum(record.duplicates for record in records),
                    for_sender=sum(record.waits_for_sender for record in records),
                    over_since=min(
                        (each.lease_until or now for each in records if lease_is_over(each, now)),
                        default=None,
                    ),
                    for_sender_since=min(
                        (each.last_seen for each in records if each.waits_for_sender), default=None
                    ),
                )
                for name, records in groups.items()
            }

    def purge(self, query: Query, states: Sequence[State]) -> int:
        def purge(_: Transaction) -> int:
            fitting = (record for record in self._fitting(query) if record.state in states)
            gone = (record.key.consumer for record in fitting if self._tables.purge(record.key))
            purged = list(islice(gone, query.limit))
            before = self._clock() - (query.older_than_s or 0.0)
            self._tables.forget_until(dict.fromkeys(purged, before))
            self._tables.purge_steps(query.consumer, query.older_than_s or 0.0)
            return len(purged)

        return self.transaction(purge)

    def keep_retention(self, consumer: str, retention_s: float) -> None:
        with self._lock:
            self._tables.retentions[consumer] = retention_s

    def retentions(self) -> Mapping[str, float]:
        with self._lock:
            return dict(self._tables.retentions)

    def migrate(self) -> None:
        pass

    def close(self) -> None:
        pass

    def _fitting(self, query: Query) -> list[Record]:
        """The records that fit, least recently seen first."""
        now = self._clock()
        records = self._tables.records.values()
        fitting = [record for record in records if query.holds(record, now)]
        return sorted(fitting, key=attrgetter("last_seen"))
