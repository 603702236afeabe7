"""Ledger: asks the rules, and makes the store hold what they answer. The only writer of records."""

import json
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from oncely.core.errors import (
    ConfigError,
    ContentionError,
    FencedError,
    MessageError,
    RefusedError,
    ReplyLost,
    describe,
)
from oncely.core.message import check_key
from oncely.core.policy import Duration, Finding, Policy, lease_seconds, seconds
from oncely.core.record import Claim, Key, Record, State
from oncely.core.rules import (
    PURGEABLE,
    Ask,
    ClaimOutcome,
    Command,
    Complete,
    Decision,
    Extend,
    Fail,
    Forget,
    MarkHandled,
    Outcome,
    Refused,
    Release,
    Reset,
    WriteOutcome,
    Written,
    decide,
)
from oncely.stores.base import Change, Query, Store, Tally
from oncely.stores.opening import TABLE, open_store

if TYPE_CHECKING:
    from sqlalchemy import Engine

_ROUNDS = 50
"""How often a record may change between reading and writing it before that is an error."""

_DRAW_BITS = 39


class _Request(NamedTuple):
    """A command for one key, and the record that it is believed to find."""

    key: Key
    command: Command
    believed: Record | None = None


class Ledger:
    """Which messages were processed, by whom, and who may process one now.

    Synchronous and safe to share between threads. Every method raises StoreUnavailable when the
    store cannot be reached, and MessageError for a key that cannot identify a message.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    # ---- Asking for claims ---------------------------------------------------------------------

    def claim(
        self,
        key: Key,
        lease: Duration | None = None,
        policy: Policy = Policy(),
        *,
        fingerprint: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        finding: Finding | None = None,
    ) -> ClaimOutcome:
        """Ask for the right to process the message `key` now.

        `lease` replaces the policy's. A `fingerprint` is compared with the one seen first.
        `metadata` is kept with a record that begins here. `finding` is what a probe found out
        about a claim in doubt, where the policy's `on_in_doubt` is one.
        """
        return self.claim_many(
            [key], lease, policy, fingerprints=[fingerprint], metadata=metadata, finding=finding
        )[0]

    def claim_many(
        self,
        keys: Sequence[Key],
        lease: Duration | None = None,
        policy: Policy = Policy(),
        *,
        fingerprints: Sequence[str | None] | None = None,
        metadata: Mapping[str, Any] | None = None,
        finding: Finding | None = None,
    ) -> list[ClaimOutcome]:
        """One outcome for each key, in order; one exchange with the store when all are new.

        Of a key that stands twice, the first is granted and the other finds it busy.
        """
        lease_s = policy.lease_s if lease is None else lease_seconds(lease)
        draw = random.getrandbits(_DRAW_BITS)
        kept = _json_value(metadata) if metadata else None
        requests = [
            _Request(key, Ask(check_key(key), policy, lease_s, draw, fingerprint, kept, finding))
            for key, fingerprint in zip(keys, fingerprints or repeat(None, len(keys)), strict=True)
        ]
        return cast(list[ClaimOutcome], self._carry_out(requests))

    # ---- With a claim --------------------------------------------------------------------------

    def handled(self, claim: Claim) -> Claim:
        """The handler has succeeded; deferred messages may still wait. Renews the lease.

        Returns the claim as it now stands. Raises FencedError when it is not the newest.
        """
        return _renewed(claim, self.handled_many([claim])[0])

    def handled_many(self, claims: Sequence[Claim]) -> list[WriteOutcome]:
        """`handled` for each; a claim that is not the newest is answered by Fenced."""
        return self._write(claims, MarkHandled)

    def complete(self, claim: Claim, result: Any = None) -> None:
        """Nothing is left to do. `result` is kept, as JSON.

        Raises FencedError when the claim is not the newest, MessageError when `result` is no
        JSON. To complete again under the same claim is not an error.
        """
        _raise_if_fenced(self.complete_many([claim], [result])[0])

    def complete_many(
        self, claims: Sequence[Claim], results: Sequence[Any] | None = None
    ) -> list[WriteOutcome]:
        """`complete` for each; a claim that is not the newest is answered by Fenced."""
        if results is None:
            return self._write(claims, Complete)
        values = iter([_json_value(result) for result in results])
        return self._write(claims, lambda claim: Complete(claim, next(values)))

    def fail(self, claim: Claim, error: BaseException | str, final: bool = False) -> None:
        """The handler has failed; after a `final` failure no further try is granted.

        The error's text is kept under "error" in the record's metadata, cut and with passwords
        masked. Raises FencedError when the claim is not the newest.
        """
        _raise_if_fenced(self.fail_many([claim], [error], final)[0])

    def fail_many(
        self, claims: Sequence[Claim], errors: Sequence[BaseException | str], final: bool = False
    ) -> list[WriteOutcome]:
        """`fail` for each; a claim that is not the newest is answered by Fenced."""
        texts = iter([describe(error) for error in errors])
        return self._write(claims, lambda claim: Fail(claim, next(texts), final))

    def release(self, claim: Claim) -> None:
        """Give the claim back as if it had never been granted.

        Raises FencedError when it is not the newest.
        """
        _raise_if_fenced(self.release_many([claim])[0])

    def release_many(self, claims: Sequence[Claim]) -> list[WriteOutcome]:
        """`release` for each; a claim that is not the newest is answered by Fenced."""
        return self._write(claims, Release)

    def extend(self, claim: Claim, lease: Duration) -> Claim:
        """Renew the lease, counted from now by the store's clock.

        Returns the claim as it now stands; the former one stays good, at the price of one more
        exchange with the store. Raises FencedError when it is not the newest.
        """
        return _renewed(claim, self.extend_many([claim], lease)[0])

    def extend_many(self, claims: Sequence[Claim], lease: Duration) -> list[WriteOutcome]:
        """`extend` for each; a claim that is not the newest is answered by Fenced."""
        lease_s = lease_seconds(lease)
        return self._write(claims, lambda claim: Extend(claim, lease_s))

    def _write(
        self, claims: Sequence[Claim], command: Callable[[Claim], Command]
    ) -> list[WriteOutcome]:
        requests = [_Request(claim.key, command(claim), claim.record) for claim in claims]
        return cast(list[WriteOutcome], self._carry_out(requests))

    # ---- Looking -------------------------------------------------------------------------------

    def now(self) -> float:
        """The store's clock, seconds since 1970."""
        return self._store.load(()).now

    def find(self, key: Key) -> Record | None:
        """The record of `key`, if there is one."""
        return self._store.load([check_key(key)]).records.get(key)

    def scan(
        self,
        consumer: str | None = None,
        state: State | str | None = None,
        older_than: Duration | None = None,
        limit: int = 100,
        *,
        text: str | None = None,
        lease_over: bool = False,
    ) -> Iterator[Record]:
        """At most `limit` records that fit, longest unseen first.

        `state` may be the status as the table has it. `text` stands in the message id.
        `lease_over` chooses those whose lease has run out: in processing, those in doubt. Raises
        ConfigError for a state that is none.
        """
        query = _query(consumer, state, older_than, limit)
        return iter(self._store.scan(query._replace(text=text, lease_over=lease_over)))

    def counts(self) -> Mapping[tuple[str, State], int]:
        """How many records each consumer has in each state."""
        return {name: tally.count for name, tally in self.tallies().items()}

    def tallies(self) -> Mapping[tuple[str, State], Tally]:
        """What each consumer's records in each state add up to."""
        return self._store.tallies()

    def size(self) -> int | None:
        """The bytes that the records take up, where the store can tell."""
        return self._store.size()

    def problems(self) -> Sequence[str]:
        """What is wrong with the schema or the settings of the store, a sentence each."""
        return self._store.problems()

    # ---- For operators -------------------------------------------------------------------------

    def migrate(self) -> None:
        """Create or upgrade the schema; safe when many start at once, and to repeat."""
        self._store.migrate()

    def migration_sql(self) -> str:
        """What `migrate` would do now, as SQL; empty where nothing."""
        return self._store.migration_sql()

    def reset(self, key: Key, *, by: str = "", why: str = "") -> None:
        """Allow a record that has failed or is in doubt to run again, its attempts from zero.

        Who did it, when and why is kept under "reset" in the record's metadata. Raises
        RefusedError for any other record.
        """
        self._operate(key, Reset(by, why), "only what has failed or is in doubt can be reset")

    def forget(self, key: Key) -> None:
        """Remove a record that nobody works on; a later delivery is a first one.

        Raises RefusedError where a claim is live.
        """
        self._operate(key, Forget(), "a live claim cannot be forgotten")

    def purge(
        self,
        older_than: Duration = "30d",
        consumer: str | None = None,
        batch: int = 1_000,
        *,
        on_batch: Callable[[int], None] = lambda _: None,
    ) -> int:
        """Remove records last seen longer ago than `older_than`, `batch` in one transaction.

        Never those in processing, nor those with deferred messages waiting. Returns how many;
        `on_batch` is told how many each transaction removed.
        """
        query = _query(consumer, None, older_than, batch)
        total = 0
        while purged := self._store.purge(query, PURGEABLE):
            on_batch(purged)
            total += purged
        return total

    def close(self) -> None:
        """Give back connections; a later call opens them again."""
        self._store.close()

    def _operate(self, key: Key, command: Command, refusal: str) -> None:
        [outcome] = self._carry_out([_Request(check_key(key), command)])
        if isinstance(outcome, Refused):
            state = "not in the ledger" if outcome.record is None else outcome.record.state.value
            raise RefusedError(f"{key.message_id!r} ({key.consumer}) is {state}: {refusal}")

    # ---- Decide, then swap ---------------------------------------------------------------------

    def _carry_out(self, requests: Sequence[_Request]) -> list[Outcome]:
        """Decide each request, store what was decided, and start over with those that lost."""
        outcomes: list[Outcome | None] = [None] * len(requests)
        pending = list(enumerate(requests))
        now = None
        for _ in range(_ROUNDS):
            pending = self._round(pending, outcomes, now)
            if not pending:
                return cast(list[Outcome], outcomes)
            loaded = self._store.load({request.key for _, request in pending})
            now = loaded.now
            pending = [
                (n, request._replace(believed=loaded.records.get(request.key)))
                for n, request in pending
            ]
        raise ContentionError(
            f"{len(pending)} records changed {_ROUNDS} times while they were being written"
        )

    def _round(
        self, pending: "_Pending", outcomes: list[Outcome | None], now: float | None
    ) -> "_Pending":
        """Decide and store once; fill in the outcomes that hold, return what is left.

        `now` is None while what is believed was not loaded. The first round decides as if the
        store's clock stood at zero: stores add their clock to what they write.
        """
        writes: dict[Key, tuple[int, Decision, Record | None]] = {}
        for n, (key, command, believed) in pending:
            decision = decide(believed, command, now or 0.0)
            if decision.new is not believed:
                # Of two for one key the other waits for the next round, unless it need not.
                if writes.setdefault(key, (n, decision, believed))[0] != n and decision.optional:
                    outcomes[n] = decision.outcome
            elif now is not None:
                outcomes[n] = decision.outcome
        try:
            written = self._store_all(writes.values(), now or 0.0)
        except ReplyLost:
            written = self._stored_after_all(writes)
        for key, (n, decision, _) in writes.items():
            if key in written or decision.optional:
                outcomes[n] = decision.outcome
        return [item for item in pending if outcomes[item[0]] is None]

    def _stored_after_all(
        self, writes: Mapping[Key, tuple[int, Decision, Record | None]]
    ) -> set[Key]:
        """Which of the writes whose reply was lost are stored: a commit is never guessed."""
        stored = self._store.load(writes).records
        return {
            key for key, (_, decision, _) in writes.items() if _is_stored(decision, stored.get(key))
        }

    def _store_all(
        self, writes: Collection[tuple[int, Decision, Record | None]], now: float
    ) -> set[Key]:
        inserts, changes = [], []
        for _, decision, believed in writes:
            new = None if decision.new is None else _from_now(decision.new, now)
            if believed is not None:
                changes.append(Change(believed, new))
            elif new is not None:
                inserts.append(new)
        written = self._store.insert(inserts) if inserts else set()
        return written | self._store.swap(changes) if changes else written


_Pending = list[tuple[int, _Request]]


def open_ledger(url: "str | Engine", *, table: str = TABLE, schema: str | None = None) -> Ledger:
    """A ledger over the store that `url` names; a SQLAlchemy Engine will do as well.

    The records are in `table`, of `schema` where one is named; in Redis, under keys that begin
    with `table`. Raises ConfigError for a URL of no known kind, a driver that is not installed, a
    name that is none, and a Redis that may evict records.
    """
    return Ledger(open_store(url, table, schema))


def _from_now(record: Record, now: float) -> Record:
    if record.lease_until is None or now == 0.0:
        return record
    return record._replace(lease_until=record.lease_until - now)


def _is_stored(decision: Decision, stored: Record | None) -> bool:
    if decision.new is None or stored is None:
        return decision.new is stored
    return stored.is_same_write(decision.new)


def _raise_if_fenced(outcome: WriteOutcome) -> Record | None:
    if isinstance(outcome, Written):
        return outcome.record
    newest = "gone" if outcome.record is None else f"at fence {outcome.record.fence}"
    raise FencedError(f"the claim is not the newest: its record is {newest}")


def _renewed(claim: Claim, outcome: WriteOutcome) -> Claim:
    record = _raise_if_fenced(outcome)
    return claim if record is None else claim._replace(record=record)


def _json_value(value: Any) -> Any:
    """`value` as it will be read back. Raises MessageError where it is no JSON."""
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise MessageError(f"this cannot be kept as JSON: {error}") from error


def _state(state: State | str) -> State:
    try:
        return State(state)
    except ValueError:
        raise ConfigError(f"state: {state!r} is none of {', '.join(State)}") from None


def _query(
    consumer: str | None, state: State | str | None, older_than: Duration | None, limit: int
) -> Query:
    older_than_s = None if older_than is None else seconds(older_than, "older_than")
    return Query(consumer, None if state is None else _state(state), older_than_s, limit)
