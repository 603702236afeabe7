"""The tables of the store in memory: dicts, with a list of what a transaction has to undo."""

import json
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import count, islice
from operator import itemgetter
from typing import Any, NamedTuple

from oncely.core.cases import Case, Row
from oncely.core.message import Message
from oncely.core.record import Key, Record
from oncely.core.waiting import OUTBOX, WaitingMessage
from oncely.stores.store import Backlog, Believed, Clock, Horizons, Listing, Loaded, PutBack

_Undo = Callable[[], object]


class WaitingRow(NamedTuple):
    """A waiting message as it is stored. Times are by the store's clock."""

    message: WaitingMessage
    held_until: float = 0.0

    @property
    def free_at(self) -> float:
        """When it can be taken."""
        return max(self.message.due or 0.0, self.held_until)


class MemoryTables:
    """Records, waiting messages, steps, and the retentions and horizons of consumers. The caller
    holds the store's lock.
    """

    def __init__(self, clock: Clock, on_kept: Callable[[], object] = lambda: None) -> None:
        self.clock = clock
        self.on_kept = on_kept
        self.records: dict[Key, Record] = {}
        self.retentions: dict[str, float] = {}
        self._horizons: dict[str, float] = {}
        self._queues: dict[str, dict[int, WaitingRow]] = defaultdict(dict)
        """The waiting messages, by queue and number."""
        self._queue_of: dict[int, str] = {}
        """The queue of each number."""
        self._unsorted: set[str] = set()
        """Queues in which a number may come after a higher one."""
        self._lanes: dict[str, dict[str, int]] = defaultdict(dict)
        """How many messages of each lane of a queue wait and are not set aside."""
        self._told_by: dict[tuple[Key, str], int] = {}
        self._steps: dict[tuple[Key, str], tuple[str, float]] = {}
        """The results of finished steps as JSON, and when each was kept."""
        self._numbers = count(1)
        self._undo: list[_Undo] = []
        self._has_kept = False
        """Whether more messages may be free to take since the last commit."""

    def commit(self) -> None:
        """Keep what was done."""
        self._undo.clear()
        if self._has_kept:
            self._has_kept = False
            self.on_kept()

    def roll_back(self) -> None:
        """Undo what was done since the last commit."""
        self._has_kept = False
        self._unsorted |= {*self._queues} if self._undo else set()
        while self._undo:
            self._undo.pop()()

    # ---- Records -------------------------------------------------------------------------------

    def insert(self, case: Case, believed: Mapping[str, float | None] | None = None) -> set[Key]:
        now = self.clock()
        wrong = {name for name, at in (believed or {}).items() if self._horizons.get(name) != at}
        rows = [
            row for row in case.rows if row[0] not in self.records and row[0].consumer not in wrong
        ]
        return self._write_all(case, rows, None, now)

    def load(self, keys: Collection[Key]) -> Loaded:
        found = {key: own(self.records[key]) for key in keys if key in self.records}
        return Loaded(found, self.clock())

    def update(self, case: Case) -> set[Key]:
        rows = [row for row in case.rows if self._is_unchanged(row)]
        return self._write_all(case, rows, [self.records[row[0]] for row in rows], self.clock())

    def delete(self, rows: Sequence[Believed]) -> set[Key]:
        keys = {row[0] for row in rows if self._is_unchanged(row)}
        for key in keys:
            self._take_out(self.records, key)
        return keys

    def _is_unchanged(self, row: Row) -> bool:
        stored = self.records.get(row[0])
        return stored is not None and stored.version == row[1]

    def _write_all(
        self, case: Case, rows: Sequence[Row], former: Sequence[Record] | None, now: float
    ) -> set[Key]:
        """Write these rows of a case over what was there."""
        if not rows:
            return set()
        records = case.written(rows, former, now)
        if {*case.own, *case.change.fields} & {"metadata", "result"}:
            records = map(own, records)
        written = dict(zip(map(itemgetter(0), rows), records, strict=True))
        self._put_all(self.records, written)
        return {*written}

    def purge(self, key: Key) -> bool:
        """Remove a record with its steps, unless it has waiting messages."""
        if self.waiting([key]):
            return False
        self._take_out(self.records, key)
        self.forget_steps(key)
        return True

    def purge_steps(self, consumer: str | None, older_than_s: float) -> None:
        """Remove old steps without a record: their message was released and never redelivered."""
        now = self.clock()
        for (key, name), (_, kept_at) in list(self._steps.items()):
            is_asked = consumer is None or key.consumer == consumer
            if is_asked and key not in self.records and now - kept_at > older_than_s:
                self._take_out(self._steps, (key, name))

    # ---- Horizons ------------------------------------------------------------------------------

    def horizons(self, consumers: Collection[str]) -> Horizons:
        return {name: self._horizons[name] for name in consumers if name in self._horizons}

    def forget_until(self, horizons: Horizons) -> None:
        for consumer, at in horizons.items():
            if at > self._horizons.get(consumer, -math.inf):
                self._put(self._horizons, consumer, at)

    # ---- Messages that wait --------------------------------------------------------------------

    def keep(self, messages: Sequence[WaitingMessage], *, renews: bool = False) -> None:
        for message in sorted(messages, key=lambda message: message.position):
            told_by = (message.parent, message.name)
            number = self._told_by.get(told_by)
            if number is None:
                number = next(self._numbers)
                self._put(self._told_by, told_by, number)
                self._write(message, number, self.clock())
            elif renews:
                self._write(message, number, self._row(number).message.since)
        self._has_kept = True

    def _write(self, message: WaitingMessage, number: int, since: float | None) -> None:
        now = self.clock()
        kept = replace(
            message,
            number=number,
            message=_own_message(message.message),
            since=since,
            last_seen=now,
            due=now + message.delay_s,
        )
        self._renew(WaitingRow(kept))

    def waiting(self, keys: Collection[Key]) -> Sequence[WaitingMessage]:
        return [row.message for row in self.rows() if row.message.parent in keys]

    def unparented(self, message_id: str) -> Sequence[WaitingMessage]:
        found = (row.message for row in self.rows())
        return [each for each in found if each.id == message_id and not each.parent.consumer]

    def numbered(self, numbers: Collection[int]) -> Sequence[WaitingMessage]:
        return [self._row(number).message for number in sorted(numbers) if number in self._queue_of]

    def idle(self, numbers: Collection[int]) -> Sequence[WaitingMessage]:
        now, rows = self.clock(), map(self._row, sorted(self._queue_of.keys() & numbers))
        return [r.message for r in rows if r.message.is_set_aside or r.held_until <= now]

    def lanes(self, queue: str, lanes: Collection[str]) -> set[str]:
        return {lane for lane in lanes if lane in self._lanes[queue]}

    def take(
        self,
        queue: str,
        limit: int,
        hold_s: float,
        parents: Collection[Key] | None = None,
        *,
        one_per_lane: bool = False,
        counts: bool = False,
    ) -> Sequence[WaitingMessage]:
        now = self.clock()
        if queue in self._unsorted:
            self._put(self._queues, queue, self._in_order(queue))
            self._unsorted.remove(queue)
        rows = self._open(queue, now, parents, one_per_lane=one_per_lane)
        taken = [
            replace(row.message, attempts=row.message.attempts + counts)
            for row in islice(rows, limit)
        ]
        for message in taken:
            self._renew(WaitingRow(message, held_until=now + hold_s))
        return [replace(each, message=_own_message(each.message)) for each in taken]

    def some_can_be_sent(self) -> bool:
        """Whether `take` would give any message of the outbox."""
        return next(self._open(OUTBOX, self.clock(), None), None) is not None

    def _open(
        self,
        queue: str,
        now: float,
        parents: Collection[Key] | None,
        *,
        one_per_lane: bool = False,
    ) -> Iterator[WaitingRow]:
        """The messages of a queue and these parents that can be taken now, in order."""
        closed: set[str] = set()
        lanes = len(self._lanes[queue])
        for row in self._in_order(queue).values():
            if len(closed) == lanes:
                return
            message = row.message
            if message.is_set_aside or message.lane in closed:
                continue
            is_asked = parents is None or message.parent in parents
            is_open = is_asked and row.free_at <= now
            if one_per_lane or not is_open:
                closed.add(message.lane)
            if is_open:
                yield row

    def remove(self, messages: Sequence[WaitingMessage]) -> None:
        for message in messages:
            if (number := message.number or 0) in self._queue_of:
                there = self._row(number).message
                self._count_lane(there, -1)
                self._take_out(self._queues[there.queue], number)
                self._take_out(self._queue_of, number)
                self._take_out(self._told_by, (there.parent, there.name))
                self._has_kept = True

    def held(self, messages: Sequence[WaitingMessage]) -> set[int]:
        found = set()
        for taken in messages:
            if (number := taken.number or 0) in self._queue_of:
                row = self._row(number)
                now = row.message
                is_same = (now.queue, now.attempts) == (taken.queue, taken.attempts)
                if is_same and row.held_until > 0.0 and not now.is_set_aside:
                    found.add(number)
        return found

    def remove_held(self, messages: Sequence[WaitingMessage]) -> set[int]:
        held = self.held(messages)
        self.remove([message for message in messages if message.number in held])
        return held

    def put_back(self, changes: Sequence[PutBack]) -> None:
        now = self.clock()
        for message, error, retry_s, is_try in changes:
            if message.number not in self._queue_of:
                continue
            there = self._row(message.number).message
            renewed = replace(
                there,
                attempts=there.attempts + is_try,
                error=there.error if error is None else error,
                reason=error if retry_s is None else there.reason,
                is_set_aside=retry_s is None,
                last_seen=now,
                due=there.due if retry_s is None else now + retry_s,
            )
            self._renew(WaitingRow(renewed))
        self._has_kept = True

    def free(self, messages: Sequence[WaitingMessage]) -> None:
        now = self.clock()
        for message in messages:
            if message.number not in self._queue_of:
                continue
            there = self._row(message.number).message
            moved = replace(there, queue=message.queue, lane=message.lane, attempts=0)
            content = _own_message(message.message)
            freed = replace(moved, id=message.id, message=content, is_set_aside=False)
            self._renew(WaitingRow(replace(freed, last_seen=now, due=now)))
        self._has_kept = True

    def rename(self, messages: Sequence[WaitingMessage]) -> None:
        for message in messages:
            if (number := message.number or 0) in self._queue_of:
                row = self._row(number)
                self._take_out(self._told_by, (row.message.parent, row.message.name))
                self._put(self._told_by, (message.parent, message.name), number)
                self._renew(row._replace(message=replace(row.message, name=message.name)))

    def backlogs(self) -> Mapping[str, Backlog]:
        now, found = self.clock(), {}
        for queue in sorted(name for name, rows in self._queues.items() if rows):
            messages = [row.message for row in self._queues[queue].values()]
            dues = [message.due or 0.0 for message in messages if not message.is_set_aside]
            found[queue] = Backlog(
                waiting=len(dues),
                set_aside=len(messages) - len(dues),
                lag_s=max((now - due for due in dues if due <= now), default=0.0),
            )
        return found

    def listed(self, listing: Listing) -> Sequence[WaitingMessage]:
        now, begin = self.clock(), listing.queue.removesuffix("*")
        fitting = [
            row
            for row in self.rows()
            if row.message.queue.startswith(begin)
            and (row.message.queue == begin or begin != listing.queue)
            and row.message.is_set_aside == listing.is_set_aside
        ]
        if not listing.is_set_aside:
            fitting.sort(key=lambda row: row.free_at if row.free_at > now else 0.0)
        found = [row.message for row in fitting[: listing.limit]]
        if listing.with_bodies:
            return found
        return [replace(each, message=replace(each.message, body=b"")) for each in found]

    def free_in_s(self, queue: str) -> float | None:
        now, first = self.clock(), math.inf
        for row in self._queues[queue].values():
            if not row.message.is_set_aside:
                first = min(first, row.free_at)
            if first <= now:
                return 0.0
        return None if first == math.inf else first - now

    def _row(self, number: int) -> WaitingRow:
        return self._queues[self._queue_of[number]][number]

    def rows(self) -> list[WaitingRow]:
        """All waiting messages, in order."""
        return [self._row(number) for number in sorted(self._queue_of)]

    def _renew(self, row: WaitingRow) -> None:
        number, queue = row.message.number or 0, row.message.queue
        before = self._queue_of.get(number)
        if before is not None:
            self._count_lane(self._row(number).message, -1)
            if before != queue:
                self._take_out(self._queues[before], number)
        rows = self._queues[queue]
        if before != queue:
            self._put(self._queue_of, number, queue)
            if rows and number < next(reversed(rows)):
                self._unsorted.add(queue)
        self._put(rows, number, row)
        self._count_lane(row.message, 1)

    def _count_lane(self, message: WaitingMessage, more: int) -> None:
        if message.is_set_aside:
            return
        lanes = self._lanes[message.queue]
        if left := lanes.get(message.lane, 0) + more:
            self._put(lanes, message.lane, left)
        else:
            self._take_out(lanes, message.lane)

    def _in_order(self, queue: str) -> dict[int, WaitingRow]:
        """The messages of a queue by number, in the order in which they are taken."""
        rows = self._queues[queue]
        return dict(sorted(rows.items())) if queue in self._unsorted else rows

    # ---- Steps ---------------------------------------------------------------------------------

    def steps_of(self, keys: Collection[Key]) -> Mapping[Key, Mapping[str, Any]]:
        asked = {*keys}
        found: dict[Key, dict[str, Any]] = {}
        for (key, name), (result, _) in self._steps.items():
            if key in asked:
                found.setdefault(key, {})[name] = json.loads(result)
        return found

    def keep_step(self, key: Key, name: str, result: Any) -> None:
        if (key, name) not in self._steps:
            self._put(self._steps, (key, name), (json.dumps(result), self.clock()))

    def forget_steps(self, key: Key) -> None:
        for of, name in list(self._steps):
            if of == key:
                self._take_out(self._steps, (of, name))

    def rename_in_audit(self, key: Key, word: str) -> int:  # noqa: ARG002 - none is kept here.
        return 0

    # ---- Undoing -------------------------------------------------------------------------------

    def _put(self, table: dict[Any, Any], name: object, value: object) -> None:
        self._put_all(table, {name: value})

    def _put_all(self, table: dict[Any, Any], rows: Mapping[Any, Any]) -> None:
        former = {name: table[name] for name in rows if name in table}

        def undo() -> None:
            for name in rows:
                table.pop(name, None)
            table.update(former)

        self._undo.append(undo)
        table.update(rows)

    def _take_out(self, table: dict[Any, Any], name: object) -> None:
        if name in table:
            former = table[name]
            self._undo.append(lambda: table.__setitem__(name, former))
            del table[name]


def _own_message(message: Message) -> Message:
    """A copy that shares no mutable part with the original."""
    return replace(message, headers=dict(message.headers))


def own(record: Record) -> Record:
    """The record, or a copy of it, that shares no mutable part with the original."""
    if record.metadata is None and record.result is None:
        return record
    return record._replace(metadata=deepcopy(record.metadata), result=deepcopy(record.result))
