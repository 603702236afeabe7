"""Ledger: asks the rules, and makes the store hold what they answer. The only writer of records."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from oncely.batching import Batcher
from oncely.core.errors import ConfigError, RefusedError, describe
from oncely.core.message import check_key
from oncely.core.policy import Duration, Finding, Policy, lease_seconds, seconds
from oncely.core.record import Claim, Key, Record, State
from oncely.core.rules import (
    PURGEABLE,
    ClaimOutcome,
    Command,
    Complete,
    Extend,
    Fail,
    Forget,
    Held,
    MarkHandled,
    Refused,
    Release,
    Reset,
    WriteOutcome,
)
from oncely.request import (
    Request,
    json_value,
    raise_if_fenced,
    renewed,
    to_claim,
    to_give_back,
    to_write,
)
from oncely.settling import Observer, Settler
from oncely.stores.base import Query, Store, Tally
from oncely.stores.names import TABLE_NAME
from oncely.stores.opening import open_store

if TYPE_CHECKING:
    from sqlalchemy import Engine


_log = logging.getLogger(__name__)


class Ledger:
    """Which messages were processed, by whom, and who may process one now.

    Synchronous and safe to share between threads: single calls that wait at the same time go to
    the store together. Every method raises StoreUnavailable when the store cannot be reached, and
    MessageError for a key that cannot identify a message.
    """

    def __init__(self, store: Store, metrics: Observer | None = None) -> None:
        self._store = store
        self._metrics = metrics
        self._settler = Settler(store, metrics)
        self._batcher = Batcher(self._settler.settle, self._settler.settle_each, to_give_back)

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
        [request] = to_claim([key], lease, policy, [fingerprint], metadata, finding)
        return cast(ClaimOutcome, self._batcher.call(request))

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
        requests = to_claim(keys, lease, policy, fingerprints, metadata, finding)
        return cast(list[ClaimOutcome], self._settler.settle(requests))

    # ---- With a claim --------------------------------------------------------------------------

    def handled(self, claim: Claim) -> Claim:
        """The handler has succeeded; deferred messages may still wait. Renews the lease.

        Returns the claim as it now stands. Raises FencedError when it is not the newest.
        """
        return renewed(claim, self._call(MarkHandled(claim)))

    def handled_many(self, claims: Sequence[Claim]) -> list[WriteOutcome]:
        """`handled` for each; a claim that is not the newest is answered by Fenced."""
        return self._write(map(MarkHandled, claims))

    def complete(self, claim: Claim, result: Any = None) -> None:
        """Nothing is left to do. `result` is kept, as JSON.

        Raises FencedError when the claim is not the newest, MessageError when `result` is no
        JSON. To complete again under the same claim is not an error.
        """
        raise_if_fenced(self._call(Complete(claim, json_value(result))))

    def complete_many(
        self, claims: Sequence[Claim], results: Sequence[Any] | None = None
    ) -> list[WriteOutcome]:
        """`complete` for each; a claim that is not the newest is answered by Fenced."""
        if results is None:
            return self._write(map(Complete, claims))
        pairs = zip(claims, map(json_value, results), strict=True)
        return self._write(Complete(claim, value) for claim, value in pairs)

    def fail(self, claim: Claim, error: BaseException | str, final: bool = False) -> None:
        """The handler has failed; after a `final` failure no further try is granted.

        The error's text is kept under "error" in the record's metadata, cut and with passwords
        masked. Raises FencedError when the claim is not the newest.
        """
        raise_if_fenced(self._call(Fail(claim, describe(error), final)))

    def fail_many(
        self, claims: Sequence[Claim], errors: Sequence[BaseException | str], final: bool = False
    ) -> list[WriteOutcome]:
        """`fail` for each; a claim that is not the newest is answered by Fenced."""
        pairs = zip(claims, map(describe, errors), strict=True)
        return self._write(Fail(claim, text, final) for claim, text in pairs)

    def release(self, claim: Claim) -> None:
        """Give the claim back as if it had never been granted.

        Raises FencedError when it is not the newest.
        """
        raise_if_fenced(self._call(Release(claim)))

    def release_many(self, claims: Sequence[Claim]) -> list[WriteOutcome]:
        """`release` for each; a claim that is not the newest is answered by Fenced."""
        return self._write(map(Release, claims))

    def extend(self, claim: Claim, lease: Duration) -> Claim:
        """Renew the lease, counted from now by the store's clock.

        Returns the claim as it now stands; the former one stays good, at the price of one more
        exchange with the store. Raises FencedError when it is not the newest.
        """
        return renewed(claim, self._call(Extend(claim, lease_seconds(lease))))

    def extend_many(self, claims: Sequence[Claim], lease: Duration) -> list[WriteOutcome]:
        """`extend` for each; a claim that is not the newest is answered by Fenced."""
        lease_s = lease_seconds(lease)
        return self._write(Extend(claim, lease_s) for claim in claims)

    def _call(self, command: Held) -> WriteOutcome:
        return cast(WriteOutcome, self._batcher.call(to_write(command)))

    def _write(self, commands: Iterable[Held]) -> list[WriteOutcome]:
        requests = [to_write(command) for command in commands]
        return cast(list[WriteOutcome], self._settler.settle(requests))

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
        if text is not None and not _can_be_stored(text):
            raise ConfigError(f"text: {text!r} can stand in no message id")
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
        self._operate(
            key,
            Reset(describe(by), describe(why)),
            "only what has failed or is in doubt can be reset",
        )

    def forget(self, key: Key, *, found: Record | None = None) -> None:
        """Remove a record that nobody works on; a later delivery is a first one.

        Raises RefusedError where a claim is live, and where the record is not as it was `found`.
        """
        refusal = "a live claim cannot be forgotten"
        if found is not None:
            refusal += ", nor what has changed since it was found"
        self._operate(key, Forget(None if found is None else found.version), refusal)

    def purge(
        self,
        older_than: Duration = "30d",
        consumer: str | None = None,
        batch: int = 1_000,
        *,
        on_batch: Callable[[int], None] = lambda _: None,
    ) -> int:
        """Remove records last seen longer ago than `older_than`, `batch` in one transaction.

        Never those in processing, nor those with deferred messages waiting. Returns, and logs,
        how many; `on_batch` is told how many each transaction removed.
        """
        query = _query(consumer, None, older_than, batch)
        total = 0
        while purged := self._store.purge(query, PURGEABLE):
            on_batch(purged)
            total += purged
            if self._metrics is not None:
                self._metrics.purged(consumer, purged)
        _log.info("purged", extra={"consumer": consumer, "count": total})
        return total

    def close(self) -> None:
        """Give back connections; a later call opens them again."""
        self._batcher.close()
        self._store.close()

    def _operate(self, key: Key, command: Command, refusal: str) -> None:
        [outcome] = self._settler.settle([Request(check_key(key), command)])
        if isinstance(outcome, Refused):
            state = "not in the ledger" if outcome.record is None else outcome.record.state.value
            raise RefusedError(f"{key.message_id!r} ({key.consumer}) is {state}: {refusal}")


def open_ledger(
    url: "str | Engine",
    *,
    table: str = TABLE_NAME,
    schema: str | None = None,
    metrics: Observer | None = None,
) -> Ledger:
    """A ledger over the store that `url` names; a SQLAlchemy Engine will do as well.

    The records are in `table`, of `schema` where one is named; in Redis, under keys that begin
    with `table`. `metrics` is an `oncely.metrics.Metrics`, where Prometheus is to see what happens.
    Raises ConfigError for a URL of no known kind, a driver that is not installed, a name that is
    none, and a Redis that may evict records.
    """
    return Ledger(open_store(url, table, schema), metrics)


def _can_be_stored(text: str) -> bool:
    return "\0" not in text and not any("\ud800" <= letter <= "\udfff" for letter in text)


def _state(state: State | str) -> State:
    try:
        return State(state)
    except ValueError:
        raise ConfigError(f"state: {state!r} is none of {', '.join(State)}") from None


def _query(
    consumer: str | None, state: State | str | None, older_than: Duration | None, limit: int
) -> Query:
    if type(limit) is not int or limit < 1:
        raise ConfigError(f"limit: {limit!r} is no whole number of 1 or more")
    older_than_s = None if older_than is None else seconds(older_than, "older_than")
    return Query(consumer, None if state is None else _state(state), older_than_s, limit)
