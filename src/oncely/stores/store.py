"""The Store protocol: everything that a database has to do for the ledger."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self, TypeVar

from oncely.core.activity import Activity, AuditEntry, Run, Worker
from oncely.core.cases import Case
from oncely.core.errors import ConfigError, StoreUnavailable
from oncely.core.record import Key, Record, State
from oncely.core.waiting import WaitingMessage
from oncely.stores.names import Program

T = TypeVar("T")

Clock = Callable[[], float]
"""Seconds since 1970."""

Horizons = Mapping[str, float]
"""The time up to which records of each consumer may have been forgotten, by the store's clock. A
consumer of which nothing was ever forgotten has none.
"""


class Loaded(NamedTuple):
    """What `load` found: the records that exist, and the store's clock just before they were read.

    If it was read later, a lease that was extended in between would seem to have run out.
    """

    records: Mapping[Key, Record]
    now: float


Believed = tuple[Key, int]
"""A record, and the version that is believed to be stored."""


class Query(NamedTuple):
    """Which records are meant: all that fit every field that is set."""

    consumer: str | None = None
    state: State | None = None
    older_than_s: float | None = None
    """Last seen longer ago than this."""
    limit: int = 100
    text: str | None = None
    """Is part of the message id, compared character by character."""
    lease_over: bool = False
    """Only those whose lease has run out."""
    exhausted: bool = False
    """Only those that have failed permanently."""
    waits_for_sender: bool = False
    """Only those that wait for their sender, as Record says."""

    def holds(self, record: Record, now: float) -> bool:
        """Whether `record` fits, at `now` by the store's clock."""
        return (
            self.consumer in (None, record.key.consumer)
            and self.state in (None, record.state)
            and (self.older_than_s is None or now - record.last_seen > self.older_than_s)
            and (self.text is None or self.text in record.key.message_id)
            and (not self.lease_over or lease_is_over(record, now))
            and (not self.exhausted or record.exhausted)
            and (not self.waits_for_sender or record.waits_for_sender)
        )


def lease_is_over(record: Record, now: float) -> bool:
    """Whether a record has a lease that has run out at `now`, by the store's clock."""
    return record.lease_until is not None and record.lease_until <= now


def never_joined(where: str) -> ConfigError:
    """The refusal of a store that no transaction of a database can have a part in."""
    return ConfigError(
        f"transaction: a ledger {where} cannot be part of a database's transaction; open the "
        "ledger on that database, as in open_ledger(engine)"
    )


class Look(NamedTuple):
    """Which records a window looks at, in the order of their ids, and which of them it gives."""

    fits: Sequence[Query]
    """It gives the records that fit one of these; their limits do not count. No record may fit two
    of them.
    """
    begins: str = ""
    """It looks at ids that begin so."""
    after: str | None = None
    """Where the window before ended; None: from the first id on."""
    limit: int = 100
    """It ends where it has found so many."""
    size: int = 1_000
    """It ends where it has looked at about so many."""


class Window(NamedTuple):
    """What a look at some of the records has found."""

    keys: Sequence[Key]
    """Of the records that fit, in their order."""
    looked_at: int
    """How many records the store has looked at."""
    end: str | None
    """Where the next window goes on: after this id. None: no records are left."""

    @classmethod
    def of(cls, rows: Sequence[tuple[str, str, bool]], limit: int, *, is_last: bool) -> Self:
        """Of records that come one after another, each as its message id, its consumer, and whether
        it fits: of those up to the id with which so many fit. `is_last`: no records come after
        them.
        """
        fitting = [index for index, (_, _, fits) in enumerate(rows) if fits]
        part = rows
        if len(fitting) > limit:
            index = fitting[limit - 1]
            last = rows[index][0]
            part = rows[: index + sum(message_id == last for message_id, _, _ in rows[index:])]
        end = None if is_last and len(part) == len(rows) else part[-1][0]
        keys = [Key(consumer, message_id) for message_id, consumer, fits in part if fits]
        return cls(keys, len(part), end)


class KeyRange(NamedTuple):
    """Message ids after the first, up to and including the second, in the store's own order."""

    after: str | None = None
    """None: from the first id."""
    until: str | None = None
    """None: to the last id."""

    def holds(self, message_id: str) -> bool:
        """Whether an id is within the range, in the order of code points."""
        return (self.after is None or self.after < message_id) and (
            self.until is None or message_id <= self.until
        )


class Wanted(NamedTuple):
    """Which records are read: those that fit every field that is set."""

    consumers: Collection[str] | None = None
    states: Collection[State] | None = None
    seen_from: float | None = None
    """Last seen at that time or later, in seconds since 1970, as the next."""
    seen_before: float | None = None

    def holds(self, record: Record) -> bool:
        """Whether `record` fits."""
        return (
            (self.consumers is None or record.key.consumer in self.consumers)
            and (self.states is None or record.state in self.states)
            and (self.seen_from is None or record.last_seen >= self.seen_from)
            and (self.seen_before is None or record.last_seen < self.seen_before)
        )


@dataclass(frozen=True, slots=True)
class Tally:
    """Totals of one consumer's records in one state."""

    count: int
    lease_over: int
    """How many have a lease that has run out."""
    oldest: float
    """When the least recently seen record was last seen."""
    duplicates: int
    for_sender: int = 0
    """How many wait for their sender."""
    over_since: float | None = None
    """When the first of those leases ran out; None where none has."""
    for_sender_since: float | None = None
    """When the least recently seen of those that wait for their sender was last seen."""
    is_estimate: bool = False
    """Whether `count` and `duplicates` are what a sample says. The others are then of those records
    that were read; 0 where none were.
    """


class PutBack(NamedTuple):
    """A message that was taken, and goes on waiting."""

    message: WaitingMessage
    error: str | None
    """Why it goes on waiting; None where it has not failed."""
    retry_s: float | None
    """Seconds until it can be taken again; None: it is set aside, for people."""
    is_try: bool = True
    """Whether it counts as one more attempt."""


@dataclass(frozen=True, slots=True)
class Backlog:
    """How much waits in one queue."""

    waiting: int
    """Messages, including those with a delay."""
    set_aside: int
    """Messages that wait for people. Not among `waiting`."""
    lag_s: float
    """How long the oldest message that can be taken has been due."""


class Listing(NamedTuple):
    """Which waiting messages are shown: those that fit every field that is set. Those that are set
    aside or free to take come first, in their order; then the others, by when they can be taken.
    """

    queue: str
    """Its name or, with `*` at the end, the beginning of several names."""
    is_set_aside: bool
    limit: int = 100
    with_bodies: bool = True
    """Whether bodies are read; else each message comes with an empty one."""


class Records(Protocol):
    """Where records are read and written: by itself, as Store says, or in a transaction, as
    Transaction says.

    The store's own clock decides. A record is seen at the moment of the write, from which its lease
    counts. An insert that has to wait for another transaction may count from before the wait: its
    lease is then shorter, never longer.
    """

    def insert(self, case: Case, believed: Mapping[str, float | None] | None = None) -> set[Key]:
        """Write those whose key is absent, atomically each; return the keys written.

        No two have the same key, and no two inserts under one key the same version. What is
        written is a state, attempts, fence and lease, metadata and a fingerprint.

        `believed` are the horizons of all their consumers, None where one has none. Where the
        stored horizon differs, nothing of that consumer is written. Horizons are compared after the
        keys are taken: if a purge has removed the record of a key just before, it has raised the
        horizon by then, and the comparison finds that.
        """

    def horizons(self, consumers: Collection[str]) -> Horizons:
        """The horizons of those of `consumers` that have one."""

    def load(self, keys: Collection[Key]) -> Loaded:
        """The records that exist, and the store's clock just before."""

    def update(self, case: Case) -> set[Key]:
        """Write those whose stored version is the believed one, atomically each; return the keys
        written. The version is compared and nothing else. No two have the same key.
        """

    def delete(self, rows: Sequence[Believed]) -> set[Key]:
        """Remove those whose stored version is the believed one; return their keys."""


class Transaction(Records, Protocol):
    """What a store does inside one transaction: all of it is stored, or nothing.

    Nothing is retried: after an error the transaction is over, and every further call raises
    that error. `load` locks what it finds: nobody else changes it before the transaction ends.
    An insert waits for another transaction that writes the same key, and sees its result.
    """

    def forget_until(self, horizons: Horizons) -> None:
        """Raise horizons to these; a stored horizon that is later stays as it is."""

    # ---- Messages that wait --------------------------------------------------------------------

    def keep(self, messages: Sequence[WaitingMessage], *, renews: bool = False) -> None:
        """Keep these, in their order. A message that is there under the same parent and name stays
        as it is; or, where it `renews`, it gets the content, attempts, error, reason and delay of
        the new one, set aside or not. Whoever waits for messages is woken when they are stored.
        """

    def waiting(self, keys: Collection[Key]) -> Sequence[WaitingMessage]:
        """The messages of these parents, in all queues, in order, set aside or not."""

    def unparented(self, message_id: str) -> Sequence[WaitingMessage]:
        """The messages of this id that belong to no other message. All that waits is read."""

    def numbered(self, numbers: Collection[int]) -> Sequence[WaitingMessage]:
        """The messages with these numbers that still wait."""

    def idle(self, numbers: Collection[int]) -> Sequence[WaitingMessage]:
        """Those of these messages that nobody has taken, set aside or not. Nobody takes or changes
        them before the transaction ends.
        """

    def lanes(self, queue: str, lanes: Collection[str]) -> set[str]:
        """Those of these lanes of a queue in which messages wait that are not set aside."""

    def take(
        self,
        queue: str,
        limit: int,
        hold_s: float,
        parents: Collection[Key] | None = None,
        *,
        one_per_lane: bool = False,
        counts: bool = False,
    ) -> Sequence[WaitingMessage]:
        """At most `limit` messages of a queue that can be taken now, in their order; nobody else is
        given them for `hold_s`. Only those of these `parents`, where any are named. With
        `one_per_lane`, the next of a lane waits until the one before it is removed. Where it
        `counts`, taking a message is one more attempt, and the returned messages include it.

        A message is not taken while its delay runs, while it is held or set aside, nor behind
        another of its lane that is held, has to wait, or has a parent that is not named.
        """

    def remove(self, messages: Sequence[WaitingMessage]) -> None:
        """Remove these. A message that is gone already is not an error."""

    def held(self, messages: Sequence[WaitingMessage]) -> set[int]:
        """The numbers of the messages that are still held as they were taken, with a count: they
        were not put back or given to anybody else since. Nobody gets them before the transaction
        ends.
        """

    def remove_held(self, messages: Sequence[WaitingMessage]) -> set[int]:
        """Remove those of these that are `held`; return their numbers."""

    def put_back(self, changes: Sequence[PutBack]) -> None:
        """Let these go on waiting; a message that is gone is not an error."""

    def free(self, messages: Sequence[WaitingMessage]) -> None:
        """Let these be taken at once, with no attempt counted, from the queue, in the lane and with
        the content that they have here.
        """

    def rename(self, messages: Sequence[WaitingMessage]) -> None:
        """Let these have the names that they have here; nothing under their parents has those."""

    # ---- Steps ---------------------------------------------------------------------------------

    def forget_steps(self, key: Key) -> None:
        """Remove the message's finished steps."""

    def steps_of(self, keys: Collection[Key]) -> Mapping[Key, Mapping[str, Any]]:
        """The results of the finished steps, by their names, of those of these messages that have
        any.
        """

    def keep_step(self, key: Key, name: str, result: Any) -> None:
        """Keep the result of a finished step; a result that is there stays as it is."""

    def rename_in_audit(self, key: Key, word: str) -> int:
        """Put a word in the place of the id in the entries about a message, and in their reasons;
        return how many. An entry about several consumers may be about it.
        """


class CallersTransaction(Transaction, Protocol):
    """Inside a transaction that somebody else begins and ends. Each call raises EndedError where it
    finds that the transaction is over already.
    """

    def look(self, keys: Collection[Key]) -> Mapping[Key, Record]:
        """The records that exist, as the transaction sees them; unlike `load` it locks nothing."""

    def completed(
        self, consumer: str, message_ids: Collection[str], seen_within_s: float
    ) -> Mapping[str, float]:
        """Those of these messages whose records are completed and were last seen less than
        `seen_within_s` ago, with the time when each was first seen. It locks nothing.
        """


class Operations(Protocol):
    """What operators look back at. A store that inherits this keeps none of it."""

    @property
    def keeps_operations(self) -> bool:
        """Whether it keeps workers, activity, runs and the audit; else these calls do nothing."""
        return False

    def keep_worker(self, worker: Worker, activity: Sequence[Activity]) -> float | None:  # noqa: ARG002
        """Keep that the worker is alive now, by the store's clock, and what it did: in place of
        what it said before, where that has the same consumer and period. To repeat it is no harm.
        Returns when it was last alive before, as far as is stored.
        """
        return None

    def end_worker(self, id_: str) -> None:  # noqa: ARG002
        """The worker has stopped; what it did stays. Others that stopped over a day ago, or before
        in the same process, are removed.
        """
        return

    def workers(self) -> Sequence[Worker]:
        """Those that work, were killed, or stopped lately; the one last seen comes first."""
        return []

    def claimed_by(self, workers: Collection[int]) -> Sequence[Record]:  # noqa: ARG002
        """The records in processing whose newest claims these workers asked for, and whose leases
        go on.
        """
        return []

    def claims_of(self, workers: Collection[int]) -> Mapping[int, int]:  # noqa: ARG002
        """How many records `claimed_by` gives for each of them, but for those with none."""
        return {}

    def activity(self, since: float) -> Sequence[Activity]:  # noqa: ARG002
        """What workers did in the periods that began then or later, the oldest first."""
        return []

    def keep_run(self, run: Run) -> None:  # noqa: ARG002
        """Keep a run, in place of what was kept under its id."""
        return

    def runs(self, limit: int = 50) -> Sequence[Run]:  # noqa: ARG002
        """The runs that began last, those first."""
        return []

    def note(self, entry: AuditEntry) -> int:  # noqa: ARG002
        """Keep what a person begins to change; the store gives it its time, and its number, which
        is returned. Where the connection is lost meanwhile it may be kept twice.
        """
        return 0

    def note_counts(self, id_: int, changed: int, refused: int | None) -> None:  # noqa: ARG002
        """Keep what the action of that entry has come to. To repeat it is no harm."""
        return

    def audit(self, limit: int = 100, before: int | None = None) -> Sequence[AuditEntry]:  # noqa: ARG002
        """The newest entries, those first; only those with a lower number than `before`."""
        return []

    def purge_operations(self, older_than_s: float) -> int:  # noqa: ARG002
        """Remove activity, workers and runs of longer ago; return how many. The audit stays."""
        return 0

    def purge_audit(self, older_than_s: float) -> int:  # noqa: ARG002
        """Remove entries of the audit of longer ago; return how many."""
        return 0


class Store(Records, Operations, Protocol):
    """Where records live. Holds no rule: those are in core/rules.py.

    Every method raises StoreUnavailable when the store cannot be reached after some tries, and
    StoreError for any other error; `insert`, `update` and `delete` raise ReplyLost when the
    connection breaks after something was sent. All are safe to call from many threads.

    A class that names it as its base inherits defaults for the simplest of stores: no connections
    to wait for, no transactions that lose against others, no schema, and no waiting messages.
    """

    @property
    def has_transactions(self) -> bool:
        """Whether `transaction` works, and with it waiting messages and steps."""

    @property
    def counts_quickly(self) -> bool:
        """Whether `tallies` of many records takes about as long as of some."""
        return True

    @property
    def batches_at_once(self) -> int:
        """How many batches of single calls it works on side by side: more would only wait."""
        return 1

    @property
    def database_id(self) -> object:
        """Identifies its tables: two stores with equal ones work on the same ones, so that a
        transaction of one can do the work of the other.
        """
        return self

    def transaction(self, work: Callable[[Transaction], T]) -> T:
        """What `work` returns, once everything that it did is stored.

        `work` may be called again where the transaction lost against another, or where nobody
        knows whether it was stored: it has to find that out by itself. Raises ConfigError where
        the store has no transactions.
        """

    def within(self, connection: Any) -> AbstractContextManager[CallersTransaction]:
        """While the transaction of `connection` is joined; its owner begins and ends it.

        Raises ConfigError where it cannot be joined. On leaving, unless another error is being
        raised, it raises EndedError where the transaction has ended inside the block: committed or
        rolled back, in whatever way.
        """

    def check_joins(self, source: object) -> None:
        """Raise ConfigError where `within` could not join transactions that `source` begins, an
        Engine or sessionmaker of SQLAlchemy, plain or async: as far as that can be known without
        one.
        """

    def is_contention(self, error: Exception) -> bool:  # noqa: ARG002
        """Whether `error` says that a transaction lost against another, or lost its connection, and
        may be repeated.
        """
        return False

    def is_outage(self, error: Exception) -> bool:
        """Whether `error`, from any use of the same database, says that it cannot be reached."""
        return isinstance(error, StoreUnavailable)

    def beside(self) -> Records:
        """The same records over separate connections, for calls that must not wait until others
        give back theirs. They are closed with the store.
        """
        return self

    def backlogs(self) -> Mapping[str, Backlog]:
        """The backlog of each queue in which messages wait."""
        return {}

    def listed(self, listing: Listing) -> Iterator[WaitingMessage]:  # noqa: ARG002
        """Messages that wait, to be shown, read page by page."""
        return iter(())

    def free_in_s(self, queue: str) -> float | None:  # noqa: ARG002
        """Seconds until the next message of a queue can be taken, by its due time and hold: 0 where
        one can be taken now, None where none waits there that is not set aside.
        """
        return None

    def wait_for_messages(self, timeout_s: float) -> None:
        """Return as soon as new messages may be there, at the latest after `timeout_s`."""

    # ---- All records ---------------------------------------------------------------------------

    def scan(self, query: Query) -> Sequence[Record]:
        """The records that fit, least recently seen first."""

    def of_message(self, message_id: str) -> Sequence[Record]:
        """The records of a message, of whatever consumers, in the order of their names."""

    def window(self, look: Look) -> Window:
        """Look at the next records in the order of their ids, those of one id always together: at
        about so many at most, however few of them fit. Whoever asks for window after window, each
        from the end of the one before, is given every record that is there all the time.

        A store that can find records in some states without looking at others may look at those
        alone, and at more of them. A store without an order of ids takes an order of its own; the
        end of a window is then a text that only this store understands. Raises ConfigError where
        it does not understand `after`.
        """

    def key_ranges(self, number: int) -> Sequence[KeyRange]:  # noqa: ARG002
        """At most `number` ranges, of about equal size, that together hold every key."""
        return [KeyRange()]

    def read(self, keys: KeyRange, wanted: Wanted) -> Iterator[Sequence[Record]]:
        """The records of a range that fit, page by page, whatever their number.

        A record that is in the ledger all the time is given once; one that comes or goes during the
        reading may be given or not. Each is given as it is when its page is read. A store that
        cannot read in the order of its keys may give a record twice.
        """

    def tallies(self, most: int | None = None) -> Mapping[tuple[str, State], Tally]:
        """Totals of each consumer's records in each state, where there are any.

        Where there are more than `most`, a store may give estimates in place of reading them all.
        """

    def purge(self, query: Query, states: Sequence[State]) -> int:
        """Remove at most `query.limit` of the records that fit and are in one of `states`, with
        their steps; return how many. Fewer than the limit: none are left, or others are removing
        them. A record that has waiting messages stays.

        In the same transaction, the horizon of each consumer whose records are removed is raised to
        the time given by the query's age.
        """

    def forget_until(self, horizons: Horizons) -> None:
        """As Transaction says."""

    def keep_retention(self, consumer: str, retention_s: float) -> None:
        """Store how long the consumer's records are kept, in place of the retention before."""

    def retentions(self) -> Mapping[str, float]:
        """The retention in seconds, of each consumer that has one stored."""

    def migrate(self) -> None:
        """Create or upgrade the schema; safe when many start at once, and to repeat."""

    def migration_sql(self) -> str:
        """What `migrate` would do now, as SQL; empty where it would do nothing."""
        return ""

    def problems(self, program: Program = "worker") -> Sequence[str]:  # noqa: ARG002 - not all ask.
        """What is wrong with the schema or the settings of the store, and what a program of that
        kind needs and may not do there, a sentence each.
        """
        return []

    def grants(self, program: Program) -> Sequence[str]:  # noqa: ARG002 - not all have roles.
        """What to type, so that a program of that kind may do in this store what it needs."""
        return []

    def size(self) -> int | None:
        """The bytes that the records take up, where the store can tell."""
        return None

    def close(self) -> None:
        """Give back connections; a later call opens them again."""
