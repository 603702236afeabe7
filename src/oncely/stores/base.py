"""The Store protocol: all that a database has to do for the ledger."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from oncely.core.record import Key, Record, State

Clock = Callable[[], float]
"""Seconds since 1970."""


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


@dataclass(frozen=True, slots=True)
class Tally:
    """What one consumer's records in one state add up to."""

    count: int
    lease_over: int
    """How many have a lease that has run out."""
    oldest: float
    """When the one that was not seen for longest was last seen."""
    duplicates: int


class Store(Protocol):
    """Where records live. Holds no rule: those are in core/rules.py.

    The store's own clock decides. In what is written, `lease_until` counts from the moment of
    the write, `first_seen` and `last_seen` are that moment; the store adds its clock. An insert
    that has to wait for somebody's transaction may count from before the wait: its lease is
    then shorter, never longer.

    Every method raises StoreUnavailable when the store cannot be reached after some tries, and
    StoreError for what else goes wrong; `insert` and `swap` raise ReplyLost when the connection
    breaks after something was sent. All are safe to call from many threads.
    """

    def insert(self, records: Sequence[Record]) -> set[Key]:
        """Write those whose key is absent, atomically each; return the keys written.

        No two have the same key, and no two inserts under one key the same version.
        """

    def load(self, keys: Collection[Key]) -> Loaded:
        """The records that exist, and the store's clock just before."""

    def swap(self, changes: Sequence[Change]) -> set[Key]:
        """Write each `new` whose `old` is unchanged, atomically each; return the keys written.

        The version is compared and nothing else. `first_seen` is never written. No two have the
        same key.
        """

    def scan(self, query: Query) -> Sequence[Record]:
        """The records that fit, longest unseen first."""

    def tallies(self) -> Mapping[tuple[str, State], Tally]:
        """What each consumer's records in each state add up to, where there are any."""

    def purge(self, query: Query, states: Sequence[State]) -> int:
        """Remove at most `query.limit` of the records that fit and are in one of `states`;
        return how many. Fewer than the limit: none are left, or others are removing them.
        """

    def migrate(self) -> None:
        """Create or upgrade the schema; safe when many start at once, and to repeat."""

    def migration_sql(self) -> str:
        """What `migrate` would do now, as SQL; empty where nothing, or where there is no schema."""

    def problems(self) -> Sequence[str]:
        """What is wrong with the schema or the settings of the store, a sentence each."""

    def size(self) -> int | None:
        """The bytes that the records take up, where the store can tell."""

    def close(self) -> None:
        """Give back connections; a later call opens them again."""
