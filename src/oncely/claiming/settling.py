"""Settler: asks the rules, makes the store hold what they answer, starts over with what lost."""

import time
from collections.abc import Sequence
from typing import Protocol, cast

from oncely.claiming.request import Request
from oncely.core.commands import Outcome
from oncely.core.errors import ContentionError, ReplyLost, StoreUnavailable
from oncely.core.record import Key, Record
from oncely.core.rules import Decision, decide
from oncely.stores.base import Change, Records

_ROUNDS = 50
"""How often a record may change between reading and writing it before that is an error."""

_LOST_REPLIES = 3
"""How often one request may meet a connection that breaks."""

_Pending = list[tuple[int, Request]]
_Outcomes = list[Outcome | None]
_Writes = dict[Key, tuple[int, Decision, Record | None]]
_Doubtful = dict[int, Decision]
"""What was sent and had no answer, and was not stored when it was looked for."""


class Observer(Protocol):
    """Is told what a ledger did. Nothing that it does may raise."""

    def settled(
        self, requests: Sequence[Request], results: Sequence[Outcome | Exception], took_s: float
    ) -> None:
        """Requests went to the store together; each has its outcome or its error, in order."""

    def purged(self, consumer: str | None, count: int) -> None:
        """Records were removed by age, of all consumers where none is named."""

    def untracked(self, consumer: str) -> None:
        """A message runs without a claim."""


class Settler:
    """Settles requests of any kind, for any keys: where none is in conflict, with one exchange
    for those that begin records and one for those that change some.
    """

    def __init__(self, store: Records, observer: Observer | None = None) -> None:
        self._store = store
        self._observer = observer

    def settle(self, requests: Sequence[Request]) -> list[Outcome]:
        """One outcome for each, in order. After an error some may be settled all the same."""
        outcomes: _Outcomes = [None] * len(requests)
        began = time.perf_counter()
        try:
            self._settle(requests, outcomes)
        except Exception as error:
            self._show(requests, [error] * len(requests), began)
            raise
        settled = cast(list[Outcome], outcomes)
        self._show(requests, settled, began)
        return settled

    def settle_one(self, request: Request) -> Outcome:
        """As `settle`, for one request inside a transaction, where no reply is lost unnoticed and
        what was loaded stays: what `settle` does for many would cost more than the rules.
        """
        began = time.perf_counter()
        try:
            outcome = self._settle_one(request)
        except Exception as error:
            self._show([request], [error], began)
            raise
        self._show([request], [outcome], began)
        return outcome

    def _settle_one(self, request: Request) -> Outcome:
        key, command, believed = request
        decision = decide(believed, command, 0.0)
        if decision.new is not believed and self._is_stored(believed, decision.new):
            return decision.outcome
        loaded = self._store.load([key])
        believed = loaded.records.get(key)
        decision = decide(believed, command, loaded.now)
        if decision.new is believed:
            return decision.outcome
        new = None if decision.new is None else _from_now(decision.new, loaded.now)
        if self._is_stored(believed, new) or decision.optional:
            return decision.outcome
        return self.settle([request._replace(believed=believed)])[0]

    def _is_stored(self, believed: Record | None, new: Record | None) -> bool:
        if believed is not None:
            return bool(self._store.swap([Change(believed, new)]))
        return new is not None and bool(self._store.insert([new]))

    def settle_each(self, requests: Sequence[Request]) -> list[Outcome | Exception]:
        """As `settle`, for callers who know nothing of each other: an error is only its own.

        StoreUnavailable alone is for all that were not settled before.
        """
        outcomes: _Outcomes = [None] * len(requests)
        began = time.perf_counter()
        error = self._error_in_settling(requests, outcomes)
        results: list[Outcome | Exception | None] = [*outcomes]
        left = [n for n, outcome in enumerate(outcomes) if outcome is None]
        for n in left:
            if isinstance(error, StoreUnavailable):
                results[n] = _once_more(error)
            elif len(left) == 1:
                results[n] = error
            else:
                alone: _Outcomes = [None]
                error = self._error_in_settling([requests[n]], alone)
                results[n] = alone[0] or error
        settled = cast(list[Outcome | Exception], results)
        self._show(requests, settled, began)
        return settled

    def _show(
        self, requests: Sequence[Request], results: Sequence[Outcome | Exception], began: float
    ) -> None:
        if self._observer is not None:
            self._observer.settled(requests, results, time.perf_counter() - began)

    def _error_in_settling(
        self, requests: Sequence[Request], outcomes: _Outcomes
    ) -> Exception | None:
        try:
            self._settle(requests, outcomes)
        except Exception as error:  # noqa: BLE001 - whatever it is, whom it concerns is told.
            return error
        return None

    def _settle(self, requests: Sequence[Request], outcomes: _Outcomes) -> None:
        """Fill in the outcomes, also where it ends in an error those that hold."""
        pending = list(enumerate(requests))
        now = None
        lost = 0
        doubtful: _Doubtful = {}
        for _ in range(_ROUNDS):
            try:
                pending = self._round(pending, outcomes, now, doubtful)
            except ReplyLost as error:
                lost += 1
                if lost == _LOST_REPLIES:
                    raise StoreUnavailable(str(error)) from error
                pending = [item for item in pending if outcomes[item[0]] is None]
            if not pending:
                return
            loaded = self._store.load({request.key for _, request in pending})
            now = loaded.now
            for n, request in pending:
                # The server may have gone on with it after the line was lost.
                if n in doubtful and _is_stored(doubtful[n], loaded.records.get(request.key)):
                    outcomes[n] = doubtful[n].outcome
            pending = [
                (n, request._replace(believed=loaded.records.get(request.key)))
                for n, request in pending
                if outcomes[n] is None
            ]
            if not pending:
                return
        raise ContentionError(
            f"{len(pending)} records changed {_ROUNDS} times while they were being written"
        )

    def _round(
        self, pending: _Pending, outcomes: _Outcomes, now: float | None, doubtful: _Doubtful
    ) -> _Pending:
        """Decide and store once; fill in the outcomes that hold, return what is left.

        `now` is None while what is believed was not loaded. The first round decides as if the
        store's clock stood at zero: stores add their clock to what they write.
        """
        writes: _Writes = {}
        for n, (key, command, believed) in pending:
            decision = decide(believed, command, now or 0.0)
            if decision.new is not believed:
                # Of two for one key the other waits for the next round, unless it need not.
                if writes.setdefault(key, (n, decision, believed))[0] != n and decision.optional:
                    outcomes[n] = decision.outcome
            elif now is not None:
                outcomes[n] = decision.outcome
        self._write(writes, outcomes, now or 0.0, doubtful)
        return [item for item in pending if outcomes[item[0]] is None]

    def _write(self, writes: _Writes, outcomes: _Outcomes, now: float, doubtful: _Doubtful) -> None:
        """Store what was decided; fill in the outcomes of what is stored, also after an error."""
        written: set[Key] = set()
        try:
            self._store_all(writes, now, written)
        except ReplyLost:
            written |= self._stored_after_all(writes)
            doubtful.update((n, d) for key, (n, d, _) in writes.items() if key not in written)
            raise
        except StoreUnavailable:
            raise
        except Exception:
            # `settle_each` repeats what has no outcome: an Ask that is stored would meet itself.
            if len(writes) > 1:
                written |= self._stored_after_all(writes)
            raise
        finally:
            for key, (n, decision, _) in writes.items():
                if key in written or decision.optional:
                    outcomes[n] = decision.outcome

    def _store_all(self, writes: _Writes, now: float, written: set[Key]) -> None:
        """Add to `written` the keys of what is stored."""
        inserts, changes = [], []
        for _, decision, believed in writes.values():
            new = None if decision.new is None else _from_now(decision.new, now)
            if believed is not None:
                changes.append(Change(believed, new))
            elif new is not None:
                inserts.append(new)
        if inserts:
            written |= self._store.insert(inserts)
        if changes:
            written |= self._store.swap(changes)

    def _stored_after_all(self, writes: _Writes) -> set[Key]:
        """Which of the writes whose reply was lost are stored: a commit is never guessed."""
        stored = self._store.load(writes).records
        return {
            key for key, (_, decision, _) in writes.items() if _is_stored(decision, stored.get(key))
        }


def _from_now(record: Record, now: float) -> Record:
    if record.lease_until is None or now == 0.0:
        return record
    return record._replace(lease_until=record.lease_until - now)


def _is_stored(decision: Decision, stored: Record | None) -> bool:
    if decision.new is None or stored is None:
        return decision.new is stored
    return stored.is_same_write(decision.new)


def _once_more(error: StoreUnavailable) -> StoreUnavailable:
    """The same for one more caller: whoever raises an exception adds to it."""
    again = StoreUnavailable(*error.args)
    again.__cause__ = error
    return again
