"""The Store protocol: all that a database has to do for the ledger."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

from oncely.core.record import Key, Record, State

Clock = Callable[[], float]
"""Seconds since 1970."""


class Loaded(NamedTuple):
    """What `load` found: the records that exist, and the store's clock at that moment."""

    records: Mapping[Key, Record]
    now: float


class Change(NamedTuple):
    """Replace `old` by `new`, or remove it where `new` is None."""

    old: Record
    new: Record | None


class Query(NamedTuple):
    """Which records `scan` returns: all that fit every field that is set."""

    consumer: str | None = None
    state: State | None = None
    older_than_s: float | None = None
    """Last seen longer ago than this."""
    limit: int = 100


class Store(Protocol):
    """Where records live. Holds no rule: those are in core/rules.py.

    The store's own clock decides. In what is written, `lease_until` counts from the moment of
    the write, `first_seen` and `last_seen` are that moment; the store adds its clock.

    Every method raises StoreUnavailable when the store cannot be reached, and StoreError for
    what else goes wrong. All are safe to call from many threads.
    """

    def insert(self, records: Sequence[Record]) -> set[Key]:
        """Write those whose key is absent, atomically each; return the keys written.

        No two have the same key.
        """

    def load(self, keys: Collection[Key]) -> Loaded:
        """The records that exist, and the store's clock at that moment."""

    def swap(self, changes: Sequence[Change]) -> set[Key]:
        """Write each `new` whose `old` is unchanged, atomically each; return the keys written.

        The version is compared and nothing else. `first_seen` is never written. No two have the
        same key.
        """

    def scan(self, query: Query) -> Sequence[Record]:
        """The records that fit, longest unseen first."""

    def counts(self) -> Mapping[tuple[str, State], int]:
        """How many records each consumer has in each state."""

    def purge(self, query: Query, states: Sequence[State]) -> int:
        """Remove at most `query.limit` of the records that fit and are in one of `states`;
        return how many.
        """

    def migrate(self) -> None:
        """Create or upgrade the schema; safe when many start at once, and to repeat."""

    def close(self) -> None:
        """Give back connections; a later call opens them again."""
