"""Ledger: asks the rules, and makes the store hold what they answer. The only writer of records."""

import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from oncely.core.commands import Extend, Forget, Outcome, Reset, Written
from oncely.core.durations import Duration, lease_seconds, seconds
from oncely.core.errors import ConfigError, describe
from oncely.core.message import Message
from oncely.core.policy import Policy
from oncely.core.record import Claim, Key, Record, State, check_key
from oncely.core.rules import PURGEABLE
from oncely.core.waiting import OUTBOX, DeadLetter, WaitingMessage, retries_of
from oncely.engine.batch import Batcher
from oncely.engine.calls import Calls
from oncely.engine.mailbox import LedgerMailbox
from oncely.engine.request import Request, raise_if_refused, to_give_back, to_write
from oncely.engine.settle import LedgerObserver, Settler
from oncely.engine.transaction import JoinedTransaction
from oncely.stores.memory_store import MemoryStore
from oncely.stores.names import TABLE_NAME
from oncely.stores.open_store import open_store
from oncely.stores.store import (
    Change,
    Horizons,
    Inside,
    KeyRange,
    Query,
    Store,
    Tally,
    Wanted,
)

if TYPE_CHECKING:
    from sqlalchemy import Engine

T = TypeVar("T")

_RETENTION = Policy().retention
"""Of a consumer that told none."""
_TICK_S = 1e-6
"""The least by which the times of stores differ."""


class Closable(Protocol):
    """What can be closed, and goes on when it is used again."""

    def close(self) -> None:
        """End what it has begun."""


Kept = TypeVar("Kept", bound=Closable)

_log = logging.getLogger(__name__)


class Ledger(Calls):
    """Which messages were processed, by whom, and who may process one now.

    Synchronous and safe to share between threads: single calls that wait at the same time go to
    the store together. Every method raises StoreUnavailable when the store cannot be reached, and
    MessageError for a key that cannot identify a message.
    """

    def __init__(self, store: Store, metrics: LedgerObserver | None = None) -> None:
        self._store = store
        self._metrics = metrics
        self._settler = Settler(store, metrics)
        self._batcher = Batcher(self._settler.settle, self._settler.settle_each, to_give_back)
        self._told_retentions: set[tuple[str, float]] = set()
        self._kept: dict[object, Any] = {}

    def keep(self, name: object, make: Callable[[], Kept]) -> Kept:
        """What those who work with this ledger keep once for all of them: made where there is none
        by this name yet, and closed with the ledger.
        """
        if name not in self._kept:
            self._kept.setdefault(name, make())
        return cast(Kept, self._kept[name])

    def _settle_one(self, request: Request) -> Outcome:
        return self._batcher.call(request)

    def _settle_each(self, requests: Sequence[Request]) -> Sequence[Outcome | Exception]:
        return self._settler.settle_each(requests)

    def _settle(self, requests: Sequence[Request]) -> list[Outcome]:
        return self._settler.settle(requests)

    def _settle_inside(self, inside: Inside, requests: Sequence[Request]) -> list[Outcome]:
        return Settler(inside, self._metrics).settle(requests)

    def _transact(self, work: Callable[[Inside], T]) -> T:
        return self._store.transaction(work)

    @property
    def can_defer(self) -> bool:
        """Whether the store has transactions, and so deferred messages and steps."""
        return self._store.has_transactions

    @property
    def place(self) -> object:
        """Where its tables are, as Store says."""
        return self._store.place

    def check_joins(self, source: object) -> None:
        """Raise ConfigError where the ledger cannot be part of the transactions of `source`, as
        Store says.
        """
        self._store.check_joins(source)

    @property
    def mailbox(self) -> LedgerMailbox:
        """The messages that wait, for whoever sends them."""
        return LedgerMailbox(self, self._store)

    @property
    def is_shared(self) -> bool:
        """Whether other processes see the same records."""
        return not isinstance(self._store, MemoryStore)

    def extend_each(self, claims: Sequence[Claim], lease: Duration) -> list[Outcome | Exception]:
        """As `extend_many`, for a heartbeat: it waits for no other call's connection, and what
        could not be extended has its error.
        """
        lease_s = lease_seconds(lease)
        requests = [to_write(Extend(claim, lease_s)) for claim in claims]
        return Settler(self._store.beside(), self._metrics).settle_each(requests)

    # ---- Looking -------------------------------------------------------------------------------

    def now(self) -> float:
        """The store's clock, seconds since 1970."""
        return self._store.load(()).now

    def find(self, key: Key) -> Record | None:
        """The record of `key`, if there is one."""
        return self._store.load([check_key(key)]).records.get(key)

    def find_many(self, keys: Collection[Key]) -> Mapping[Key, Record]:
        """The records of those of `keys` that have one."""
        return self._store.load([check_key(key) for key in keys]).records

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

    def key_ranges(self, number: int) -> Sequence[KeyRange]:
        """At most `number` ranges, of about as many records each, that together hold all; one
        where the store cannot go by the order of its keys.
        """
        return self._store.key_ranges(number)

    def read(
        self, keys: KeyRange = KeyRange(), wanted: Wanted = Wanted()
    ) -> Iterator[Sequence[Record]]:
        """The records of a range that are wanted, page by page, however many there are.

        What is in the ledger all the while is given, once, as it is when its page is read; in
        Redis, a record may be given again.
        """
        return self._store.read(keys, wanted)

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
        """Allow a record that has failed or is in doubt to run again, its attempts from zero; at
        once where its message waits in the ledger, or is a dead letter there.

        Who did it, when and why is kept under "reset" in the record's metadata. Raises
        RefusedError for any other record.
        """
        self._operate(
            key,
            Reset(describe(by), describe(why)),
            "only what has failed or is in doubt can be reset",
        )

    def forget(self, key: Key, *, found: Record | None = None) -> None:
        """Remove a record that nobody works on, with its steps and what it deferred; a later
        delivery is a first one, and so is a message that waits in the ledger to be tried again.

        Raises RefusedError where a claim is live, and where the record is not as it was `found`.
        """
        refusal = "a live claim cannot be forgotten"
        if found is not None:
            refusal += ", nor what has changed since it was found"
        self._operate(key, Forget(None if found is None else found.version), refusal)

    def dead(self, consumer: str | None = None, limit: int = 100) -> Iterator[DeadLetter]:
        """At most `limit` dead letters, of one consumer or of all, in the order in which they came.

        None where the store has no transactions: there the broker has them.
        """
        return self.mailbox.dead(consumer, _limit(limit))

    def retry_dead(
        self,
        ids: int | Collection[int],
        message: Message | None = None,
        *,
        by: str = "",
        why: str = "",
    ) -> int:
        """Let dead letters be handled by their consumers again, at once, their attempts from zero;
        return how many were still there. `message` replaces the one of a single letter.

        Who did it, when and why is kept as by `reset`. Raises MessageError for a message that
        cannot be one, or has another id; ConfigError for one that is to replace several.
        """
        numbers = _numbers(ids)
        if message is not None and len(numbers) != 1:
            raise ConfigError("message: it can replace one; name one dead letter")
        return self.mailbox.retry_dead(numbers, message, describe(by), describe(why))

    def discard_dead(self, ids: int | Collection[int]) -> int:
        """Remove dead letters; return how many were still there. Their records stay, so that a
        redelivery is no first one.
        """
        return self.mailbox.discard_dead(_numbers(ids))

    def waiting(self, consumer: str | None = None, limit: int = 100) -> Iterator[WaitingMessage]:
        """At most `limit` messages that wait to be tried again, of one consumer or of all: each
        with `key`, `message`, `due`, `attempts` and `error`.
        """
        queue = retries_of("*" if consumer is None else consumer)
        return self.mailbox.listed(queue, _limit(limit))

    def keep_retention(self, consumer: str, retention: Duration) -> None:
        """Keep for how long the consumer's records are to be kept, which `purge` goes by. What this
        ledger was told before is not written again.
        """
        told = (consumer, seconds(retention, "retention"))
        if told not in self._told_retentions:
            self._store.keep_retention(*told)
            self._told_retentions.add(told)

    def retentions(self) -> Mapping[str, timedelta]:
        """For how long records are to be kept, of each consumer that told it."""
        kept = self._store.retentions()
        return {consumer: timedelta(seconds=kept_s) for consumer, kept_s in kept.items()}

    def purge(
        self,
        older_than: Duration | None = None,
        consumer: str | None = None,
        batch: int = 1_000,
        *,
        on_batch: Callable[[int], None] = lambda _: None,
    ) -> int:
        """Remove records last seen longer ago than `older_than`, `batch` in one transaction; where
        that is not said, each consumer's after its own retention (30 days where it told none).

        Never those in processing, nor those with deferred messages waiting. What was sent before
        that is too old from now on, unless it is in the ledger. Returns, and logs, how many;
        `on_batch` is told how many each transaction removed. Raises KeysLocked where somebody's
        transaction keeps it from raising a horizon: purge again later.
        """
        if older_than is None:
            kept = self.retentions()
            names = {consumer} if consumer else {name for name, _ in self.tallies()} | kept.keys()
            return sum(
                self.purge(kept.get(name, _RETENTION), name, batch, on_batch=on_batch)
                for name in sorted(names)
            )
        query = _query(consumer, None, older_than, batch)
        total = 0
        while purged := self._store.purge(query, PURGEABLE):
            on_batch(purged)
            total += purged
            if self._metrics is not None:
                self._metrics.purged(consumer, purged)
        _log.info("purged", extra={"consumer": consumer, "count": total})
        return total

    def purge_found(self, found: Sequence[Record]) -> set[Key]:
        """Remove those of `found`, in one transaction where there are any, that are still as they
        were found; return their keys.

        Never those in processing or handled, nor those with deferred messages waiting. Their
        steps stay until `purge_steps`.
        """
        gone = [Change(record, None) for record in found if record.state in PURGEABLE]

        def purge(inside: Inside) -> set[Key]:
            waiting = {message.parent for message in inside.waiting({old.key for old, _ in gone})}
            purged = inside.swap([change for change in gone if change.old.key not in waiting])
            inside.forget_until(_just_after(old for old, _ in gone if old.key in purged))
            return purged

        if self.can_defer:
            purged = self._transact(purge)
        else:
            # First: what was not forgotten may be refused, what was is never granted.
            self._store.forget_until(_just_after(old for old, _ in gone))
            purged = self._store.swap(gone)
        if self._metrics is not None:
            for consumer, count in Counter(key.consumer for key in purged).items():
                self._metrics.purged(consumer, count)
        return purged

    def purge_steps(self, older_than: Duration, consumer: str | None = None) -> None:
        """Remove steps kept longer ago than `older_than`, of messages that have no record."""
        self._store.purge(_query(consumer, None, older_than, 1_000), ())

    # ---- Transactions --------------------------------------------------------------------------

    def transaction(self, connection: Any) -> JoinedTransaction:
        """The ledger's calls inside the caller's own transaction: `with` gives an Inbox.

        `connection` is a SQLAlchemy Connection or Session, a connection of psycopg, sqlite3 or
        Django, to the database that the ledger is in; with an AsyncConnection or AsyncSession it
        is `async with`, and gives an AsyncInbox. What is claimed, written and deferred there is
        stored when the caller commits, together with the caller's own work, or not at all.

        Leaving the block raises EndedError where the transaction was ended inside it, by whomever
        and however: a claim that was committed by that runs out. Raises
        ConfigError for what is no such connection, and where the store has no transactions.
        """
        beliefs = self._settler.beliefs
        return JoinedTransaction(self, self._store, connection, self._metrics, beliefs)

    def is_contention(self, error: Exception) -> bool:
        """Whether `error`, of a caller's transaction, says that it lost against another, or its
        connection: all of it may be done again.
        """
        return self._store.is_contention(error)

    def is_outage(self, error: Exception) -> bool:
        """Whether `error`, of a caller's connection, says that the database cannot be reached."""
        return self._store.is_outage(error)

    @property
    def observer(self) -> LedgerObserver | None:
        """The metrics that are told what happens, where any are."""
        return self._metrics

    def observe(self, metrics: LedgerObserver) -> None:
        """Tell these from now on what happens, and none that were told before."""
        self._metrics = self._settler.observer = metrics

    def count_untracked(self, consumer: str) -> None:
        """Say that a message of `consumer` runs without a claim: logged, and told the metrics."""
        _log.warning("untracked", extra={"consumer": consumer})
        if self._metrics is not None:
            self._metrics.untracked(consumer)

    def close(self) -> None:
        """Give back connections, and end threads; a later call opens and starts them again."""
        for kept in list(self._kept.values()):
            kept.close()
        self._batcher.close()
        self._store.close()

    def _operate(self, key: Key, command: Reset | Forget, refusal: str) -> None:
        request = Request(check_key(key), command)
        if self.can_defer:
            outcome = self._transact(lambda inside: self._operate_inside(inside, request))
        else:
            [outcome] = self._settler.settle([request])
        raise_if_refused(key, outcome, refusal)

    def _operate_inside(self, inside: Inside, request: Request) -> Outcome:
        [outcome] = self._settle_inside(inside, [request])
        if not isinstance(outcome, Written):
            return outcome
        waiting = inside.waiting([request.key])
        if isinstance(request.command, Forget):
            inside.forget_steps(request.key)
            # What waits to be tried is the message itself, and may be the only copy of it.
            inside.remove([each for each in waiting if each.queue == OUTBOX])
        elif retries := [each for each in waiting if each.queue != OUTBOX]:
            inside.free(retries)
        return outcome


def open_ledger(
    url: "str | Engine",
    *,
    table: str = TABLE_NAME,
    schema: str | None = None,
    metrics: LedgerObserver | None = None,
) -> Ledger:
    """A ledger over the store that `url` names; a SQLAlchemy Engine will do as well.

    The records are in `table`, of `schema` where one is named; in Redis, under keys that begin
    with `table`. `metrics` is an `oncely.metrics.Metrics`, where Prometheus is to see what happens.
    Raises ConfigError for a URL of an unknown kind, a driver that is not installed, a name that is
    not an identifier, and a Redis that may evict records.
    """
    return Ledger(open_store(url, table, schema), metrics)


def _just_after(records: Iterable[Record]) -> Horizons:
    """The horizons of a ledger that has forgotten these."""
    horizons: dict[str, float] = {}
    for (consumer, _), last_seen in ((record.key, record.last_seen) for record in records):
        horizons[consumer] = max(last_seen + _TICK_S, horizons.get(consumer, -math.inf))
    return horizons


def _numbers(ids: int | Collection[int]) -> Collection[int]:
    numbers = [ids] if isinstance(ids, int) else [*ids]
    if wrong := [each for each in numbers if type(each) is not int]:
        raise ConfigError(f"id: {wrong[0]!r} is no dead letter's; they are whole numbers")
    return numbers


def _limit(limit: int) -> int:
    if type(limit) is not int or limit < 1:
        raise ConfigError(f"limit: {limit!r} is not a whole number of 1 or more")
    return limit


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
    _limit(limit)
    older_than_s = None if older_than is None else seconds(older_than, "older_than")
    return Query(consumer, None if state is None else _state(state), older_than_s, limit)
