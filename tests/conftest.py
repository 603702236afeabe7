"""Fixtures that tests of every kind share."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.server_fixtures import (  # noqa: F401 - fixtures, for all tests.
    mariadb,
    mysql_url,
    postgresql,
    postgresql_url,
    private_mariadb,
    private_postgresql,
    private_rabbitmq,
    private_redis,
    rabbitmq,
    rabbitmq_url,
    redis_server,
    redis_url,
)

from oncely.core.record import Claim, Key
from oncely.ledger import Ledger
from oncely.stores.base import Clock
from oncely.stores.memory import MemoryStore
from oncely.stores.sql import SqlStore
from oncely.stores.sql.engines import sqlite_engine
from oncely.testing import ManualClock, MeddlingStore, granted

OpenSqlite = Callable[..., SqlStore]


@pytest.fixture
def clock() -> ManualClock:
    """The store's clock, moved by hand."""
    return ManualClock()


@pytest.fixture
def meddling(clock: ManualClock) -> MeddlingStore:
    """A store in memory that reads `clock`, and in which a test can meddle."""
    return MeddlingStore(MemoryStore(clock))


@pytest.fixture
def ledger(meddling: MeddlingStore) -> Ledger:
    """The ledger over `meddling`."""
    return Ledger(meddling)


@pytest.fixture
def rival(meddling: MeddlingStore) -> Ledger:
    """Another worker on the same records, whom nobody meddles with."""
    return Ledger(meddling.store)


@pytest.fixture
def key() -> Key:
    """The key that tests of one message use."""
    return Key("billing", "abc-123")


@pytest.fixture
def claim(ledger: Ledger, key: Key) -> Claim:
    """A claim on `key`, with a lease of 60 seconds."""
    return granted(ledger.claim(key, "60s"))


@pytest.fixture
def open_sqlite(tmp_path: Path) -> Iterator[OpenSqlite]:
    """Opens stores on one SQLite file, and closes them all at the end."""
    with ExitStack() as opened:

        def open_store(clock: Clock | None = None) -> SqlStore:
            store = SqlStore(sqlite_engine(tmp_path / "ledger.db"), clock=clock)
            opened.callback(store.close)
            return store

        yield open_store
