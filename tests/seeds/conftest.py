"""Ledgers whose clock a test moves, and any number of them on one store."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from sqlalchemy import Engine, NullPool, create_engine, text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from tests.conformance.conftest import ledger_url_of
from tests.turns import in_turn

from oncely.ledger.ledger import Ledger, open_ledger
from oncely.stores.memory_store import MemoryStore
from oncely.stores.sql import SqlStore
from oncely.stores.sql.engines import server_engine, sqlite_engine
from oncely.stores.store import Store
from oncely.testing import ManualClock

in_memory = pytest.mark.parametrize("kind", ["memory"])
"""For what the store has no part in."""
on_a_server_too = pytest.mark.parametrize(
    "kind", ["sqlite", *in_turn("seeds", ("postgresql", "mysql"))]
)
"""For what happens in the caller's transaction."""

_DRIVERS = {
    "sqlite": ("sqlite", "sqlite+aiosqlite"),
    "postgresql": ("postgresql+psycopg", "postgresql+asyncpg"),
    "mysql": ("mysql+pymysql", "mysql+asyncmy"),
}
"""Of the user's own engines, sync and async."""

OpenLedger = Callable[[], Ledger]


@pytest.fixture
def kind() -> str:
    """A kind of store: in a file, unless a test says otherwise."""
    return "sqlite"


@pytest.fixture
def url(kind: str, request: pytest.FixtureRequest) -> str:
    """The URL of a ledger without a row in a store of that kind."""
    return "memory://" if kind == "memory" else ledger_url_of(kind, request)


@pytest.fixture
def another_ledger(kind: str, url: str, clock: ManualClock) -> Iterator[OpenLedger]:
    """Opens ledgers on the same store: each is another worker, as if in another process."""
    memory = MemoryStore(clock)
    with ExitStack() as opened:

        def open_another() -> Ledger:
            ledger = Ledger(memory if kind == "memory" else _store(kind, url, clock))
            opened.callback(ledger.close)
            return ledger

        yield open_another


@pytest.fixture
def ledger(another_ledger: OpenLedger) -> Ledger:
    """The ledger of the worker that is there first."""
    return another_ledger()


@pytest.fixture
def engine(kind: str, url: str) -> Iterator[Engine]:
    """The user's own engine on the ledger's database, with an empty table `orders`."""
    engine = create_engine(_DRIVERS[kind][0] + url[url.index("://") :])
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE orders (id VARCHAR(50))"))
    yield engine
    engine.dispose()


@pytest.fixture
def async_engine(kind: str, url: str, engine: Engine) -> AsyncEngine:
    """As `engine`, for one event loop at a time."""
    driver = _DRIVERS[kind][1]
    return create_async_engine(driver + url[url.index("://") :], poolclass=NullPool)


def orders_in(engine: Engine) -> list[str]:
    """The ids in the table `orders`."""
    with engine.connect() as connection:
        return list(connection.execute(text("SELECT id FROM orders")).scalars())


def _store(kind: str, url: str, clock: ManualClock) -> Store:
    engine = sqlite_engine(Path(url.removeprefix("sqlite:///"))) if kind == "sqlite" else None
    return SqlStore(engine or server_engine(url), clock=clock)


def open_real(url: str) -> Ledger:
    """A ledger that reads the store's own clock."""
    ledger = open_ledger(url)
    ledger.migrate()
    return ledger
