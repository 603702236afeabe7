# ruff: noqa: D102 - the contract stands on the Store protocol.
"""A store in which a test can meddle."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from oncely.core.record import Key, Record, State
from oncely.stores.base import (
    Backlog,
    Change,
    Inside,
    Joined,
    KeyRange,
    Loaded,
    Query,
    Store,
    Tally,
    Wanted,
)

T = TypeVar("T")


class MeddlingStore:
    """A store in which a test can meddle: `meddle` runs before each write.

    There it may write itself (a race), raise (an outage), or wait (a stall). `calls` names what
    the ledger asked for, in order.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.meddle: Callable[[], object] = lambda: None
        self.calls: list[str] = []

    def insert(self, records: Sequence[Record]) -> set[Key]:
        self.calls.append("insert")
        self.meddle()
        return self.store.insert(records)

    def swap(self, changes: Sequence[Change]) -> set[Key]:
        self.calls.append("swap")
        self.meddle()
        return self.store.swap(changes)

    def load(self, keys: Collection[Key]) -> Loaded:
        self.calls.append("load")
        return self.store.load(keys)

    @property
    def has_transactions(self) -> bool:
        return self.store.has_transactions

    def transaction(self, work: Callable[[Inside], T]) -> T:
        self.calls.append("transaction")
        self.meddle()
        return self.store.transaction(work)

    def within(self, connection: Any) -> AbstractContextManager[Joined]:
        return self.store.within(connection)

    def is_contention(self, error: Exception) -> bool:
        return self.store.is_contention(error)

    def backlog(self) -> Backlog:
        return self.store.backlog()

    def send_again(self) -> int:
        return self.store.send_again()

    def wait_for_deferred(self, timeout_s: float) -> None:
        self.store.wait_for_deferred(timeout_s)

    def scan(self, query: Query) -> Sequence[Record]:
        return self.store.scan(query)

    def key_ranges(self, number: int) -> Sequence[KeyRange]:
        return self.store.key_ranges(number)

    def read(self, keys: KeyRange, wanted: Wanted) -> Iterator[Sequence[Record]]:
        return self.store.read(keys, wanted)

    def tallies(self) -> Mapping[tuple[str, State], Tally]:
        return self.store.tallies()

    def purge(self, query: Query, states: Sequence[State]) -> int:
        return self.store.purge(query, states)

    def migrate(self) -> None:
        self.store.migrate()

    def migration_sql(self) -> str:
        return self.store.migration_sql()

    def problems(self) -> Sequence[str]:
        return self.store.problems()

    def size(self) -> int | None:
        return self.store.size()

    def close(self) -> None:
        self.store.close()

    def once(self, meddle: Callable[[], object]) -> None:
        """Meddle before the next write, and not again."""

        def meddle_once() -> None:
            self.meddle = lambda: None
            meddle()

        self.meddle = meddle_once
