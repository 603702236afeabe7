"""The Store protocol: all that a database has to do for the ledger."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from oncely.core.binding import Binding
from oncely.core.errors import StoreUnavailable
from oncely.core.record import Key, Record, State
from oncely.core.waiting import WaitingMessage

T = TypeVar("T")

Clock = Callable[[], float]
"""Seconds since 1970."""

Horizons = Mapping[str, float]
"""Up to when records of each consumer may have been forgotten, by the store's clock. A consumer of
which nothing was ever forgotten has none.
"""


class Loaded(NamedTuple):
    """What `load` found: the records that exist, and the store's clock just before they were read.

    Were it read later, a lease that was extended in between would seem to have run out.
    """

    records: Mapping[Key, Record]
    now: float


class Change(NamedTuple):
    """Replace `old` by `new`, or remove it where `new` is None."""

    old: Record
    new: Record | None


class Query(NamedTuple):
    """Which records are meant: all that fit every field that is set."""

    consumer: str | None = None
    state: State | None = None
    older_than_s: float | None = None
    """Last seen longer ago than this."""
    limit: int = 100
    text: str | None = None
    """Stands in the message id, letter by letter."""
    lease_over: bool = False
    """Only those whose lease has run out."""


class KeyRange(NamedTuple):
    """Message ids after the first, up to and with the second, in the store's own order of them."""

    after: str | None = None
    """None: from the first id."""
    until: str | None = None
    """None: to the last id."""

    def holds(self, message_id: str) -> bool:
        """Whether an id is within, in the order of their letters' numbers."""
        return (self.after is None or self.after < message_id) and (
            self.until is None or message_id <= self.until
        )


class Wanted(NamedTuple):
    """Which records are read: those that fit every field that is set."""

    consumers: Collection[str] | None = None
    states: Collection[State] | None = None

    def holds(self, record: Record) -> bool:
        """Whether `record` fits."""
        return (self.consumers is None or record.key.consumer in self.consumers) and (
            self.states is None or record.state in self.states
        )


@dataclass(frozen=True, slots=True)
class Tally:
    """What one consumer's records in one state add up to."""

    count: int
    lease_over: int
    """How many have a lease that has run out."""
    oldest: float
    """When the one that was not seen for longest was last seen."""
    duplicates: int


class PutBack(NamedTuple):
    """A message that was taken, and goes on waiting."""

    message: WaitingMessage
    error: str | None
    """Why; None: no fault of its own."""
    retry_s: float | None
    """It is taken again after so long; None: it is set aside, for people."""
    is_try: bool = True
    """Whether it counts as one more attempt."""


@dataclass(frozen=True, slots=True)
class Backlog:
    """What waits in one queue."""

    waiting: int
    """Those with a delay included."""
    set_aside: int
    """They wait for people. Not among `waiting`."""
    lag_s: float
    """For how long the oldest that could be taken has waited."""


class Listing(NamedTuple):
    """Which waiting messages are shown: those that fit every field that is set, in their order."""

    queue: str
    """Its name or, with `*` at the end, how the names of several begin."""
    is_set_aside: bool
    limit: int = 100
    after: int = 0
    """The number of the last one before."""


class Records(Protocol):
    """Where records are read and written; how, Store says, and Inside for a transaction.

    The store's own clock decides. In what is written, `lease_until` counts from the moment of
    the write, `first_seen` and `last_seen` are that moment; the store adds its clock. An insert
    that has to wait for somebody's transaction may count from before the wait: its lease is
    then shorter, never longer.
    """

    def insert(
        self, records: Sequence[Record], believed: Mapping[str, float | None] | None = None
    ) -> set[Key]:
        """Write those whose key is absent, atomically each; return the keys written.

        No two have the same key, and no two inserts under one key the same version.

        `believed` are the horizons of all their consumers, None where one has none. Where one is
        another, nothing of that consumer is written. They are compared once the keys are taken:
        a purge that made room for one of them by removing its record has raised the horizon by
        then, and that is seen.
        """

    def horizons(self, consumers: Collection[str]) -> Horizons:
        """The horizons of those of `consumers` that have one."""

    def load(self, keys: Collection[Key]) -> Loaded:
        """The records that exist, and the store's clock just before."""

    def swap(self, changes: Sequence[Change]) -> set[Key]:
        """Write each `new` whose `old` is unchanged, atomically each; return the keys written.

        The version is compared and nothing else. `first_seen` is never written. No two have the
        same key.
        """


class Inside(Records, Protocol):
    """What a store does inside one transaction: all of it is stored, or nothing.

    Nothing is tried again: after an error the transaction is over, and every further call raises
    that error. `load` holds what it finds: nobody else changes it before the transaction ends.
    An insert waits for another transaction that writes the same key, and sees what came of it.
    """

    def forget_until(self, horizons: Horizons) -> None:
        """Raise horizons to these; one that is later stays as it is."""

    # ---- Messages that wait --------------------------------------------------------------------

    def keep(self, messages: Sequence[WaitingMessage], *, renews: bool = False) -> None:
        """Keep these, in their order. What is there under the same parent and name stays as it is,
        or where it `renews`, waits anew in its place: with the attempts, error, reason and delay of
        these, set aside or not. Whoever waits for messages is woken when they are stored.
        """

    def waiting(self, keys: Collection[Key]) -> Sequence[WaitingMessage]:
        """What waits of these parents, in whatever queue, in order, set aside or not."""

    def numbered(self, numbers: Collection[int]) -> Sequence[WaitingMessage]:
        """Those of these numbers that wait still."""

    def lanes(self, lanes: Collection[str]) -> set[str]:
        """Those of these lanes in which any wait that are not set aside."""

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
        """At most `limit` of a queue that can be taken now, in their order; nobody else is given
        them for `hold_s`. Of these `parents` alone, where any are named; and `one_per_lane`, for
        whom the next is to wait until the one before is removed. Where it `counts`, that they are
        taken is one more attempt, which those that are returned have.

        None whose delay is not over, none that is held or set aside, and none behind another of
        its lane that is held, has to wait, or is of a parent that is not named.
        """

    def remove(self, messages: Sequence[WaitingMessage]) -> None:
        """These wait no more. What is gone already is not an error."""

    def held(self, messages: Sequence[WaitingMessage]) -> set[int]:
        """The numbers of those that are held since they were taken so: nobody has let go of them,
        or was given them since. Of what was taken with a count. Nobody is, before the transaction
        ends.
        """

    def remove_held(self, messages: Sequence[WaitingMessage]) -> set[int]:
        """Those of these that are `held` wait no more; their numbers."""

    def put_back(self, changes: Sequence[PutBack]) -> None:
        """These go on waiting; what is gone is not an error."""

    def free(self, messages: Sequence[WaitingMessage]) -> None:
        """These can be taken at once, with no attempt counted, from the queue, in the lane and with
        the content that they have here.
        """

    # ---- Steps ---------------------------------------------------------------------------------

    def forget_steps(self, key: Key) -> None:
        """Remove the message's finished steps."""

    def steps(self, key: Key) -> Mapping[str, Any]:
        """The results of the message's finished steps, by their names."""

    def keep_step(self, key: Key, name: str, result: Any) -> None:
        """Keep the result of a finished step; one that is there stays as it is."""


class Joined(Inside, Protocol):
    """Inside a transaction that is somebody else's to begin and to end. Each call raises EndedError
    where it is seen to be over already.
    """

    def look(self, keys: Collection[Key]) -> Mapping[Key, Record]:
        """The records that exist, as the transaction sees them; unlike `load` it holds nothing."""

    def insert_alike(self, record: Record, message_ids: Collection[str]) -> set[str]:
        """As `insert`, of records that differ from `record` in their message ids alone: the ids
        of those that were written.
        """

    def completed(
        self, consumer: str, message_ids: Collection[str], seen_within_s: float
    ) -> Mapping[str, float]:
        """Those of these messages whose records are completed, and were last seen less than so long
        ago: when each was first seen. It holds nothing.
        """


class Store(Records, Protocol):
    """Where records live. Holds no rule: those are in core/rules.py.

    Every method raises StoreUnavailable when the store cannot be reached after some tries, and
    StoreError for what else goes wrong; `insert` and `swap` raise ReplyLost when the connection
    breaks after something was sent. All are safe to call from many threads.

    A class that names it as its base inherits what holds for the simplest of stores: nobody waits
    for its connections or loses against another, there is no schema, and nothing waits.
    """

    @property
    def has_transactions(self) -> bool:
        """Whether `transaction` works, and with it waiting messages and steps."""

    @property
    def place(self) -> object:
        """Where its tables are: two stores whose places are equal work on the same ones, so that a
        transaction of one can do what is asked of the other.
        """
        return self

    def transaction(self, work: Callable[[Inside], T]) -> T:
        """What `work` returns, once all that it did is stored.

        `work` may be called again where the transaction lost against another, or where nobody
        knows whether it was stored: it has to find that out by itself. Raises ConfigError where
        the store has no transactions.
        """

    def within(self, connection: Any) -> AbstractContextManager[Joined]:
        """While the transaction of `connection` is joined; its owner begins and ends it.

        Raises ConfigError where that cannot be, and in the end, unless another error is on its
        way, EndedError where it is not the same transaction any more: it was committed or rolled
        back meanwhile, by whomever and however.
        """

    def check_joins(self, source: object) -> None:
        """Raise ConfigError where `within` could join no transaction that `source` begins, an
        Engine or sessionmaker of SQLAlchemy, plain or async: as far as can be told without one.
        """

    def is_contention(self, error: Exception) -> bool:  # noqa: ARG002
        """Whether `error` says that a transaction lost against another, or its connection, and may
        be done again.
        """
        return False

    def is_outage(self, error: Exception) -> bool:
        """Whether `error`, of whatever uses the same database, says that it cannot be reached."""
        return isinstance(error, StoreUnavailable)

    def beside(self) -> Records:
        """The same records over connections of their own, for what must not wait until others give
        back theirs. They are closed with the store.
        """
        return self

    def backlogs(self) -> Mapping[str, Backlog]:
        """What waits in each queue in which anything does."""
        return {}

    def listed(self, listing: Listing) -> Sequence[WaitingMessage]:  # noqa: ARG002
        """Messages that wait, to be shown."""
        return []

    def free_in_s(self, queue: str) -> float | None:  # noqa: ARG002
        """In how many seconds the next of a queue can be taken, by its own time and hold: 0 where
        one can now, None where nothing waits there that is not set aside.
        """
        return None

    def wait_for_messages(self, timeout_s: float) -> None:
        """Return as soon as messages may have been kept, at the latest after `timeout_s`."""

    def bind(self, bindings: Collection[Binding]) -> None:  # noqa: ARG002
        """Keep what brings messages into queues, where `bindings` does not answer None; what is
        there already is not an error.
        """
        return  # Without a statement it would have to be implemented.

    def unbind(self, bindings: Collection[Binding]) -> None:  # noqa: ARG002
        """Forget these; what is gone already is not an error."""
        return

    def bindings(self, queue: str | None = None) -> Sequence[Binding] | None:  # noqa: ARG002
        """What brings messages into one queue, or into any, as it was kept; None where the store
        keeps none.
        """
        return None

    def scan(self, query: Query) -> Sequence[Record]:
        """The records that fit, longest unseen first."""

    def key_ranges(self, number: int) -> Sequence[KeyRange]:  # noqa: ARG002
        """At most `number` ranges, of about as many records each, that together hold every key."""
        return [KeyRange()]

    def read(self, keys: KeyRange, wanted: Wanted) -> Iterator[Sequence[Record]]:
        """The records of a range that fit, page by page, whatever their number.

        What is in the ledger all the while is given, once; what comes or goes meanwhile may be,
        each record as it is when its page is read. A store that cannot go by the order of its keys
        may give a record again.
        """

    def tallies(self) -> Mapping[tuple[str, State], Tally]:
        """What each consumer's records in each state add up to, where there are any."""

    def purge(self, query: Query, states: Sequence[State]) -> int:
        """Remove at most `query.limit` of the records that fit and are in one of `states`, with
        their steps; return how many. Fewer than the limit: none are left, or others are removing
        them. A record of which messages wait stays.

        With them, atomically, it raises the horizon of each consumer of which it removes any to
        the time that the query's age says.
        """

    def forget_until(self, horizons: Horizons) -> None:
        """As Inside says."""

    def keep_retention(self, consumer: str, retention_s: float) -> None:
        """Keep for how long the consumer's records are to be kept, in place of what was."""

    def retentions(self) -> Mapping[str, float]:
        """That time in seconds, of each consumer that told it."""

    def migrate(self) -> None:
        """Create or upgrade the schema; safe when many start at once, and to repeat."""

    def migration_sql(self) -> str:
        """What `migrate` would do now, as SQL; empty where nothing, or where there is no schema."""
        return ""

    def problems(self) -> Sequence[str]:
        """What is wrong with the schema or the settings of the store, a sentence each."""
        return []

    def size(self) -> int | None:
        """The bytes that the records take up, where the store can tell."""
        return None

    def close(self) -> None:
        """Give back connections; a later call opens them again."""
