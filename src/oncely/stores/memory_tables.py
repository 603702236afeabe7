"""What the store in memory holds: dicts that remember what a transaction has to undo."""

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import count, islice
from typing import Any, NamedTuple

from oncely.core.deferred import DeferredMessage
from oncely.core.record import Key, Record
from oncely.stores.store import Backlog, Change, Clock, Horizons, Loaded, PublishRefusal

_Undo = Callable[[], object]


class _Waiting(NamedTuple):
    """A deferred message as it is kept. Times are the clock's."""

    message: DeferredMessage
    due_at: float
    held_until: float = 0.0
    is_set_aside: bool = False


class _Step(NamedTuple):
    """The result of a finished step as it is kept."""

    result: str
    kept_at: float


class MemoryTables:
    """Records, what is kept besides them, and what is known of consumers. Whoever calls holds the
    store's lock.
    """

    def __init__(self, clock: Clock, on_deferred: Callable[[], object] = lambda: None) -> None:
        self.clock = clock
        self.on_deferred = on_deferred
        self.records: dict[Key, Record] = {}
        self.retentions: dict[str, float] = {}
        self._horizons: dict[str, float] = {}
        self._waiting: dict[int, _Waiting] = {}
        self._steps: dict[tuple[Key, str], _Step] = {}
        self._numbers = count(1)
        self._undo: list[_Undo] = []

    def commit(self) -> None:
        """What was done stays."""
        self._undo.clear()

    def roll_back(self) -> None:
        """What was done since the last commit is undone."""
        while self._undo:
            self._undo.pop()()

    # ---- Records -------------------------------------------------------------------------------

    def insert(
        self, records: Sequence[Record], believed: Mapping[str, float | None] | None = None
    ) -> set[Key]:
        now = self.clock()
        wrong = {name for name, at in (believed or {}).items() if self._horizons.get(name) != at}
        believing = [record for record in records if record.key.consumer not in wrong]
        absent = [record for record in believing if record.key not in self.records]
        for record in absent:
            self._put(self.records, record.key, _at(record, now)._replace(first_seen=now))
        return {record.key for record in absent}

    def load(self, keys: Collection[Key]) -> Loaded:
        found = {key: own(self.records[key]) for key in keys if key in self.records}
        return Loaded(found, self.clock())

    def swap(self, changes: Sequence[Change]) -> set[Key]:
        now = self.clock()
        written = set()
        for old, new in changes:
            stored = self.records.get(old.key)
            if stored is None or stored.version != old.version:
                continue
            if new is None:
                self._take_out(self.records, old.key)
            else:
                renewed = _at(new, now)._replace(first_seen=stored.first_seen)
                self._put(self.records, old.key, renewed)
            written.add(old.key)
        return written

    def purge(self, key: Key) -> bool:
        """Remove a record with its steps, unless deferred messages wait."""
        if self.waiting([key]):
            return False
        self._take_out(self.records, key)
        self._forget_steps(key)
        return True

    def purge_steps(self, consumer: str | None, older_than_s: float) -> None:
        """Remove old steps without a record: of what was released and never came again."""
        now = self.clock()
        for (key, name), step in list(self._steps.items()):
            is_asked = consumer is None or key.consumer == consumer
            if is_asked and key not in self.records and now - step.kept_at > older_than_s:
                self._take_out(self._steps, (key, name))

    # ---- Horizons ------------------------------------------------------------------------------

    def horizons(self, consumers: Collection[str]) -> Horizons:
        return {name: self._horizons[name] for name in consumers if name in self._horizons}

    def forget_until(self, horizons: Horizons) -> None:
        for consumer, at in horizons.items():
            if at > self._horizons.get(consumer, -math.inf):
                self._put(self._horizons, consumer, at)

    # ---- Deferred messages ---------------------------------------------------------------------

    def defer(self, messages: Sequence[DeferredMessage]) -> None:
        there = {row.message.name for row in self._waiting.values()}
        for message in sorted(messages, key=lambda message: message.position):
            if message.name not in there:
                there.add(message.name)
                stored = replace(message, number=next(self._numbers))
                self._renew(_Waiting(stored, self.clock() + message.delay_s))
        self.on_deferred()

    def waiting(self, keys: Collection[Key]) -> Sequence[DeferredMessage]:
        return [row.message for row in self._rows() if row.message.parent in keys]

    def take(
        self, limit: int, hold_s: float, parents: Collection[Key] | None = None
    ) -> Sequence[DeferredMessage]:
        now = self.clock()
        taken: list[DeferredMessage] = []
        for row in islice(self._open(now, parents), limit):
            taken.append(row.message)
            self._renew(row._replace(held_until=now + hold_s))
        return taken

    def some_can_be_sent(self) -> bool:
        """Whether `take` would give any."""
        return next(self._open(self.clock(), None), None) is not None

    def _open(self, now: float, parents: Collection[Key] | None) -> Iterator[_Waiting]:
        """What can be sent now of these parents, in the order of sending."""
        closed = set()
        for row in self._rows():
            lane = row.message.lane
            if row.is_set_aside or lane in closed:
                continue
            is_asked = parents is None or row.message.parent in parents
            if is_asked and max(row.due_at, row.held_until) <= now:
                yield row
            else:
                closed.add(lane)

    def remove(self, messages: Sequence[DeferredMessage]) -> None:
        for message in messages:
            self._take_out(self._waiting, message.number)

    def put_back(self, refusals: Sequence[PublishRefusal]) -> None:
        now = self.clock()
        for message, error, retry_s in refusals:
            row = self._waiting.get(message.number or 0)
            if row is None:
                continue
            refused = replace(row.message, attempts=row.message.attempts + 1, error=error)
            due_at = row.due_at if retry_s is None else now + retry_s
            self._renew(_Waiting(refused, due_at, is_set_aside=retry_s is None))

    def send_again(self) -> int:
        now = self.clock()
        aside = [row for row in self._waiting.values() if row.is_set_aside]
        for row in aside:
            self._renew(_Waiting(replace(row.message, attempts=0), now))
        self.on_deferred()
        return len(aside)

    def backlog(self) -> Backlog:
        now = self.clock()
        waiting = [row for row in self._waiting.values() if not row.is_set_aside]
        return Backlog(
            waiting=len(waiting),
            set_aside=len(self._waiting) - len(waiting),
            lag_s=max((now - row.due_at for row in waiting if row.due_at <= now), default=0.0),
        )

    def _rows(self) -> list[_Waiting]:
        return [self._waiting[number] for number in sorted(self._waiting)]

    def _renew(self, row: _Waiting) -> None:
        self._put(self._waiting, row.message.number, row)

    # ---- Steps ---------------------------------------------------------------------------------

    def steps(self, key: Key) -> Mapping[str, Any]:
        steps = self._steps.items()
        return {name: json.loads(step.result) for (of, name), step in steps if of == key}

    def keep_step(self, key: Key, name: str, result: Any) -> None:
        if (key, name) not in self._steps:
            self._put(self._steps, (key, name), _Step(json.dumps(result), self.clock()))

    def _forget_steps(self, key: Key) -> None:
        for of, name in list(self._steps):
            if of == key:
                self._take_out(self._steps, (of, name))

    def forget(self, key: Key) -> None:
        self.remove(self.waiting([key]))
        self._forget_steps(key)

    # ---- Undoing -------------------------------------------------------------------------------

    def _put(self, table: dict[Any, Any], name: object, value: object) -> None:
        if name in table:
            former = table[name]
            self._undo.append(lambda: table.__setitem__(name, former))
        else:
            self._undo.append(lambda: table.pop(name, None))
        table[name] = value

    def _take_out(self, table: dict[Any, Any], name: object) -> None:
        if name in table:
            former = table[name]
            self._undo.append(lambda: table.__setitem__(name, former))
            del table[name]


def own(record: Record) -> Record:
    """A record that shares no part with this one which somebody could change."""
    if record.metadata is None and record.result is None:
        return record
    return record._replace(metadata=deepcopy(record.metadata), result=deepcopy(record.result))


def _at(record: Record, now: float) -> Record:
    lease_until = None if record.lease_until is None else now + record.lease_until
    return own(record)._replace(last_seen=now, lease_until=lease_until)
