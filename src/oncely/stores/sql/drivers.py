"""Drivers of callers' connections: how statements that are written for ours run on theirs."""

import re
import sqlite3
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import cache, lru_cache, partial
from inspect import iscoroutinefunction
from itertools import count
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from oncely.core.errors import ConfigError

Parameters = Mapping[str, Any] | Sequence[Any] | None

_PARAMETER = re.compile(r"%\((\w+)\)[sb]|%%")
_IDLE = 0
"""What PostgreSQL's drivers call a connection on which no transaction has begun."""
_IN_ERROR = 3
"""What they call one on which a transaction can only be rolled back."""
_IN_TRANSACTION = 1
"""The bit of MariaDB's and MySQL's answers that says so."""


def _is_never(_: Any) -> bool:
    return False


class Driver(NamedTuple):
    """What is to be known of a driver. `own` is its own connection, `raw` that or an adapter."""

    kind: str
    """Of database: the name of SQLAlchemy's dialect."""
    is_idle: Callable[[Any], bool]
    """Of `own`: whether no transaction has begun; False where that cannot be known."""
    cursor: Callable[[Any], Any]
    """Of `raw`: a cursor whose rows are tuples."""
    commits_each: Callable[[Any], bool] | None = None
    """Of `own`: whether a statement outside a transaction commits by itself; None where a bare
    connection cannot be joined."""
    adapted: Callable[[str, Parameters], tuple[str, Parameters]] | None = None
    """A statement as it takes it; None for the drivers that statements are written for."""
    is_broken: Callable[[Any], bool] = _is_never
    """Of `raw`: whether a statement has failed, after which a commit would roll back."""
    begin_with: Callable[[Any, str, Mapping[str, Any]], int | None] | None = None
    """Of `own`: begin a transaction and execute a statement in one exchange. How many rows it
    wrote, or None where it was not executed, for whatever reason; it returns no rows."""


def own_connection(raw: Any) -> Any:
    """The driver's own connection, where `raw` is SQLAlchemy's adapter of an async one."""
    return getattr(raw, "driver_connection", raw)


def driver_of(raw: Any) -> Driver | None:
    """The driver of a connection; None for what is no connection of a known one."""
    own = own_connection(raw)
    return _driver_of_class(own.__class__, is_adapted=own is not raw)


@lru_cache
def _driver_of_class(connection: type, *, is_adapted: bool) -> Driver | None:
    if not is_adapted and iscoroutinefunction(getattr(connection, "commit", None)):
        return None
    drivers = _ASYNC_DRIVERS if is_adapted else _DRIVERS
    for kind in connection.__mro__:
        if driver := drivers.get(kind.__module__.partition(".")[0]):
            return driver
    return None


def is_driver_error(error: Exception) -> bool:
    """Whether an error is one of a driver's."""
    return any(
        kind.__name__ == "Error" and kind.__module__.partition(".")[0] in _ERROR_MODULES
        for kind in type(error).__mro__
    )


# ---- Statements --------------------------------------------------------------------------------


def _as_text(statement: str, parameters: Parameters) -> tuple[str, Parameters]:
    """For drivers that know no binary parameters."""
    return _without_binary(statement), parameters


@lru_cache
def _without_binary(statement: str) -> str:
    return _PARAMETER.sub(lambda found: f"%({found[1]})s" if found[1] else "%%", statement)


def _numbered(statement: str, parameters: Parameters) -> tuple[str, Parameters]:
    """For asyncpg."""
    text, names = _with_numbers(statement)
    given = parameters if isinstance(parameters, Mapping) else {}
    return text, tuple(given[name] for name in names)


@lru_cache
def _with_numbers(statement: str) -> tuple[str, Sequence[str]]:
    names: dict[str, int] = {}

    def number(found: "re.Match[str]") -> str:
        return f"${names.setdefault(found[1], len(names) + 1)}" if found[1] else "%"

    return _PARAMETER.sub(number, statement), list(names)


# ---- Cursors and states ------------------------------------------------------------------------


def _psycopg_cursor(raw: Any) -> Any:
    if raw.pgconn.pipeline_status:
        raise ConfigError("transaction: this connection is in a pipeline; leave that first")
    return _psycopg_cursors()(raw)


@cache
def _psycopg_cursors() -> Callable[[Any], Any]:
    # To look for the driver anew would take as long as a cursor does.
    import psycopg
    from psycopg.rows import tuple_row

    # Past what the caller has set for cursors of its own.
    return partial(psycopg.Cursor, row_factory=tuple_row)


def _pymysql_cursor(raw: Any) -> Any:
    from pymysql.cursors import Cursor

    return Cursor(raw)


def _psycopg2_cursor(raw: Any) -> Any:
    from psycopg2.extensions import cursor

    return raw.cursor(cursor_factory=cursor)


def _mysqlclient_cursor(raw: Any) -> Any:
    from MySQLdb.cursors import Cursor

    return raw.cursor(Cursor)


def _any_cursor(raw: Any) -> Any:
    return raw.cursor()


def _is_idle_psycopg(own: Any) -> bool:
    return bool(own.pgconn.transaction_status == _IDLE)


def _is_idle_psycopg2(own: Any) -> bool:
    return bool(own.info.transaction_status == _IDLE)


def _is_idle_asyncpg(own: Any) -> bool:
    return not own.is_in_transaction()


def _is_idle_pymysql(own: Any) -> bool:
    return not own.server_status & _IN_TRANSACTION


def _is_idle_async_mysql(own: Any) -> bool:
    return not own.get_transaction_status()


def _is_idle_sqlite(own: Any) -> bool:
    return not own.in_transaction


def _is_broken_psycopg(raw: Any) -> bool:
    return bool(own_connection(raw).info.transaction_status == _IN_ERROR)


def _is_broken_asyncpg(raw: Any) -> bool:
    # It does not tell; so it is tried.
    try:
        raw.cursor().execute("SELECT 1", ())
    except Exception as error:
        if not is_driver_error(error):
            raise
        return True
    return False


def _has_autocommit(own: Any) -> bool:
    return bool(own.autocommit)


def _gets_autocommit(own: Any) -> bool:
    return bool(own.get_autocommit())


def _sqlite_commits_each(own: Any) -> bool:
    # Since Python 3.12 it may be a bool; before, and where it is not set, this counts alone.
    autocommit = getattr(own, "autocommit", None)
    return autocommit if isinstance(autocommit, bool) else own.isolation_level is None


# ---- Beginning with a statement ----------------------------------------------------------------

_BEGIN_OPTIONS = ("isolation_level", "read_only", "deferrable")
_NOT_PREPARED = b"26000"
_numbers = count()
_prepared: MutableMapping[Any, dict[str, str]] = WeakKeyDictionary()
"""The names of statements that connections have prepared."""


def _psycopg_begin_with(own: Any, statement: str, parameters: Mapping[str, Any]) -> int | None:
    # psycopg waits for the answer to BEGIN before it sends the statement, and its own work for each
    # of the two takes as long as the server's. What goes wrong is done again as it would do it.
    if not _begins_plainly(own):
        return None
    from psycopg import generators, pq

    prepared = _prepared.setdefault(own, {})
    text, names = _with_numbers(statement)
    literals = _literals(pq.Escaping(own.pgconn), [parameters[name] for name in names])
    if literals is None:
        return None
    preparing = ""
    if statement not in prepared:
        prepared[statement] = f"oncely_{next(_numbers)}"
        preparing = f"PREPARE {prepared[statement]} AS {text}; "
    query = f"BEGIN; {preparing}EXECUTE {prepared[statement]} (".encode()
    with own.lock:
        own.pgconn.send_query(query + b", ".join(literals) + b")")
        result = own.wait(generators.execute(own.pgconn))[-1]
    if result.status == pq.ExecStatus.COMMAND_OK:
        return int(result.command_tuples)
    if result.error_field(pq.DiagnosticField.SQLSTATE) == _NOT_PREPARED:
        del prepared[statement]
    own.rollback()
    return None


def _begins_plainly(own: Any) -> bool:
    """Whether a connection of psycopg begins its transactions with BEGIN and nothing more."""
    return (
        not own.autocommit
        and all(getattr(own, name) is None for name in _BEGIN_OPTIONS)
        and own.info.encoding == "utf-8"
    )


def _literals(escaping: Any, values: Sequence[Any]) -> list[bytes] | None:
    """The values as they stand in a statement; None where one cannot."""
    literals: list[bytes] = []
    for value in values:
        if value is None:
            literals.append(b"NULL")
        elif isinstance(value, str):
            literals.append(escaping.escape_literal(value.encode()))
        elif isinstance(value, int | float):
            literals.append(str(value).encode())
        else:
            return None
    return literals


# ---- Drivers -----------------------------------------------------------------------------------

_POSTGRESQL, _MYSQL, _SQLITE = "postgresql", "mysql", "sqlite"

_DRIVERS = {
    "psycopg": Driver(
        _POSTGRESQL,
        _is_idle_psycopg,
        _psycopg_cursor,
        _has_autocommit,
        is_broken=_is_broken_psycopg,
        begin_with=_psycopg_begin_with,
    ),
    "psycopg2": Driver(
        _POSTGRESQL,
        _is_idle_psycopg2,
        _psycopg2_cursor,
        _has_autocommit,
        adapted=_as_text,
        is_broken=_is_broken_psycopg,
    ),
    "pymysql": Driver(_MYSQL, _is_idle_pymysql, _pymysql_cursor, _gets_autocommit),
    "MySQLdb": Driver(_MYSQL, _is_never, _mysqlclient_cursor, adapted=_as_text),
    "sqlite3": Driver(_SQLITE, _is_idle_sqlite, sqlite3.Cursor, _sqlite_commits_each),
}
_ASYNC_DRIVERS = {
    "psycopg": Driver(
        _POSTGRESQL,
        _is_idle_psycopg,
        _any_cursor,
        adapted=_as_text,
        is_broken=_is_broken_psycopg,
    ),
    "asyncpg": Driver(
        _POSTGRESQL,
        _is_idle_asyncpg,
        _any_cursor,
        adapted=_numbered,
        is_broken=_is_broken_asyncpg,
    ),
    "aiomysql": Driver(_MYSQL, _is_idle_async_mysql, _any_cursor, adapted=_as_text),
    "asyncmy": Driver(_MYSQL, _is_idle_async_mysql, _any_cursor, adapted=_as_text),
    "aiosqlite": Driver(_SQLITE, _is_idle_sqlite, _any_cursor),
}
"""By the connections that SQLAlchemy's asyncio adapts."""

# asyncpg's own are no DB-API's: SQLAlchemy puts them into such.
_ERROR_MODULES = {*_DRIVERS, *_ASYNC_DRIVERS, "sqlalchemy"}
