# ruff: noqa: D102 - the contract stands on the Store protocol.
"""A store in which a test can meddle."""

from collections.abc import Callable, Collection, Mapping, Sequence

from oncely.core.record import Key, Record, State
from oncely.stores.base import Change, Loaded, Query, Store, Tally


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

    def scan(self, query: Query) -> Sequence[Record]:
        return self.store.scan(query)

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
