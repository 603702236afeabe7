"""Stores on servers, and the URLs of all stores that processes can share."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from tests.records import Doing
from tests.turns import in_turn

from oncely.ledger.ledger import Ledger
from oncely.stores.names import TableName
from oncely.stores.sql import SqlStore
from oncely.stores.sql.engines import server_engine
from oncely.stores.store import Clock, Store

OpenSql = Callable[..., SqlStore]

SHARED = ("sqlite", "postgresql", "mysql", "redis")
"""Kinds of store that several processes can use at once."""


@pytest.fixture
def ledger(store: Store) -> Iterator[Ledger]:
    """The ledger over the store under test."""
    with closing(Ledger(store)) as ledger:
        yield ledger


@pytest.fixture
def other(store: Store) -> Iterator[Ledger]:
    """The ledger of another worker over the store under test."""
    with closing(Ledger(store)) as ledger:
        yield ledger


@pytest.fixture
def doing(store: Store) -> Iterator[Doing]:
    """Does single calls in transactions of the store under test."""
    doing = Doing(store)
    with closing(doing.ledger):
        yield doing


@pytest.fixture
def open_sql() -> Iterator[OpenSql]:
    """Opens stores on SQL servers, and closes them all at the end."""
    with ExitStack() as opened:

        def open_store(
            url: str, clock: Clock | None = None, name: TableName = TableName()
        ) -> SqlStore:
            store = SqlStore(server_engine(url), name, clock)
            opened.callback(store.close)
            return store

        yield open_store


def url_of(kind: str, request: pytest.FixtureRequest, folder: Path) -> str:
    """The URL of an empty store of that kind; skips the test where its server is missing."""
    if kind == "sqlite":
        return f"sqlite:///{folder / 'ledger.db'}"
    return str(request.getfixturevalue(f"{kind}_url"))


def ledger_url_of(kind: str, request: pytest.FixtureRequest) -> str:
    """The URL of a migrated ledger without a row in a store of that kind; skips as `url_of`."""
    # In Redis nothing is to be migrated.
    return str(request.getfixturevalue("redis_url" if kind == "redis" else f"{kind}_ledger_url"))


@pytest.fixture(params=["sqlite", *in_turn("processes", SHARED[1:])])
def shared_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty store, in a file and on a server."""
    return url_of(request.param, request, tmp_path)
