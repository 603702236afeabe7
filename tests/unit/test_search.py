"""A search looks at a bounded part of the ledger, and goes on where it ended."""

import math
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from sqlalchemy import event
from tests.bounded import BoundedStore
from tests.records import granted

from oncely import Key, Ledger, State, ops
from oncely.core.errors import ConfigError
from oncely.metrics import Metrics
from oncely.ops import known
from oncely.stores.memory_store import MemoryStore
from oncely.stores.sql import SqlStore
from oncely.stores.sql.engines import sqlite_engine
from oncely.stores.store import Look, Query, Store
from oncely.testing import ManualClock

MANY = 5_000


@pytest.fixture(params=["memory", "sqlite"])
def store(
    request: pytest.FixtureRequest, clock: ManualClock, open_sqlite: Callable[..., SqlStore]
) -> Store:
    """A store in memory, and one in SQLite."""
    found: Store = MemoryStore(clock) if request.param == "memory" else open_sqlite(clock)
    found.migrate()
    return found


@pytest.fixture
def bounded(store: Store) -> Iterator[BoundedStore]:
    """The same, of which only a part may be read."""
    found = BoundedStore(store)
    with found.in_its_time():
        yield found


def complete(store: Store, *keys: Key) -> None:
    """Records of handled messages."""
    ledger = Ledger(store)
    ledger.complete_many([granted(each) for each in ledger.claim_many(keys)])


def ids(found: ops.Searched) -> list[str]:
    return [record.key.message_id for record in found.records]


def test_a_search_ends_in_time(store: Store, bounded: BoundedStore) -> None:
    """A search ends with its patience, in bounded windows; the next one goes on there."""
    complete(store, *(Key("billing", f"{n:05}") for n in range(MANY)))
    complete(store, Key("rare", "04500"))
    with closing(Ledger(bounded)) as ledger:
        rare = ops.Selection(consumer="rare")
        found = ops.search(ledger, rare)
        assert (ids(found), found.looked_at, found.end) == ([], 1_100, "01099")
        assert max(bounded.looked_at) <= 1_000
        pages = [found]
        while (end := pages[-1].end) is not None:
            pages.append(ops.search(ledger, rare, after=end))
    assert [each for page in pages for each in ids(page)] == ["04500"]
    assert sum(page.looked_at for page in pages) == MANY + 1
    assert max(bounded.looked_at) <= 1_000


def test_what_is_not_completed_is_found_at_once(store: Store, bounded: BoundedStore) -> None:
    """With an index one window finds what is not completed; other stores need more windows."""
    complete(store, *(Key("billing", f"{n:05}") for n in range(MANY)))
    ledger = Ledger(bounded)
    ledger.fail(granted(ledger.claim(Key("billing", "99999"))), "no")
    failed = ops.Selection(states=["failed"])
    found = ops.search(ledger, failed)
    if isinstance(store, SqlStore):
        assert (ids(found), found.looked_at, found.end) == (["99999"], 1, None)
    else:
        assert found.end is not None
        assert ids(ops.search(ledger, failed, within_s=math.inf)) == ["99999"]


def test_the_exact_id_comes_first(store: Store, bounded: BoundedStore) -> None:
    """A whole id is found first, whatever precedes it, and once; and only if it fits otherwise."""
    names = ("an-order", "order", "order-1", "z-order")
    complete(store, *(Key("billing", name) for name in names), Key("sms", "order"))
    ledger = Ledger(bounded)
    first, *rest = ids(ops.search(ledger, ops.Selection(consumer="billing", text="order")))
    assert (first, rest) == ("order", ["an-order", "order-1", "z-order"])
    assert ids(ops.search(ledger, ops.Selection(), begins="order")) == ["order", "order", "order-1"]
    assert ids(ops.search(ledger, ops.Selection(states=["failed"], text="order"))) == []
    # A part of an id that cannot be an id itself.
    complete(store, Key("billing", "a b"))
    assert ids(ops.search(ledger, ops.Selection(text=" "))) == ["a b"]


class Measured:
    """A store in SQLite with so many records, which counts how much work SQLite does."""

    def __init__(self, file: Path, rows: int) -> None:
        self._steps: list[None] = []
        engine = sqlite_engine(file)

        @event.listens_for(engine, "connect")
        def watch(connection: sqlite3.Connection, _: object) -> None:
            connection.set_progress_handler(lambda: self._steps.append(None), 100)

        self.store = SqlStore(engine)
        self.store.migrate()
        with engine.connect() as connection:
            raw = connection.connection.driver_connection
            assert isinstance(raw, sqlite3.Connection)
            raw.execute(_FILL, (rows,))
            raw.commit()

    def work_for(self, look: Look) -> int:
        """How many steps of SQLite's machine a window takes, in hundreds."""
        self.store.window(look)
        self._steps.clear()
        self.store.window(look)
        return len(self._steps)


_FILL = (
    "INSERT INTO processed_messages (message_id, provider, status, attempts, first_processed_at,"
    " last_processed_at, fence, version, exhausted, duplicates)"
    " WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?)"
    " SELECT lower(hex(randomblob(16))), 'billing', 'sent', 1, 1.7e9, 1.8e9, 1, 2, 0, 0 FROM n"
)


@pytest.fixture(scope="module")
def small_and_large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Measured]]:
    """Two ledgers, one three times as large as the other."""
    folder = tmp_path_factory.mktemp("measured")
    both = [Measured(folder / f"{rows}.db", rows) for rows in (20_000, 60_000)]
    yield both
    for each in both:
        each.store.close()


@pytest.mark.parametrize(
    "look",
    [
        Look([Query(consumer="rare")]),
        Look([Query(text="no such text")]),
        Look([Query(older_than_s=10**6)]),
        Look([Query()], begins="b"),
        Look([Query(consumer="rare")], after="7"),
        Look([Query(consumer="rare")], begins="7", after="70"),
        Look([Query(state=State.FAILED)]),
        Look([Query(state=State.FAILED)], begins="7", after="70"),
    ],
)
def test_a_window_costs_the_same_in_a_larger_table(
    small_and_large: list[Measured], look: Look
) -> None:
    """SQLite does as much work for a window in a large table as in a small one, however few fit."""
    small, large = (each.work_for(look) for each in small_and_large)
    assert large <= 1.1 * small + 2


# ---- What else reads a ledger ------------------------------------------------------------------


def test_no_scrape_reads_the_whole_ledger(store: Store, bounded: BoundedStore) -> None:
    """Gauges, status and overview ask for nothing that takes longer in a larger ledger."""
    complete(store, Key("billing", "1"))
    ledger = Ledger(bounded)
    registry = CollectorRegistry()
    Metrics(registry).watch(ledger)
    assert (
        'oncely_records{consumer="billing",state="completed"} 1.0'
        in generate_latest(registry).decode()
    )
    assert ops.status(ledger).total.records == ops.overview(ledger).status.total.records == 1


def test_consumers_of_a_large_ledger(
    open_sqlite: Callable[..., SqlStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where consumers are only sampled, an unknown one has no records, and is not a mistake."""
    store = open_sqlite()
    store.migrate()
    complete(store, *(Key("billing", str(n)) for n in range(10)))
    bounded = Ledger(BoundedStore(store))

    def ask() -> list[object]:
        nobody = ops.Selection(consumer="nobody", states=["failed"])
        return [
            *ops.select(bounded, nobody).records,
            *ops.search(bounded, nobody).records,
            *ops.find(bounded, "1", "nobody"),
            *ops.dead_letters(bounded, "nobody").letters,
            *ops.waiting(bounded, "nobody").messages,
        ]

    with pytest.raises(ConfigError, match="no records of consumer 'nobody'"):
        ask()
    monkeypatch.setattr(known, "EXACT", 5)
    assert ask() == []
