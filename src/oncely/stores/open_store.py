"""From a URL to a store. A driver is imported only when its URL is opened."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oncely._util.tls import check_files
from oncely.core.errors import ConfigError, mask_passwords
from oncely.stores.memory_store import MemoryStore
from oncely.stores.names import TABLE_NAME, TableName
from oncely.stores.store import Store

if TYPE_CHECKING:
    from sqlalchemy import Engine
    from sqlalchemy.orm import Session, sessionmaker

_SQLITE = (3, 33)
"""The oldest SQLite that a ledger in a file supports."""
_KINDS = {
    "memory": "memory",
    "sqlite": "sqlite",
    "postgresql": "postgresql",
    "postgres": "postgresql",
    "mysql": "mysql",
    "mariadb": "mysql",
    "redis": "redis",
    "rediss": "redis",
}
_EXAMPLES = (
    '"sqlite:///ledger.db" (a file in this folder), "postgresql://user@host/database", '
    '"mysql://user@host/database", "redis://host:6379/0" or "memory://"'
)


def open_store(url: "str | Engine", table: str = TABLE_NAME, schema: str | None = None) -> Store:
    """The store that `url` names, its records in `table`; in Redis, `table` is the keys' prefix.

    Raises ConfigError, which says what to type instead.
    """
    name = TableName(table, schema).checked()
    if not isinstance(url, str):
        return _open_engine(url, name)
    check_files(url.partition("?")[2])
    kind = _kind(url)
    _refuse_schema(name, kind)
    match kind:
        case "memory":
            return MemoryStore()
        case "sqlite":
            return _open_sqlite(sqlite_file(url), name)
        case "postgresql" | "mysql":
            return _open_server(url, name)
        case "redis":
            with extra_installed("redis"):
                from oncely.stores.redis import open_redis
            return open_redis(url, name.table)
        case _:
            raise ConfigError(
                f"ledger: {mask_passwords(url)!r} is not of a known kind; write {_EXAMPLES}"
            )


def store_around(connection: Any, table: str = TABLE_NAME, schema: str | None = None) -> Store:
    """A store in the database of `connection`, only for joining transactions there.

    Raises ConfigError where it is not a connection with a transaction to join.
    """
    from oncely.stores.sql.joining import kind_of

    kind = kind_of(connection)
    name = TableName(table, schema).checked()
    _refuse_schema(name, kind)
    return _unconnected_store(kind, name)


@cache
def _unconnected_store(kind: str, name: TableName) -> Store:
    from oncely.stores.sql.engines import unconnected_engine
    from oncely.stores.sql.sql_store import SqlStore

    with extra_installed(kind):
        return SqlStore(unconnected_engine(kind), name)


def _refuse_schema(name: TableName, kind: str | None) -> None:
    if name.schema is not None and kind not in ("postgresql", "mysql"):
        raise ConfigError(
            f"schema: {name.schema!r}: only PostgreSQL, MariaDB and MySQL have schemas"
        )


def open_sessions(url: str) -> "sessionmaker[Session]":
    """A sessionmaker for the database that a ledger's `url` names.

    Raises ConfigError where that has no transactions. Call `open_store` for the URL before.
    """
    from sqlalchemy.orm import sessionmaker

    from oncely.stores.sql.engines import session_engine, sqlite_engine

    check_transactions(url)
    is_file = _kind(url) == "sqlite"
    return sessionmaker(sqlite_engine(sqlite_file(url)) if is_file else session_engine(url))


def check_transactions(url: str) -> None:
    """Raise ConfigError where a ledger's `url` names a store without transactions to work in."""
    kind = _kind(url)
    if kind in ("memory", "redis"):
        raise ConfigError(
            f"ledger: {kind} has no transactions that a handler could work in; name a ledger in "
            "PostgreSQL, MariaDB or SQLite"
        )


def _kind(url: str) -> str | None:
    # A URL may name a driver, too, as in "mysql+pymysql:": it is ignored, and ours is used.
    return _KINDS.get(url.partition(":")[0].partition("+")[0])


def sqlite_file(url: str) -> Path:
    """The file of a sqlite URL. Raises ConfigError where it names none."""
    prefix, name = url[: len("sqlite:///")], url[len("sqlite:///") :]
    if prefix != "sqlite:///" or not name:
        raise ConfigError(
            f'ledger: {mask_passwords(url)!r} names no file; write "sqlite:///ledger.db"'
        )
    return Path(name)


def _open_engine(engine: object, name: TableName) -> Store:
    from sqlalchemy import Engine

    if not isinstance(engine, Engine) or engine.dialect.is_async:
        raise ConfigError(
            f"ledger: {type(engine).__name__} is neither a URL nor a sync engine; write a URL such "
            f"as {_EXAMPLES}. AsyncLedger(ledger) has the same calls as coroutines"
        )
    # The ledger opens its own connections: it sets how they commit, which must not change for the
    # other users of the engine.
    kind = _KINDS.get(engine.dialect.name)
    _refuse_schema(name, kind)
    match kind:
        case "postgresql" | "mysql":
            return _open_server(engine.url.render_as_string(hide_password=False), name, engine)
        case "sqlite" if engine.url.database and engine.url.database != ":memory:":
            return _open_sqlite(Path(engine.url.database), name)
        case "sqlite":
            raise ConfigError('ledger: the engine has no file; write "memory://" instead')
        case _:
            raise ConfigError(
                f"ledger: an engine of {engine.dialect.name} is not of a known kind; write "
                f"{_EXAMPLES}"
            )


def _open_sqlite(file: Path, name: TableName) -> Store:
    if sqlite3.sqlite_version_info < _SQLITE:
        raise ConfigError(
            f"ledger: this Python has SQLite {sqlite3.sqlite_version}; a ledger in a file needs "
            f"{'.'.join(map(str, _SQLITE))} or newer: use a newer Python, or a server"
        )
    from oncely.stores.sql.engines import OWN, sqlite_engine
    from oncely.stores.sql.sql_store import SqlStore

    return SqlStore(sqlite_engine(file, **OWN), name)


def _open_server(url: str, name: TableName, like: "Engine | None" = None) -> Store:
    from oncely.stores.sql.engines import server_engine
    from oncely.stores.sql.sql_store import SqlStore

    with extra_installed(_kind(url)):
        return SqlStore(server_engine(url, like), name)


@contextmanager
def extra_installed(extra: str | None, what: str = "ledger") -> Iterator[None]:
    """Raise ConfigError where a driver is missing that the package's `extra` installs."""
    try:
        yield
    except ModuleNotFoundError as error:
        if extra is None:
            raise
        raise ConfigError(
            f"{what}: {error.name} is not installed; type: pip install 'oncely[{extra}]'"
        ) from error
