"""Settler: asks the rules, stores their answers, and decides again where a write lost a race."""

import time
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, repeat
from operator import attrgetter, is_
from typing import Protocol, cast

from oncely.core.cases import Case, answers_of, believed_by, case_of, cases_of, terms_of
from oncely.core.change import Change
from oncely.core.commands import Acquire, Command, Finish, Held, Outcome
from oncely.core.errors import ContentionError, KeysLocked, ReplyLost, StoreUnavailable
from oncely.core.record import Key, Record
from oncely.core.rules import Decision, decide, depends_on_horizon, while_locked
from oncely.core.waiting import WaitingMessage
from oncely.stores.store import Believed, Records

_ROUNDS = 50
"""How often a record may change between reading and writing it before that is an error."""

_MOST_AHEAD = 100
"""A replay is found out after so many messages; copies that come together are fewer."""

_LOST_REPLIES = 3
"""How often the connection may break during one command."""

_Pending = list[tuple[int, Command, Record | None]]
"""Each with its index and, where it was read, its record."""
_Outcomes = list[Outcome | Exception | None]
_Writes = dict[Key, tuple[int, Decision, Record | None]]
_key_of = attrgetter("key")
_is_open = partial(is_, None)
"""Whether there is no outcome yet."""
BelievedHorizons = dict[str, float | None]
"""The horizon of each consumer, as it is believed to be; None where it has none."""


@dataclass
class Beliefs:
    """What all settlers of one store believe about it. Where that is wrong, they try once more."""

    horizons: BelievedHorizons = field(default_factory=dict)
    """As they were read last."""
    known_ahead: int = 0
    """By how many lately messages with a record outnumber new ones: where they do, records are
    read first."""


class SettleObserver(Protocol):
    """Is called with what a settler did. Its methods must not raise, here and below."""

    def settled(
        self, commands: Sequence[Command], results: Sequence[Outcome | Exception], took_s: float
    ) -> None:
        """Commands went to the store together; each has its outcome or its error, in order."""


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
    """Settles commands of any kind, for any keys: where none is in conflict, with one exchange for
    all of a case, and one for those that are alike with no other.
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

    def settle(self, commands: Sequence[Command]) -> Sequence[Outcome]:
        """One outcome for each, in order. After an error, some may be settled nevertheless."""
        began = time.perf_counter()
        try:
            settled = self._settle(commands, [None] * len(commands))
            for outcome in settled:
                if isinstance(outcome, Exception):
                    raise outcome
        except Exception as error:
            self._show(commands, [error] * len(commands), began)
            raise
        outcomes = cast(Sequence[Outcome], settled)
        self._show(commands, outcomes, began)
        return outcomes

    def settle_each(self, commands: Sequence[Command]) -> Sequence[Outcome | Exception]:
        """As `settle`, for independent callers: an error takes the place of one outcome.

        Only StoreUnavailable is the answer to all that were not settled before it.
        """
        outcomes: _Outcomes = [None] * len(commands)
        began = time.perf_counter()
        try:
            results = self._settle(commands, outcomes)
        except Exception as error:  # noqa: BLE001 - the callers whom it concerns get it.
            results = self._each_after(error, commands, outcomes)
        settled = cast(Sequence[Outcome | Exception], results)
        self._show(commands, settled, began)
        return settled

    def _each_after(
        self, error: Exception | None, commands: Sequence[Command], outcomes: _Outcomes
    ) -> _Outcomes:
        """What each gets after that error of them all."""
        results = [*outcomes]
        left = [n for n, outcome in enumerate(outcomes) if outcome is None]
        for n in left:
            if isinstance(error, StoreUnavailable):
                # One for each caller: raising an exception changes its traceback.
                results[n] = again = StoreUnavailable(*error.args)
                again.__cause__ = error
            elif len(left) == 1:
                results[n] = error
            else:
                alone: _Outcomes = [None]
                try:
                    error = None
                    [results[n]] = self._settle([commands[n]], alone)
                except Exception as own:  # noqa: BLE001 - see above.
                    error = own
                    results[n] = alone[0] or own
        return results

    def _show(
        self, commands: Sequence[Command], results: Sequence[Outcome | Exception], began: float
    ) -> None:
        if self.observer is not None:
            self.observer.settled(commands, results, time.perf_counter() - began)

    def _settle(self, commands: Sequence[Command], outcomes: _Outcomes) -> _Outcomes:
        """Fill in the outcomes, and return them; where it ends in an error, those that hold."""
        if not commands:
            return outcomes
        # A horizon that is not known is not read: most consumers have none, and an insert fails
        # where that belief is wrong.
        names = _with_horizon(commands)
        horizons = {name: self.beliefs.horizons.get(name) for name in names} if names else {}
        locked: set[Key] = set()
        are_new = {*map(type, commands)} == {Acquire}
        lost = found = 0
        for number in range(_ROUNDS):
            try:
                if number or (are_new and self.beliefs.known_ahead > 0):
                    left = [
                        (n, commands[n]) for n, outcome in enumerate(outcomes) if outcome is None
                    ]
                    now, pending = self._looked_up(left, horizons, outcomes)
                    found = found or sum(record is not None for *_, record in pending)
                    self._round(pending, outcomes, now, horizons, locked)
                else:
                    self._first_round(commands, outcomes, horizons, locked)
            except ReplyLost as error:
                # It may be stored or not: asking again gives the answer that was lost.
                lost += 1
                if lost == _LOST_REPLIES:
                    raise StoreUnavailable(str(error)) from error
            if not any(map(_is_open, outcomes)):
                if are_new:
                    ahead = self.beliefs.known_ahead + 2 * found - len(commands)
                    self.beliefs.known_ahead = max(-_MOST_AHEAD, min(ahead, _MOST_AHEAD))
                return outcomes
        raise ContentionError(
            f"{outcomes.count(None)} records changed {_ROUNDS} times while they were being written"
        )

    def _first_round(
        self,
        commands: Sequence[Command],
        outcomes: _Outcomes,
        horizons: BelievedHorizons,
        locked: set[Key],
    ) -> None:
        """Store what can be decided before any record is read, case by case, and fill in the
        outcomes of what is stored; those that turn out to be locked are added to `locked`.
        """
        alone: _Writes = {}
        for indexes, alike in _cases(commands, horizons):
            first = alike[0]
            horizon = horizons.get(first.key.consumer) if horizons else None
            believed = believed_by(first)
            decision = decide(believed, first, 0.0, horizon)
            if decision.change is None:
                continue
            if len(alike) == 1 < len(commands):
                alone[first.key] = (indexes[0], decision, believed)
                continue
            answers: Iterable[Outcome] = repeat(decision.outcome)
            try:
                if isinstance(decision.change, Change):
                    case = case_of(decision.change, alike)
                    is_one = len(alike) == 1
                    answers = answers if is_one else answers_of(decision.outcome, case, alike)
                    written: Collection[Key] = self._write(case, horizons)
                else:
                    held = cast(Sequence[Held], alike)
                    written = self._store.delete([(e.claim.key, e.claim.version) for e in held])
            except KeysLocked as error:
                locked |= error.keys
                written = error.written
            if len(written) == len(commands):
                outcomes[:] = islice(answers, len(commands))
                return
            for n, command, answer in zip(indexes, alike, answers, strict=False):
                if command.key in written:
                    outcomes[n] = answer
        self._store_all(alone, outcomes, horizons, locked)
        read: _Pending = [
            (n, command, command.found)
            for n, command in enumerate(commands)
            if isinstance(command, Finish) and command.found is not None
        ]
        if read:
            self._round(read, outcomes, 0.0, horizons, locked)

    def _write(self, case: Case, horizons: BelievedHorizons) -> set[Key]:
        """The keys of what is stored of a case."""
        if case.rows[0][1] is not None:
            return self._store.update(case)
        if not horizons:
            return self._store.insert(case)
        # What was decided without a horizon is written without one, at half the price.
        names = {row[0].consumer for row in case.rows} & horizons.keys()
        return self._store.insert(case, {name: horizons[name] for name in names} or None)

    def _looked_up(
        self,
        left: Sequence[tuple[int, Command]],
        horizons: BelievedHorizons,
        outcomes: _Outcomes,
    ) -> tuple[float, _Pending]:
        """Look these up: the store's clock, and each with its record as it was then. `horizons` are
        brought up to date. Where the whole table is locked, all get that as their outcome.
        """
        try:
            loaded = self._store.load({command.key for _, command in left})
        except KeysLocked as error:
            if not error.keys:
                raise
            for n, command in left:
                outcomes[n] = while_locked(None, command, 0.0) or _locked(command.key)
            return 0.0, []
        there = [(n, command, loaded.records.get(command.key)) for n, command in left]
        # Of no others: what was believed of a consumer whose records are all there may be wrong.
        names = _with_horizon([command for _, command, record in there if record is None])
        read = self._store.horizons(names) if names else {}
        horizons.clear()
        horizons |= {name: read.get(name) for name in names}
        self.beliefs.horizons |= horizons
        return loaded.now, there

    def _round(
        self,
        pending: _Pending,
        outcomes: _Outcomes,
        now: float,
        horizons: BelievedHorizons,
        locked: set[Key],
    ) -> None:
        """Decide on the records that were found, and store once; fill in the outcomes that hold,
        also after an error.

        Nothing is stored for the `locked` keys; those that turn out to be locked are added.
        """
        writes: _Writes = {}
        for n, command, record in pending:
            key = command.key
            decision = decide(record, command, now, horizons.get(key.consumer))
            if decision.change is None:
                outcomes[n] = decision.outcome
            elif key in locked:
                answer = (
                    decision.outcome if decision.optional else while_locked(record, command, now)
                )
                outcomes[n] = answer or _locked(key)
            # Of two for one key, the second waits for the next round, unless its write is optional.
            elif writes.setdefault(key, (n, decision, record))[0] != n and decision.optional:
                outcomes[n] = decision.outcome
        self._store_all(writes, outcomes, horizons, locked)

    def _store_all(
        self,
        writes: _Writes,
        outcomes: _Outcomes,
        horizons: BelievedHorizons,
        locked: set[Key],
    ) -> None:
        """Store what was decided for each by itself, in as few cases as possible; fill in the
        outcomes that hold, also after an error.
        """
        removed: list[Believed] = []
        changes: list[tuple[Key, int | None, Change]] = []
        for key, (_, decision, record) in writes.items():
            version = None if record is None else record.version
            if isinstance(decision.change, Change):
                changes.append((key, version, decision.change))
            elif version is not None:
                removed.append((key, version))
        written: set[Key] = set()
        try:
            for case in cases_of(changes):
                written |= self._write(case, horizons)
            if removed:
                written |= self._store.delete(removed)
        except KeysLocked as error:
            written |= error.written
            locked |= error.keys
        finally:
            for key, (n, decision, _) in writes.items():
                if key in written or decision.optional:
                    outcomes[n] = decision.outcome


def _cases(
    commands: Sequence[Command], horizons: BelievedHorizons
) -> Iterable[tuple[Sequence[int], Sequence[Command]]]:
    """These in parts that each are one case, with their indexes; without those of which no answer
    is known before their records are read. Of two for one key, the second has to see what becomes
    of the first.
    """
    if len(commands) == 1:
        # A case by itself, without a look at it.
        return [(range(1), commands)] if isinstance(commands[0], Acquire | Held) else []
    if horizons:
        at = [horizons.get(command.key.consumer) for command in commands]
        terms = [*map(terms_of, commands, at)]
    else:
        terms = [*map(terms_of, commands, repeat(None))]
    is_usual = not horizons and terms.count(terms[0]) == len(terms)
    if is_usual and len({*map(_key_of, commands)}) == len(terms):
        # One case, without a look at each.
        return [] if terms[0] is None else [(range(len(commands)), commands)]
    seen: set[Key] = set()
    cases: dict[Hashable, tuple[list[int], list[Command]]] = {}
    for n, (command, of) in enumerate(zip(commands, terms, strict=True)):
        key = command.key
        if of is not None and key not in seen:
            seen.add(key)
            indexes, alike = cases.setdefault((of, key.consumer in horizons), ([], []))
            indexes.append(n)
            alike.append(command)
    return cases.values()


def _with_horizon(commands: Sequence[Command]) -> set[str]:
    """The consumers of which an answer depends on the horizon."""
    names = set()
    for command in commands:
        if (
            isinstance(command, Acquire)
            and command.sent_at is not None
            and depends_on_horizon(command)
        ):
            names.add(command.key.consumer)
    return names


def _locked(key: Key) -> KeysLocked:
    return KeysLocked(
        f"{key.message_id!r}: another transaction has locked this record; ask again later", {key}
    )
