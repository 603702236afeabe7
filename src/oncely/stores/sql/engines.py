"""Engines: how each kind of database is connected to."""

from collections.abc import Mapping
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from oncely.core.errors import ConfigError, mask_passwords
from oncely.stores.names import TableName
from oncely.stores.sql.dialect import Dialect

_CONNECT_TIMEOUT_S = 5
"""For one try: a server that is gone may not even refuse the connection."""
_ANSWER_TIMEOUT_S = 120
"""For one answer: longer than MariaDB lets a statement wait for a lock."""
_KEEPALIVE = {
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 60_000,
}
"""How a connection to PostgreSQL notices that the server is gone."""
_SQL_MODE = "STRICT_TRANS_TABLES,NO_ENGINE_SUBSTITUTION"
"""The SQL in which the ledger's own statements are written: other modes have other grammars. It is
set before SQLAlchemy asks for it, to know how names are quoted.
"""
_PREPARE = "prepare_threshold"
OWN: Any = {
    "isolation_level": "AUTOCOMMIT",
    "pool_reset_on_return": None,
    "pool_use_lifo": True,
}
"""For the ledger's own statements. Each commits by itself, or is in a transaction that we end
ourselves: there is nothing to roll back when a connection is given back. The one that was used last
has its statements prepared, and its pages in memory.
"""


def dialect_of(engine: Engine) -> type[Dialect]:
    """The class with the statements for the database of an engine. Imports its driver."""
    match engine.dialect.name:
        case "postgresql":
            from oncely.stores.sql.postgresql import Postgresql

            return Postgresql
        case "mysql" | "mariadb":
            from oncely.stores.sql.mysql import Mysql

            return Mysql
        case _:
            from oncely.stores.sql.sqlite import Sqlite

            return Sqlite


def unconnected_engine(kind: str) -> Engine:
    """An engine with the dialect of that kind of database, which does not connect to any."""
    drivers = {"postgresql": "postgresql+psycopg", "mysql": "mysql+pymysql"}
    return create_engine(f"{drivers.get(kind, 'sqlite+pysqlite')}://")


def sqlite_engine(file: Path, **settings: Any) -> Engine:
    """An engine on a SQLite file. Raises ConfigError where it cannot be made there."""
    if not file.absolute().parent.is_dir():
        raise ConfigError(f"ledger: {str(file)!r} cannot be made: its folder does not exist")
    url = URL.create("sqlite+pysqlite", database=str(file.absolute()))
    return create_engine(url, **settings)


def server_engine(url: str | URL, like: Engine | None = None) -> Engine:
    """An engine on a PostgreSQL, MariaDB or MySQL server, for the ledger's own statements.

    It prepares no statements where the URL, or the engine `like`, switches that off. Raises
    ConfigError for a URL that cannot be read, ModuleNotFoundError for a missing driver.
    """
    engine = _server_engine(url, {"sql_mode": _SQL_MODE}, **OWN)
    if like is not None and engine.dialect.name == "postgresql":
        _prepare_like(engine, like)
    return engine


def session_engine(url: str | URL) -> Engine:
    """An engine on such a server for users' transactions. Raises as `server_engine` does."""
    # Else MariaDB locks the gaps between keys, and writers of neighbouring keys wait for each
    # other.
    return _server_engine(url, {}, isolation_level="READ COMMITTED")


def engine_beside(engine: Engine) -> Engine:
    """An engine on the same database, with the same settings and its own connections."""
    return Engine(
        engine.pool.recreate(),
        engine.dialect,
        engine.url,
        execution_options=engine.get_execution_options(),
    )


def renew(engine: Engine) -> None:
    """Give an engine a new pool, and close what is idle in its former one. Who then gives back a
    connection to that sees that it is not the engine's any more, and has to dispose of it.
    """
    former = engine.pool
    # In this order: what is given back between the two would stay open else.
    engine.dispose(close=False)
    former.dispose()


def _server_engine(url: str | URL, on_mysql: Mapping[str, Any], **settings: Any) -> Engine:
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        # The URL is not shown: its password cannot be found to be masked.
        raise ConfigError(
            'ledger: this cannot be read as a URL; write "postgresql://user@host:5432/database"'
        ) from None
    if "@" in (parsed.host or ""):
        # The host would be shown, with the end of the password in it.
        raise ConfigError(
            "ledger: the password in the URL has an @ that ends it; write %40 for each @ in it"
        )
    shown = mask_passwords(repr(parsed))
    if not parsed.database:
        raise ConfigError(
            f"ledger: {shown!r} names no database; write it last, after the host and a slash"
        )
    if parsed.get_backend_name() in ("postgresql", "postgres"):
        parsed = parsed.set(drivername="postgresql+psycopg")
        parsed, prepared = _plain_or_prepared(parsed)
        # A database, or a role, may have another encoding: it lacks letters that ids may have, or
        # the driver then gives bytes for text.
        own = {**prepared, "client_encoding": "utf8"}
        patience = {**_KEEPALIVE, "connect_timeout": _CONNECT_TIMEOUT_S}
    else:
        parsed = parsed.set(drivername="mysql+pymysql")
        own = {"charset": "utf8mb4", **on_mysql}
        patience = {"read_timeout": _ANSWER_TIMEOUT_S, "connect_timeout": _CONNECT_TIMEOUT_S}
    # A value in the URL itself wins.
    unsaid = {name: value for name, value in patience.items() if name not in parsed.query}
    try:
        return create_engine(parsed, connect_args={**own, **unsaid}, **settings)
    except (SQLAlchemyError, ValueError) as error:
        raise ConfigError(f"ledger: {shown!r} cannot be opened: {error}") from error


def _plain_or_prepared(url: URL) -> tuple[URL, dict[str, Any]]:
    """A URL without the option `prepare_threshold` of psycopg, and that option as a number:
    SQLAlchemy would pass it on as text.
    """
    said = url.query.get(_PREPARE)
    if said is None:
        return url, {}
    if said != "none" and not (isinstance(said, str) and said.isdecimal()):
        raise ConfigError(
            f'ledger: {_PREPARE}={said} is not a number; write "none" behind a pooler in'
            " transaction mode, or leave it out"
        )
    threshold = None if said == "none" else int(said)
    return url.difference_update_query([_PREPARE]), {_PREPARE: threshold}


def _prepare_like(engine: Engine, like: Engine) -> None:
    """Let connections prepare statements as those of another engine do."""

    @cache
    def threshold() -> int | None:
        # An engine does not show its connection arguments, so a connection is asked. Those of the
        # pool itself may all be taken, perhaps by this very thread.
        pool = like.pool.recreate()
        try:
            with closing(pool.connect()) as connection:
                # Other drivers have no threshold, and do not prepare by themselves.
                found: int | None = getattr(connection.driver_connection, _PREPARE, None)
                return found
        finally:
            pool.dispose()

    def prepare(connection: Any, _: object) -> None:
        connection.prepare_threshold = threshold()

    event.listen(engine, "connect", prepare)


# ---- Whether the transactions of an engine are in the database of the ledger --------------------


def check_joined_source(source: object, ledger: URL, name: TableName) -> None:
    """As `Store.check_joins` says, for the tables `name` in the database of `ledger`.

    A server may have several addresses, one of them a pooler's: only the name of the database is
    compared.
    """
    # Of an Engine or sessionmaker, plain or async.
    settings = getattr(source, "kw", None)
    bind = settings.get("bind") if isinstance(settings, dict) else source
    engine = getattr(bind, "sync_engine", bind)
    if not isinstance(engine, Engine):
        return
    ours, theirs = _kind(ledger), _kind(engine.url)
    if ours != theirs:
        raise _elsewhere(theirs, ours)
    # A schema of MariaDB is a database, which transactions from any other database reach.
    is_anywhere = ours == "mysql" and name.schema is not None
    here, there = _database(ledger), _database(engine.url)
    if here and there and here != there and not is_anywhere:
        raise _elsewhere(f"{there!r}", f"{here!r}")


def _elsewhere(there: str, here: str) -> ConfigError:
    return ConfigError(
        f"transaction: its connections are to {there}, and the ledger is in {here}; open the "
        "ledger on the same database, as in open_ledger(engine)"
    )


def _kind(url: URL) -> str:
    name = url.get_backend_name()
    return "mysql" if name == "mariadb" else name


def _database(url: URL) -> str | None:
    """The name of a database, or the path of a file; None where the URL has none."""
    name = url.database
    if name is None or _kind(url) != "sqlite":
        return name
    is_file = name and name != ":memory:" and not name.startswith("file:")
    return str(Path(name).resolve()) if is_file else None
