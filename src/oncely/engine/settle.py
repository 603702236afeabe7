"""Settler: asks the rules, stores their answers, and decides again where a write lost a race."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

from oncely.core.commands import Outcome
from oncely.core.errors import ContentionError, KeysLocked, ReplyLost, StoreUnavailable
from oncely.core.record import Key, Record
from oncely.core.rules import Decision, decide, while_locked
from oncely.core.waiting import WaitingMessage
from oncely.engine.alike import AlikeDecision, AlikeOutcomes, decide_alike
from oncely.engine.alike_requests import believe_nothing, grouped, with_horizon
from oncely.engine.request import Request
from oncely.stores.store import Change, Records

_ROUNDS = 50
"""How often a record may change between reading and writing it before that is an error."""

_LOST_REPLIES = 3
"""How often the connection may break during one request."""

_Pending = list[tuple[int, Request]]
_Outcomes = list[Outcome | Exception | None]
_Writes = dict[Key, tuple[int, Decision, Record | None]]
BelievedHorizons = dict[str, float | None]
"""The horizon of each consumer, as it is believed to be; None where it has none."""


@dataclass
class Beliefs:
    """What all settlers of one store believe about it. Where that is wrong, they try once more."""

    horizons: BelievedHorizons = field(default_factory=dict)
    """As they were read last."""
    meets_records: bool = False
    """Whether most messages of the last requests had a record: then records are read first."""


class SettleObserver(Protocol):
    """Is called with what a settler did. Its methods must not raise, here and below."""

    def settled(
        self, requests: Sequence[Request], results: Sequence[Outcome | Exception], took_s: float
    ) -> None:
        """Requests went to the store together; each has its outcome or its error, in order."""


class RelayObserver(Protocol):
    """Is called with what a relay did."""

    def deferred_sent(self, messages: Sequence[WaitingMessage]) -> None:
        """The transport has confirmed these; they do not wait any more."""

    def deferred_refused(self, messages: Sequence[WaitingMessage]) -> None:
        """The transport has refused these, whether or not they are tried again."""


class LedgerObserver(SettleObserver, RelayObserver, Protocol):
    """Is called with what a ledger did."""

    def purged(self, consumer: str | None, count: int) -> None:
        """Records were removed by age, of all consumers where none is named."""

    def untracked(self, consumer: str) -> None:
        """A message runs without a claim."""


class Settler:
    """Settles requests of any kind, for any keys: where none is in conflict, with one exchange
    for those that begin records and one for those that change some.
    """

    def __init__(
        self,
        store: Records,
        observer: SettleObserver | None = None,
        beliefs: Beliefs | None = None,
    ) -> None:
        self._store = store
        self.observer = observer
        self.beliefs = beliefs or Beliefs()

    def settle(self, requests: Sequence[Request]) -> Sequence[Outcome]:
        """One outcome for each, in order. After an error, some may be settled nevertheless."""
        began = time.perf_counter()
        try:
            settled = self._settle(requests, [None] * len(requests))
            _raise_first(settled)
        except Exception as error:
            self._show(requests, [error] * len(requests), began)
            raise
        outcomes = cast(Sequence[Outcome], settled)
        self._show(requests, outcomes, began)
        return outcomes

    def settle_each(self, requests: Sequence[Request]) -> Sequence[Outcome | Exception]:
        """As `settle`, for independent callers: an error takes the place of one outcome.

        Only StoreUnavailable is the answer to all that were not settled before it.
        """
        outcomes: _Outcomes = [None] * len(requests)
        began = time.perf_counter()
        try:
            results = self._settle(requests, outcomes)
        except Exception as error:  # noqa: BLE001 - the callers whom it concerns get it.
            results = self._each_after(error, requests, outcomes)
        settled = cast(Sequence[Outcome | Exception], results)
        self._show(requests, settled, began)
        return settled

    def _each_after(
        self, error: Exception | None, requests: Sequence[Request], outcomes: _Outcomes
    ) -> _Outcomes:
        """What each gets after that error of them all."""
        results = [*outcomes]
        left = [n for n, outcome in enumerate(outcomes) if outcome is None]
        for n in left:
            if isinstance(error, StoreUnavailable):
                results[n] = _once_more(error)
            elif len(left) == 1:
                results[n] = error
            else:
                alone: _Outcomes = [None]
                try:
                    error = None
                    [results[n]] = self._settle([requests[n]], alone)
                except Exception as own:  # noqa: BLE001 - see above.
                    error = own
                    results[n] = alone[0] or own
        return results

    def _show(
        self, requests: Sequence[Request], results: Sequence[Outcome | Exception], began: float
    ) -> None:
        if self.observer is not None:
            self.observer.settled(requests, results, time.perf_counter() - began)

    def _settle(
        self, requests: Sequence[Request], outcomes: _Outcomes
    ) -> Sequence[Outcome | Exception | None]:
        """Fill in the outcomes, and return them; where it ends in an error, those that hold."""
        if not requests:
            return outcomes
        horizons = self._believed_horizons(requests)
        locked: set[Key] = set()
        are_new = believe_nothing(requests)
        looks_first = are_new and self.beliefs.meets_records
        alike = None if looks_first else _decided_alike(requests, horizons)
        if alike is not None:
            written = self._store_alike(alike, horizons, locked)
            if len(written) == len(requests):
                return alike.outcomes
            _fill_in(outcomes, alike, written)
            looks_first = True
        pending = [(n, requests[n]) for n, outcome in enumerate(outcomes) if outcome is None]
        now = None
        lost = found = 0
        for number in range(_ROUNDS):
            if number or looks_first:
                now, pending = self._looked_up(pending, horizons, outcomes)
                found = found or sum(request.believed is not None for _, request in pending)
            try:
                self._round(pending, outcomes, now, horizons, locked)
            except ReplyLost as error:
                # It may be stored or not: asking again gives the answer that was lost.
                lost += 1
                if lost == _LOST_REPLIES:
                    raise StoreUnavailable(str(error)) from error
            pending = [item for item in pending if outcomes[item[0]] is None]
            if not pending:
                if are_new:
                    self.beliefs.meets_records = found > len(requests) // 2
                return outcomes
        raise ContentionError(
            f"{len(pending)} records changed {_ROUNDS} times while they were being written"
        )

    def _store_alike(
        self, decision: AlikeDecision, horizons: BelievedHorizons, locked: set[Key]
    ) -> set[Key]:
        """The keys of what is stored; those that turn out to be locked are added to `locked`."""
        try:
            if decision.old is not None:
                return self._store.swap(decision.changes)
            return self._store.insert(decision.new, horizons or None)
        except KeysLocked as error:
            locked |= error.keys
            return {*error.written}
        except ReplyLost:
            # It may be stored or not: asked again one by one, each gets the answer that was lost.
            return set()

    def _looked_up(
        self, pending: _Pending, horizons: BelievedHorizons, outcomes: _Outcomes
    ) -> tuple[float, _Pending]:
        """Look these up: the store's clock, and each with its record as it was then. `horizons` are
        brought up to date. Where the whole table is locked, all get that as their outcome.
        """
        try:
            loaded = self._store.load({request.key for _, request in pending})
        except KeysLocked as error:
            if not error.keys:
                raise
            for n, (key, command, believed) in pending:
                outcomes[n] = while_locked(believed, command, 0.0) or _locked(key)
            return 0.0, []
        there = [
            (n, request._replace(believed=loaded.records.get(request.key)))
            for n, request in pending
        ]
        # Of no others: what was believed of a consumer whose records are all there may be wrong.
        read = self._read_horizons([r for _, r in there if r.believed is None])
        horizons.clear()
        horizons |= read
        return loaded.now, there

    def _believed_horizons(self, requests: Sequence[Request]) -> BelievedHorizons:
        """The horizons that these depend on, where they do. A horizon that is not known is not
        read: most consumers have none, and an insert fails where that belief is wrong.
        """
        return {name: self.beliefs.horizons.get(name) for name in with_horizon(requests)}

    def _read_horizons(self, requests: Sequence[Request]) -> BelievedHorizons:
        names = with_horizon(requests)
        read = self._store.horizons(names) if names else {}
        self.beliefs.horizons |= {name: read.get(name) for name in names}
        return {name: read.get(name) for name in names}

    def _round(
        self,
        pending: _Pending,
        outcomes: _Outcomes,
        now: float | None,
        horizons: BelievedHorizons,
        locked: set[Key],
    ) -> None:
        """Decide and store once; fill in the outcomes that hold, also after an error.

        Nothing is stored for the `locked` keys; those that turn out to be locked are added.

        `now` is None while the believed records were not loaded. Then the round decides as if the
        store's clock stood at zero: stores add their clock to what they write.
        """
        writes: _Writes = {}
        for n, (key, command, believed) in pending:
            decision = decide(believed, command, now or 0.0, horizons.get(key.consumer))
            if decision.new is not believed and key in locked:
                answer = (
                    decision.outcome
                    if decision.optional
                    else while_locked(believed, command, now or 0.0)
                )
                outcomes[n] = answer or _locked(key)
            elif decision.new is not believed:
                # Of two for one key, the second waits for the next round, unless its write is
                # optional.
                if writes.setdefault(key, (n, decision, believed))[0] != n and decision.optional:
                    outcomes[n] = decision.outcome
            elif now is not None:
                outcomes[n] = decision.outcome
        written: set[Key] = set()
        try:
            self._store_all(writes, now or 0.0, horizons, written)
        except KeysLocked as error:
            written |= error.written
            locked |= error.keys
        finally:
            for key, (n, decision, _) in writes.items():
                if key in written or decision.optional:
                    outcomes[n] = decision.outcome

    def _store_all(
        self, writes: _Writes, now: float, horizons: BelievedHorizons, written: set[Key]
    ) -> None:
        """Add to `written` the keys of what is stored."""
        # A record that was decided without a horizon is written without one, at half the price.
        decided: list[Record] = []
        others: list[Record] = []
        changes = []
        for _, decision, believed in writes.values():
            new = None if decision.new is None else _from_now(decision.new, now)
            if believed is not None:
                changes.append(Change(believed, new))
            elif new is not None:
                (decided if new.key.consumer in horizons else others).append(new)
        if others:
            written |= self._store.insert(others)
        if decided:
            names = {new.key.consumer for new in decided}
            written |= self._store.insert(decided, {name: horizons[name] for name in names})
        if changes:
            written |= self._store.swap(changes)


def _decided_alike(requests: Sequence[Request], horizons: BelievedHorizons) -> AlikeDecision | None:
    is_concerned = any(at is not None for at in horizons.values())
    alike = None if is_concerned else grouped(requests)
    return None if alike is None else decide_alike(alike)


def _fill_in(outcomes: _Outcomes, decision: AlikeDecision, written: set[Key]) -> None:
    """Fill in the outcomes of what is written."""
    answers = decision.outcomes
    indexes = range(len(outcomes)) if decision.indexes is None else decision.indexes
    for n, key, outcome in zip(indexes, answers.keys, answers, strict=True):
        if key in written:
            outcomes[n] = outcome


def _locked(key: Key) -> KeysLocked:
    return KeysLocked(
        f"{key.message_id!r}: another transaction has locked this record; ask again later", {key}
    )


def _raise_first(outcomes: Sequence[Outcome | Exception | None]) -> None:
    if type(outcomes) is AlikeOutcomes:
        return
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome


def _from_now(record: Record, now: float) -> Record:
    if record.lease_until is None or now == 0.0:
        return record
    return record._replace(lease_until=record.lease_until - now)


def _once_more(error: StoreUnavailable) -> StoreUnavailable:
    """A copy of the error for one more caller: raising an exception changes its traceback."""
    again = StoreUnavailable(*error.args)
    again.__cause__ = error
    return again
