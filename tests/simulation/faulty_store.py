"""The store of a simulation: one in memory, behind a line that fails on purpose at every call."""

from collections.abc import Callable
from typing import Any, TypeVar

from tests.forwarding import ForwardingStore
from tests.simulation.faults import SLOW_S, Weather, Wire
from tests.simulation.history import History, StoredRow
from tests.simulation.primitives import EPOCH
from tests.simulation.scheduler import Scheduler

from oncely.core.errors import ReplyLost
from oncely.core.ids import fingerprint_of
from oncely.core.record import Key, Record, State
from oncely.core.waiting import OUTBOX, retry_name
from oncely.stores.memory_store import MemoryStore
from oncely.stores.memory_tables import WaitingRow
from oncely.stores.retrying import TryAgain, patiently
from oncely.stores.store import Store, Transaction

T = TypeVar("T")

_Fault = type[Exception]
_HERE = ("is_contention", "is_outage", "wait_for_messages", "close")
"""What no message goes over the wire for."""
_CUT_OFF = 0.3
"""How likely a process whose line breaks does not reach the store for a while."""
_TOLD_ONCE = ("insert", "update", "delete")
"""What may not be done again when nobody knows whether it was: its answer would be another."""


class WatchedStore:
    """What all processes share: the records, and a history of everything that changes them."""

    def __init__(self, scheduler: Scheduler, history: History) -> None:
        self.scheduler = scheduler
        self.history = history
        self.store = MemoryStore(lambda: EPOCH + scheduler.now)
        self._rows: dict[Key, Record] = {}
        self._waiting: dict[int, WaitingRow] = {}
        self._steps: set[tuple[Key, str]] = set()

    def do(self, actor: str, work: Callable[[Store], T]) -> T:
        """What `work` does at once; what it changed is in the history, as done by `actor`."""
        try:
            return work(self.store)
        finally:
            self._note(actor)

    def _note(self, actor: str) -> None:
        tables = self.store._tables
        rows = dict(tables.records)
        waiting = {row.message.number or 0: row for row in tables.rows()}
        steps = set(tables._steps)
        for key, step in sorted({*steps} ^ self._steps):
            what = "step_kept" if (key, step) in steps else "step_gone"
            self.note(actor, what, key=tuple(key), step=step)
        messages = [row.message for row in waiting.values()]
        unsent = {each.parent for each in messages if each.queue == OUTBOX}
        due = {
            each.parent: _since_epoch(each.due)
            for each in messages
            if each.name == retry_name(each.queue) and not each.is_set_aside
        }
        for key in sorted({*rows} | {*self._rows}):
            before, after = self._rows.get(key), rows.get(key)
            if before is not after:
                told = {"before": _row(before), "after": _row(after), "waits": key in unsent}
                self.note(actor, "row", key=tuple(key), due=due.get(key), **told)
        # After the records: what is gone from here is to be done with there.
        for number in sorted({*waiting} | {*self._waiting}):
            self._note_waiting(actor, self._waiting.get(number), waiting.get(number))
        self._rows, self._waiting, self._steps = rows, waiting, steps

    def _note_waiting(
        self, actor: str, before: WaitingRow | None, after: WaitingRow | None
    ) -> None:
        row = after or before
        assert row is not None
        message = row.message
        key = tuple(message.parent)
        if before is not None and after is not None and after.held_until > before.held_until:
            self._note_taken(actor, before)
        if message.queue == OUTBOX:
            if before is None or after is None:
                what = "undeferred" if after is None else "deferred"
                self.note(actor, what, key=key, message=(message.destination, message.id))
            return
        told = {"id": message.id, "fingerprint": fingerprint_of(message.message.body)}
        is_aside = None if after is None else after.message.is_set_aside
        if before is None or after is None or _seen(before) != _seen(after):
            where = {"number": message.number, "lane": message.lane, "order": message.message.key}
            self.note(actor, "kept", key=key, is_aside=is_aside, **told, **where)

    def _note_taken(self, actor: str, row: WaitingRow) -> None:
        message = row.message
        self.note(
            actor,
            "taken",
            key=tuple(message.parent),
            number=message.number,
            is_to_be_sent=message.queue == OUTBOX,
            is_aside=message.is_set_aside,
            due=_since_epoch(message.due),
            held_until=_since_epoch(row.held_until),
        )

    def note(self, actor: str, what: str, **facts: Any) -> None:
        """Something is seen at the store."""
        self.history.add(self.scheduler.now, actor, what, **facts)

    @property
    def unfinished(self) -> list[Record]:
        """Records that somebody still has to bring to an end."""
        states = (State.PROCESSING, State.HANDLED)
        return [record for record in self._rows.values() if record.state in states]

    @property
    def some_wait(self) -> bool:
        """Whether messages wait for anybody but people."""
        messages = [row.message for row in self._waiting.values()]
        return any(each.queue == OUTBOX or not each.is_set_aside for each in messages)


def _seen(row: WaitingRow) -> tuple[object, ...]:
    """What of a message that waits is worth telling when it changes."""
    return row.message.is_set_aside, row.message.message


def _since_epoch(at: float | None) -> float | None:
    return None if at is None else at - EPOCH


def _row(record: Record | None) -> StoredRow | None:
    if record is None:
        return None
    return StoredRow(
        record.state.value,
        record.fence,
        record.attempts,
        record.birth,
        record.version,
        _since_epoch(record.lease_until),
        record.exhausted,
        record.duplicates,
        record.result,
        record.fingerprint,
        (record.metadata or {}).get("claimed_alone") == record.fence,
        (record.metadata or {}).get("effect_unknown") == record.fence,
    )


class FaultyStore(ForwardingStore):
    """The line of one process to the store. Whatever a store may do to its callers, it does."""

    def __init__(self, shared: WatchedStore, weather: Weather, actor: str) -> None:
        super().__init__(shared.store)
        self._shared = shared
        self._weather = weather
        self._actor = actor
        self._cut_until = 0.0
        """Until then this process alone does not reach the store."""

    def forward(self, name: str, /, *arguments: Any, **named: Any) -> Any:
        """As the shared store does it, where the line lets it."""

        def work(store: Store) -> Any:
            return getattr(store, name)(*arguments, **named)

        if name in _HERE:
            return work(self.store)
        return self._asked(work, lost=ReplyLost if name in _TOLD_ONCE else TryAgain)

    def transaction(self, work: Callable[[Transaction], T]) -> T:
        """As the shared store does it, perhaps cut off between two statements."""
        draws, weather = self._weather.draws, self._weather

        def transact(store: Store) -> T:
            is_cut = not weather.is_over and draws.random() < weather.likely / 2
            statements = draws.randrange(4) if is_cut else None

            def cut(transaction: Transaction) -> T:
                return work(
                    transaction if statements is None else _CutInside(transaction, statements)
                )

            return store.transaction(cut)

        return self._asked(transact, lost=TryAgain)

    # ---- The line ------------------------------------------------------------------------------

    def _asked(self, work: Callable[[Store], T], *, lost: _Fault) -> T:
        return patiently(self._exchange, work, lost=lost)

    def _exchange(self, work: Callable[[Store], T], *, lost: _Fault) -> T:
        scheduler, weather = self._shared.scheduler, self._weather
        self._go()
        wire = self._wire()
        if wire is not Wire.GOOD:
            self._shared.note(self._actor, "wire", fault=wire.name)
        if wire is Wire.REFUSED:
            raise TryAgain("the store cannot be reached")
        # Only what tells its own repetition goes on: a transaction is rolled back with its line.
        if wire is Wire.CUT or (wire is Wire.LATE and lost is not ReplyLost):
            raise lost("the line broke")
        if wire is Wire.LATE:
            scheduler.later(
                weather.draws.uniform(0.0, 0.5), lambda: self._shared.do(self._actor, work)
            )
            raise lost("the line broke, and the server goes on")
        done = self._shared.do(self._actor, work)
        self._go()
        if wire is Wire.LOST or scheduler.now < weather.away_until:
            raise lost("the reply is lost")
        return done

    def _wire(self) -> Wire:
        weather, now = self._weather, self._shared.scheduler.now
        wire = weather.wire(now)
        if not weather.is_over and now < self._cut_until:
            return Wire.REFUSED
        if wire is not Wire.GOOD and weather.draws.random() < _CUT_OFF:
            self._cut_until = now + weather.draws.uniform(1.0, 5.0)
        return wire

    def _go(self) -> None:
        took_s = self._weather.took_s()
        if took_s >= SLOW_S:
            self._shared.note(self._actor, "wire", fault="SLOW")
        self._shared.scheduler.call(took_s)


class _CutInside:
    """A transaction whose line breaks after so many statements."""

    def __init__(self, transaction: Transaction, statements: int) -> None:
        self._transaction = transaction
        self._left = statements

    def __getattr__(self, name: str) -> Any:
        if self._left <= 0:
            raise TryAgain("the line broke within a transaction")
        self._left -= 1
        return getattr(self._transaction, name)
