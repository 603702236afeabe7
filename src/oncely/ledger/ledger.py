"""Ledger: asks the rules, and stores their answers. The only writer of records."""

import math
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

from oncely._util.event_log import EventLog
from oncely.core.commands import Command, EndClaim, Forget, Happened, Outcome, Reset, Written
from oncely.core.durations import Duration, seconds
from oncely.core.errors import ConfigError, StoreError, describe, storable
from oncely.core.ids import check_ids
from oncely.core.message import Message
from oncely.core.policy import Policy
from oncely.core.record import Claim, Key, Record, State, check_key
from oncely.core.rules import PURGEABLE
from oncely.core.waiting import OUTBOX, DeadLetter, Erased, WaitingMessage, retries_of
from oncely.ledger.arguments import raise_if_refused, to_extend
from oncely.ledger.group_commit import GroupCommit
from oncely.ledger.inbox import Inbox, JoinedTransaction
from oncely.ledger.ledger_calls import LedgerCalls
from oncely.ledger.mailbox import LedgerMailbox, erase_besides
from oncely.ledger.recorder import Recorder
from oncely.ledger.settle import LedgerObserver, Settler
from oncely.stores.memory_store import MemoryStore
from oncely.stores.names import TABLE_NAME, Program, in_words
from oncely.stores.open_store import open_store
from oncely.stores.store import (
    Horizons,
    KeyRange,
    Look,
    Operations,
    Query,
    Store,
    Tally,
    Transaction,
    Wanted,
    Window,
)

if TYPE_CHECKING:
    from sqlalchemy import Engine

T = TypeVar("T")

_RETENTION = Policy().retention
"""The retention of a consumer that has stored none."""
_TICK_S = 1e-6
"""The smallest difference between two times of a store."""


_log = EventLog(__name__)


class Ledger(LedgerCalls):
    """Which messages were processed, by whom, and who may process one now.

    Synchronous and safe to share between threads: single calls that wait at the same time go to
    the store together. Every method raises StoreUnavailable when the store cannot be reached, and
    MessageError for a key that cannot identify a message.
    """

    def __init__(self, store: Store, metrics: LedgerObserver | None = None) -> None:
        self._store = store
        self.recorder = Recorder(store, metrics)
        """Counts what this process does with the ledger, and tells operators and metrics."""
        self._settler = Settler(store, self.recorder)
        self._group_commit = GroupCommit(self._settler, store.batches_at_once)
        # A ledger that is dropped without `close` leaves no threads and no sessions. The thread of
        # the recorder may just tell the store something: so it is closed when that is done.
        weakref.finalize(self, self._group_commit.end).atexit = False
        weakref.finalize(self.recorder, store.close).atexit = False
        self._told_retentions: set[tuple[str, float]] = set()
        self._kept: dict[object, Any] = {}

    def keep(self, name: object, make: Callable[[], T]) -> T:
        """The object of that name, shared by all users of this ledger: made where there is none
        yet, and closed with the ledger. It has a method `close`, and opens again when it is used.
        """
        if name not in self._kept:
            self._kept.setdefault(name, make())
        return cast(T, self._kept[name])

    def _settle_one(self, command: Command) -> Outcome:
        return self._group_commit.call(command)

    def _settle_each(self, commands: Sequence[Command]) -> Sequence[Outcome | Exception]:
        return self._settler.settle_each(commands)

    def _settle(self, commands: Sequence[Command]) -> Sequence[Outcome]:
        return self._settler.settle(commands)

    def _settle_in(
        self, transaction: Transaction, commands: Sequence[Command]
    ) -> Sequence[Outcome]:
        return Settler(transaction, self.recorder).settle(commands)

    def _transact(self, work: Callable[[Transaction], T]) -> T:
        return self._store.transaction(work)

    @property
    def can_defer(self) -> bool:
        """Whether the store has transactions, and so deferred messages and steps."""
        return self._store.has_transactions

    @property
    def database_id(self) -> object:
        """Where its tables are, as Store says."""
        return self._store.database_id

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
    def operations(self) -> Operations:
        """What operators look back at: workers, activity, runs and the audit."""
        return self._store

    @property
    def counts_quickly(self) -> bool:
        """Whether `tallies` of many records takes about as long as of some: not on MariaDB, where
        the whole table is read.
        """
        return self._store.counts_quickly

    @property
    def is_shared(self) -> bool:
        """Whether other processes see the same records."""
        return not isinstance(self._store, MemoryStore)

    def extend_each(
        self, claims: Sequence[Claim], lease: Duration
    ) -> Sequence[Outcome | Exception]:
        """As `extend_many`, for a heartbeat: it does not wait for the connections of other calls,
        and a claim that could not be extended has its error in its place.
        """
        beside = Settler(self._store.beside(), self.recorder)
        return beside.settle_each(to_extend(claims, lease))

    # ---- Looking -------------------------------------------------------------------------------

    def now(self) -> float:
        """The store's clock, seconds since 1970."""
        return self._store.load(()).now

    def now_beside(self) -> float:
        """The same, without waiting for the connections of other calls: for a heartbeat."""
        return self._store.beside().load(()).now

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
        exhausted: bool = False,
        waits_for_sender: bool = False,
    ) -> Iterator[Record]:
        """At most `limit` records that fit, least recently seen first.

        `state` may be the status as the table has it. `text` is part of the message id.
        `lease_over` chooses records whose lease has run out: of those in processing, the ones in
        doubt. `exhausted` chooses those that have failed permanently, `waits_for_sender` those that
        may run again, and wait for their sender. A SQL store has no index for this order, and reads
        all records in the state: `window` reads a bounded number. Raises ConfigError for an unknown
        state.
        """
        if text is not None and text != storable(text):
            raise ConfigError(f"text: {text!r} cannot be part of a message id")
        query = _query(consumer, state, older_than, limit)
        wanted = query._replace(text=text, lease_over=lease_over, exhausted=exhausted)
        return iter(self._store.scan(wanted._replace(waits_for_sender=waits_for_sender)))

    def window(self, look: Look) -> Window:
        """A look at some records in the order of their ids, which takes about as long in a ledger
        of any size: the keys of those that fit, and where the next window goes on. The records of
        one id stay together, so that a few more than the limit may be given.

        A ledger in Redis has an order of its own. Raises ConfigError where `after` is not the end
        of a window there.
        """
        return self._store.window(look)

    def of_message(self, message_id: str) -> Sequence[Record]:
        """The records of a message, of whatever consumers, in the order of their names."""
        check_ids([message_id])
        return self._store.of_message(message_id)

    def key_ranges(self, number: int) -> Sequence[KeyRange]:
        """At most `number` ranges, of about as many records each, that together hold all; one
        where the store cannot go by the order of its keys.
        """
        return self._store.key_ranges(number)

    def read(
        self, keys: KeyRange = KeyRange(), wanted: Wanted = Wanted()
    ) -> Iterator[Sequence[Record]]:
        """The records of a range that are wanted, page by page, however many there are.

        A record that is in the ledger all the time is given once, as it is when its page is read;
        in Redis, a record may be given again.
        """
        return self._store.read(keys, wanted)

    def counts(self) -> Mapping[tuple[str, State], int]:
        """How many records each consumer has in each state."""
        return {name: tally.count for name, tally in self.tallies().items()}

    def tallies(self, most: int | None = None) -> Mapping[tuple[str, State], Tally]:
        """Totals of each consumer's records in each state. Where there are more than `most`, they
        may be estimates: a large table is not read from end to end.
        """
        return self._store.tallies(most)

    def size(self) -> int | None:
        """The bytes that the records take up, where the store can tell."""
        return self._store.size()

    def problems(self, program: Program = "worker") -> Sequence[str]:
        """What is wrong with the schema or the settings of the store, and what its role lacks of
        the privileges that a program of that kind needs, a sentence each: "worker", "relay",
        "operator", "reader" or "spark".
        """
        return self._store.problems(program)

    def check_privileges(self, program: Program) -> None:
        """Raise ConfigError where the role lacks a privilege that a program of that kind needs."""
        with suppress(StoreError):
            if grants := self._store.grants(program):
                needs = f"what {in_words(program)} needs"
                raise ConfigError(f"ledger: its role lacks {needs}; type: {'; '.join(grants)}")

    # ---- For operators -------------------------------------------------------------------------

    def migrate(self) -> None:
        """Create or upgrade the schema; safe when many start at once, and to repeat."""
        self._store.migrate()

    def migration_sql(self) -> str:
        """What `migrate` would do now, as SQL; empty where it would do nothing."""
        return self._store.migration_sql()

    def reset(self, key: Key, *, by: str = "", why: str = "", fence: int | None = None) -> None:
        """Allow a record that has failed or is in doubt to run again, its attempts from zero; at
        once where its message waits in the ledger, or is a dead letter there. Else it waits for its
        sender: `Record.waits_for_sender`. A message that waits and was never tried is due at once.

        Who did it, when and why is kept under "reset" in the record's metadata. Raises
        RefusedError for any other record, and where a `fence` is named that is not its newest.
        """
        self._operate(
            Reset(key, describe(by), describe(why), fence=fence),
            "only a message that has failed or is in doubt can be retried",
        )

    def happened(self, key: Key, *, by: str = "", why: str = "", fence: int | None = None) -> None:
        """Complete a record in doubt, as somebody knows that its effect has happened: nothing of it
        runs again, neither a delivery nor what waits in the ledger to be tried, which is removed.

        Who said so, when and why is kept under "happened" in the record's metadata. Raises
        RefusedError for any record that is not in doubt, and not held without an end, and where a
        `fence` is named that is not its newest.
        """
        self._operate(
            Happened(key, describe(by), describe(why), fence),
            "only a message in doubt can be settled",
        )

    def forget(self, key: Key, *, found: Record | None = None) -> None:
        """Remove a record that no worker processes, with its steps and deferred messages. The next
        delivery is treated as new, and so is a message that waits in the ledger for a retry.

        Raises RefusedError where a claim is live, and where the record is not as it was `found`.
        """
        refusal = "a record with a live claim cannot be forgotten"
        if found is not None:
            refusal += ", nor one that has changed since it was found"
        self._operate(Forget(key, None if found is None else found.version), refusal)

    def erase(self, key: Key) -> Erased:
        """Remove everything that is kept of a message, in one transaction, and say what was found:
        the next delivery is treated as new. A queue of the database does not say whose messages it
        has: those of this id are removed. Raises RefusedError where a claim is live, or a worker or
        a relay has a copy in hand.
        """
        forget, refusal = [Forget(check_key(key))], "a record with a live claim cannot be erased"

        def work(transaction: Transaction) -> Erased:
            # The record first, which holds it: as whoever ends a message does.
            records = len(transaction.load([key]).records)
            raise_if_refused(key, self._settle_in(transaction, forget)[0], refusal)
            return erase_besides(transaction, key, records)

        if self.can_defer:
            return self._transact(work)
        records = len(self._store.load([key]).records)
        raise_if_refused(key, self._settle(forget)[0], refusal)
        return Erased(records)

    def end_claim(self, found: Record, *, by: str = "", why: str = "") -> None:
        """End the claim on a record that is as it was `found`, as somebody knows that the worker
        which holds it is dead: the message is in doubt now, and what that worker still writes is
        refused. What waits of the message in the ledger is due at once.

        Who said so, when and why is kept under "worker_dead" in the record's metadata. Raises
        RefusedError for a record that is not being processed, and one that has changed: a worker
        that extends its lease lives.
        """
        self._operate(
            EndClaim(found.key, describe(by), describe(why), found.version),
            "only a claim that is as it was found can be ended",
        )

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

        Who did it, when and why is kept as by `reset`. Raises MessageError for a message that is
        unusable, or has another id; ConfigError where `message` would replace several.
        """
        numbers = _numbers(ids)
        if message is not None and len(numbers) != 1:
            raise ConfigError("message: it can replace only one; name one dead letter")
        return self.mailbox.retry_dead(numbers, message, describe(by), describe(why))

    def discard_dead(self, ids: int | Collection[int]) -> int:
        """Remove dead letters; return how many were still there. Their records stay, so that a
        redelivery is not treated as new.
        """
        return self.mailbox.discard_dead(_numbers(ids))

    def waiting(self, consumer: str | None = None, limit: int = 100) -> Iterator[WaitingMessage]:
        """At most `limit` messages that wait for a retry, of one consumer or of all, those that can
        be taken first: each with `key`, `message`, `due`, `attempts` and `error`.
        """
        queue = retries_of("*" if consumer is None else consumer)
        return self.mailbox.listed(queue, _limit(limit))

    def discard(self, key: Key, *, by: str = "", why: str = "") -> None:
        """End a waiting retry: its message has failed permanently, and becomes a dead letter,
        which can be retried.

        Who did it, when and why is kept under "discarded" in the record's metadata. Raises
        RefusedError where it does not wait, and where a worker has it in hand.
        """
        outcome = self.mailbox.discard(check_key(key), describe(by), describe(why))
        raise_if_refused(key, outcome, "a worker has it in hand")

    def keep_retention(self, consumer: str, retention: Duration) -> None:
        """Store how long the consumer's records are kept: `purge` goes by it. A retention that this
        object has stored before is not written again.
        """
        told = (consumer, seconds(retention, "retention"))
        if told not in self._told_retentions:
            self._store.keep_retention(*told)
            self._told_retentions.add(told)

    def retentions(self) -> Mapping[str, timedelta]:
        """How long records are kept, of each consumer that has stored a retention."""
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
        """Remove records last seen longer ago than `older_than`, `batch` in one transaction;
        without it, each consumer's after its own retention (30 days where it has stored none).

        Never those in processing, nor those with deferred messages waiting. A message that was sent
        before that time is too old from now on, unless it has a record. Returns, and logs, how
        many; `on_batch` is called after each transaction with the number that it removed. Raises
        KeysLocked where another transaction prevents it from raising a horizon: purge again later.
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
            self.recorder.purged(consumer, purged)
        _log.info(
            "%(count)s records past their retention are removed; consumer: %(consumer)s",
            extra={"event": "purged", "consumer": consumer, "count": total},
        )
        return total

    def purge_found(self, found: Sequence[Record]) -> set[Key]:
        """Remove those of `found` that are still as they were found, in one transaction where the
        store has transactions; return their keys.

        Never those in processing or handled, nor those with deferred messages waiting. Their
        steps stay until `purge_steps`.
        """
        gone = [record for record in found if record.state in PURGEABLE]

        def purge(transaction: Transaction) -> set[Key]:
            waiting = {each.parent for each in transaction.waiting({old.key for old in gone})}
            purged = transaction.delete(
                [(old.key, old.version) for old in gone if old.key not in waiting]
            )
            transaction.forget_until(_just_after(old for old in gone if old.key in purged))
            return purged

        if self.can_defer:
            purged = self._transact(purge)
        else:
            # The horizon first: a message whose record stays may be refused as too old, but one
            # whose record is gone is never granted.
            self._store.forget_until(_just_after(gone))
            purged = self._store.delete([(old.key, old.version) for old in gone])
        for consumer, count in Counter(key.consumer for key in purged).items():
            self.recorder.purged(consumer, count)
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

        Leaving the block raises EndedError where the transaction was ended inside it, in whatever
        way: a claim that was committed by that runs out. Raises ConfigError for anything that is
        not such a connection, and where the store has no transactions.
        """
        inbox_in = partial(Inbox, self, observer=self.recorder, beliefs=self._settler.beliefs)
        return JoinedTransaction(self._store, connection, inbox_in)

    def is_contention(self, error: Exception) -> bool:
        """Whether `error`, of a caller's transaction, says that it lost against another, or lost
        its connection: the whole transaction may be repeated.
        """
        return self._store.is_contention(error)

    def is_outage(self, error: Exception) -> bool:
        """Whether `error`, of a caller's connection, says that the database cannot be reached."""
        return self._store.is_outage(error)

    def count_untracked(self, key: Key) -> None:
        """Log and count that a message runs without a claim; its id may be empty."""
        _log.warning(
            "message '%(message_id)s' of '%(consumer)s' runs without a claim, as the policy says: "
            "it may run twice",
            extra={"event": "untracked", **key._asdict()},
        )
        self.recorder.untracked(key.consumer)

    def close(self) -> None:
        """Give back connections, and end threads; a later call opens and starts them again."""
        for kept in list(self._kept.values()):
            kept.close()
        self._group_commit.close()
        self.recorder.close()
        self._store.close()

    def _operate(self, command: Reset | Happened | EndClaim | Forget, refusal: str) -> None:
        check_key(command.key)
        if self.can_defer:
            outcome = self._transact(lambda transaction: self._operate_in(transaction, command))
        else:
            [outcome] = self._settler.settle([command])
        raise_if_refused(command.key, outcome, refusal)

    def _operate_in(self, transaction: Transaction, command: Command) -> Outcome:
        # The record first, which holds it: as whoever ends a message does.
        found = transaction.load([command.key]).records
        waiting = transaction.waiting([command.key])
        if isinstance(command, Reset):
            kept = [each for each in waiting if each.is_taken_here]
            if kept and not found:
                # It was never tried, and there is no record to hold: a worker may take it now.
                kept = [*transaction.idle([each.number or 0 for each in kept])]
            command = replace(command, is_kept=bool(kept))
        [outcome] = self._settle_in(transaction, [command])
        if not isinstance(outcome, Written):
            return outcome
        match command:
            case Forget():
                transaction.forget_steps(command.key)
                # A message that waits for its retry stays: it may be the only copy.
                transaction.remove([each for each in waiting if each.queue == OUTBOX])
            case Happened():
                # Others of its key, set aside for another content, say, are not it.
                transaction.remove([each for each in waiting if each.is_retry])
            case _ if retries := [each for each in waiting if each.queue != OUTBOX]:
                transaction.free(retries)
        return outcome


def open_ledger(
    url: "str | Engine",
    *,
    table: str = TABLE_NAME,
    schema: str | None = None,
    metrics: LedgerObserver | None = None,
) -> Ledger:
    """A ledger over the store that `url` names; a SQLAlchemy Engine is accepted as well.

    The records are in `table`, of `schema` where one is named; in Redis, under keys that begin
    with `table`. `metrics` is an `oncely.metrics.Metrics`, where Prometheus is to see what happens.
    Raises ConfigError for a URL of an unknown kind, a driver that is not installed, a name that is
    not an identifier, and a Redis that may evict records.
    """
    return Ledger(open_store(url, table, schema), metrics)


def checked_ledger(ledger: object, user: str = "ledger") -> Ledger:
    """`ledger`, which `user` was given; ConfigError where it is not one, as an AsyncLedger."""
    if not isinstance(ledger, Ledger):
        kind = type(ledger).__name__
        raise ConfigError(f"{user}: {kind} is not a Ledger; write open_ledger(...)")
    return ledger


def _just_after(records: Iterable[Record]) -> Horizons:
    """The horizons of a ledger that has forgotten these."""
    horizons: dict[str, float] = {}
    for (consumer, _), last_seen in ((record.key, record.last_seen) for record in records):
        horizons[consumer] = max(last_seen + _TICK_S, horizons.get(consumer, -math.inf))
    return horizons


def _numbers(ids: int | Collection[int]) -> Collection[int]:
    numbers = [ids] if isinstance(ids, int) else [*ids]
    if wrong := [each for each in numbers if type(each) is not int]:
        raise ConfigError(
            f"id: {wrong[0]!r} is not the number of a dead letter; write a whole number"
        )
    return numbers


def _limit(limit: int) -> int:
    if type(limit) is not int or limit < 1:
        raise ConfigError(f"limit: {limit!r} is not a whole number of 1 or more")
    return limit


def _query(
    consumer: str | None, state: State | str | None, older_than: Duration | None, limit: int
) -> Query:
    _limit(limit)
    older_than_s = None if older_than is None else seconds(older_than, "older_than")
    try:
        return Query(consumer, None if state is None else State(state), older_than_s, limit)
    except ValueError:
        raise ConfigError(f"state: {state!r} is none of {', '.join(State)}") from None
