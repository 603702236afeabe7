"""Settler: asks the rules, makes the store hold what they answer, starts over with what lost."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

from oncely.core.commands import Outcome
from oncely.core.errors import ContentionError, KeysLocked, ReplyLost, StoreUnavailable
from oncely.core.record import Key, Record
from oncely.core.rules import Decision, decide, depends_on_horizon, while_locked
from oncely.core.waiting import WaitingMessage
from oncely.engine.request import Request
from oncely.stores.store import Change, Records

_ROUNDS = 50
"""How often a record may change between reading and writing it before that is an error."""

_LOST_REPLIES = 3
"""How often one request may meet a connection that breaks."""

_Pending = list[tuple[int, Request]]
_Outcomes = list[Outcome | Exception | None]
_Writes = dict[Key, tuple[int, Decision, Record | None]]
BelievedHorizons = dict[str, float | None]
"""The horizon of each consumer, as it is believed to be; None where it has none."""


@dataclass
class Beliefs:
    """What all who settle in one store believe of it. Where that is wrong, they try once more."""

    horizons: BelievedHorizons = field(default_factory=dict)
    """As they were read last."""
    meets_records: bool = False
    """Whether most of what was asked for last has a record: then that is looked up first."""


class RelayObserver(Protocol):
    """Is told what a relay did. Nothing that it does may raise."""

    def deferred_sent(self, messages: Sequence[WaitingMessage]) -> None:
        """The transport has confirmed these; they wait no more."""

    def deferred_refused(self, messages: Sequence[WaitingMessage]) -> None:
        """The transport has refused these, whether or not they are tried again."""


class LedgerObserver(RelayObserver, Protocol):
    """Is told what a ledger did, too, in the same way."""

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

    def __init__(
        self,
        store: Records,
        observer: LedgerObserver | None = None,
        beliefs: Beliefs | None = None,
    ) -> None:
        self._store = store
        self.observer = observer
        self.beliefs = beliefs or Beliefs()

    def settle(self, requests: Sequence[Request]) -> list[Outcome]:
        """One outcome for each, in order. After an error some may be settled all the same."""
        outcomes: _Outcomes = [None] * len(requests)
        began = time.perf_counter()
        try:
            self._settle(requests, outcomes)
            _raise_first(outcomes)
        except Exception as error:
            self._show(requests, [error] * len(requests), began)
            raise
        settled = cast(list[Outcome], outcomes)
        self._show(requests, settled, began)
        return settled

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
        if self.observer is not None:
            self.observer.settled(requests, results, time.perf_counter() - began)

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
        horizons = self._believed_horizons(requests)
        locked: set[Key] = set()
        are_new = all(request.believed is None for request in requests)
        looks_first = are_new and self.beliefs.meets_records
        found = 0
        for number in range(_ROUNDS):
            if number or looks_first:
                now, pending = self._looked_up(pending, horizons)
                found = found or sum(request.believed is not None for _, request in pending)
            try:
                self._round(pending, outcomes, now, horizons, locked)
            except ReplyLost as error:
                # Whatever is stored of it: who asks again is answered as it would have been.
                lost += 1
                if lost == _LOST_REPLIES:
                    raise StoreUnavailable(str(error)) from error
            pending = [item for item in pending if outcomes[item[0]] is None]
            if not pending:
                if are_new:
                    self.beliefs.meets_records = found > len(requests) // 2
                return
        raise ContentionError(
            f"{len(pending)} records changed {_ROUNDS} times while they were being written"
        )

    def _looked_up(self, pending: _Pending, horizons: BelievedHorizons) -> tuple[float, _Pending]:
        """When these were looked up by the store's clock, and each with its record as it was then;
        `horizons` as they are.
        """
        loaded = self._store.load({request.key for _, request in pending})
        there = [
            (n, request._replace(believed=loaded.records.get(request.key)))
            for n, request in pending
        ]
        horizons |= self._read_horizons(r for _, r in there if r.believed is None)
        return loaded.now, there

    def _believed_horizons(self, requests: Iterable[Request]) -> BelievedHorizons:
        """The horizons that these depend on, where they do. One that is not known is not asked
        for: most consumers have none, and the store says so where that is wrong.
        """
        return {name: self.beliefs.horizons.get(name) for name in _with_horizon(requests)}

    def _read_horizons(self, requests: Iterable[Request]) -> BelievedHorizons:
        names = _with_horizon(requests)
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

        What is `locked` is not to be stored; keys that turn out to be are added.

        `now` is None while what is believed was not loaded. The first round decides as if the
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
                # Of two for one key the other waits for the next round, unless it need not.
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
        inserts, changes = [], []
        for _, decision, believed in writes.values():
            new = None if decision.new is None else _from_now(decision.new, now)
            if believed is not None:
                changes.append(Change(believed, new))
            elif new is not None:
                inserts.append(new)
        # What was decided without a horizon needs none, and is written at half the price.
        decided = [new for new in inserts if new.key.consumer in horizons]
        others = [new for new in inserts if new.key.consumer not in horizons]
        if others:
            written |= self._store.insert(others)
        if decided:
            names = {new.key.consumer for new in decided}
            written |= self._store.insert(decided, {name: horizons[name] for name in names})
        if changes:
            written |= self._store.swap(changes)


def _locked(key: Key) -> KeysLocked:
    return KeysLocked(
        f"{key.message_id!r}: somebody's transaction is at work on this key; ask again later", {key}
    )


def _raise_first(outcomes: _Outcomes) -> None:
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome


def _with_horizon(requests: Iterable[Request]) -> set[str]:
    """The consumers of which an answer depends on the horizon."""
    return {each.key.consumer for each in requests if depends_on_horizon(each.command)}


def _from_now(record: Record, now: float) -> Record:
    if record.lease_until is None or now == 0.0:
        return record
    return record._replace(lease_until=record.lease_until - now)


def _once_more(error: StoreUnavailable) -> StoreUnavailable:
    """The same for one more caller: whoever raises an exception adds to it."""
    again = StoreUnavailable(*error.args)
    again.__cause__ = error
    return again
