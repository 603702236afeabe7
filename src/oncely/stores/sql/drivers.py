"""Drivers of callers' connections: how statements written for our drivers run on theirs."""

import re
import sqlite3
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache, partial
from inspect import iscoroutinefunction
from traceback import walk_tb
from typing import Any

from sqlalchemy.exc import DBAPIError

from oncely.core.errors import ConfigError

Parameters = Mapping[str, Any] | Sequence[Any] | None

_PARAMETER = re.compile(r"%\((\w+)\)[sb]|%%")
_IDLE = 0
"""The status, in PostgreSQL's drivers, of a connection on which no transaction has begun."""
_IN_TRANSACTION = 1
"""The bit in answers of MariaDB and MySQL that says that a transaction is open."""


_ALL_DIGITS = "SET LOCAL extra_float_digits = 1; "
"""For drivers of PostgreSQL that read numbers as text: a session may round times, even to years."""


class Driver:
    """What the ledger has to know of a driver. `own` is the driver's own connection; `raw` is that,
    or SQLAlchemy's adapter of it.
    """

    kind: str
    """The kind of database, by the name of SQLAlchemy's dialect."""

    def is_idle(self, own: Any) -> bool | None:  # noqa: ARG002 - for those that know.
        """Whether no transaction has begun; None where that cannot be known."""
        return None

    def is_closed(self, own: Any) -> bool:  # noqa: ARG002 - for those that know.
        """Whether its program has closed it, as far as that can be known."""
        return False

    def has_autocommit(self, raw: Any) -> bool:
        """Whether a statement outside a transaction commits by itself."""
        return bool(raw.autocommit)

    def cursor(self, raw: Any) -> Any:
        """A cursor whose rows are tuples."""
        return raw.cursor()

    begins_with: str = ""
    """Statements before the first of the ledger in a transaction."""

    adapted: Callable[[str, Parameters], tuple[str, Parameters]] | None = None
    """Rewrites a statement for this driver; None for drivers that statements are written for."""

    def commits_each(self, raw: Any) -> bool:
        """Whether the next statement commits by itself."""
        has_begun = self.is_idle(own_connection(raw)) is False
        return not has_begun and self.has_autocommit(raw)


def own_connection(raw: Any) -> Any:
    """The driver's own connection, where `raw` is SQLAlchemy's adapter of an async one."""
    return getattr(raw, "driver_connection", raw)


def driver_of(raw: Any) -> Driver | None:
    """The driver of a connection; None where `raw` is not a connection of a known driver."""
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


def of_driver(error: Exception) -> Exception:
    """The driver's own error, where SQLAlchemy or Django has wrapped it."""
    original: BaseException | None = None
    if isinstance(error, DBAPIError):
        original = error.orig
    elif type(error).__module__ == "django.db.utils":
        original = error.__cause__
    return original if isinstance(original, Exception) else error


def is_driver_error(error: Exception) -> bool:
    """Whether an error is one of a driver's."""
    return any(
        kind.__name__ == "Error" and kind.__module__.partition(".")[0] in _ERROR_MODULES
        for kind in type(error).__mro__
    )


def is_raised_by_driver(error: Exception) -> bool:
    """Whether a driver, or Python's own library, has raised it: PyMySQL has a RuntimeError, too."""
    *_, (frame, _) = walk_tb(error.__traceback__)
    package = str(frame.f_globals["__name__"]).partition(".")[0].partition("_")[0]
    return package in _ERROR_MODULES or package in sys.stdlib_module_names


# ---- Statements --------------------------------------------------------------------------------


def _as_text(statement: str, parameters: Parameters) -> tuple[str, Parameters]:
    """For drivers without binary parameters."""
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


# ---- Drivers -----------------------------------------------------------------------------------


class _Psycopg(Driver):
    kind = "postgresql"

    def is_idle(self, own: Any) -> bool:
        return bool(own.pgconn.transaction_status == _IDLE)

    def is_closed(self, own: Any) -> bool:
        return bool(own.closed and not own.broken)

    def cursor(self, raw: Any) -> Any:
        if raw.pgconn.pipeline_status:
            raise ConfigError("transaction: this connection is in a pipeline; leave that first")
        return self._new_cursor(raw)

    @cached_property
    def _new_cursor(self) -> Callable[[Any], Any]:
        # Importing the driver each time would take as long as making a cursor.
        import psycopg
        from psycopg.rows import tuple_row

        # Not the connection's own factories, which the caller may have set.
        return partial(psycopg.Cursor, row_factory=tuple_row)


class _AsyncPsycopg(_Psycopg):
    begins_with = _ALL_DIGITS
    adapted = staticmethod(_as_text)
    cursor = Driver.cursor


class _Psycopg2(Driver):
    kind = "postgresql"
    begins_with = _ALL_DIGITS
    adapted = staticmethod(_as_text)

    def is_idle(self, own: Any) -> bool:
        return bool(own.info.transaction_status == _IDLE)

    def is_closed(self, own: Any) -> bool:
        return bool(own.closed)

    def cursor(self, raw: Any) -> Any:
        from psycopg2.extensions import cursor

        return raw.cursor(cursor_factory=cursor)


class _Asyncpg(Driver):
    kind = "postgresql"
    adapted = staticmethod(_numbered)

    def is_idle(self, own: Any) -> bool:
        return not own.is_in_transaction()


class _MysqlDriver(Driver):
    kind = "mysql"

    def has_autocommit(self, raw: Any) -> bool:
        return bool(own_connection(raw).get_autocommit())


class _Pymysql(_MysqlDriver):
    def is_idle(self, own: Any) -> bool:
        return not own.server_status & _IN_TRANSACTION

    def is_closed(self, own: Any) -> bool:
        return not own.open

    def cursor(self, raw: Any) -> Any:
        from pymysql.cursors import Cursor

        return Cursor(raw)


class _Mysqlclient(_MysqlDriver):
    adapted = staticmethod(_as_text)

    def cursor(self, raw: Any) -> Any:
        from MySQLdb.cursors import Cursor

        return raw.cursor(Cursor)


class _AsyncMysql(_MysqlDriver):
    adapted = staticmethod(_as_text)

    def is_idle(self, own: Any) -> bool:
        return not own.get_transaction_status()


class _Aiosqlite(Driver):
    kind = "sqlite"

    def is_idle(self, own: Any) -> bool:
        return not own.in_transaction

    def is_closed(self, own: Any) -> bool:
        try:
            return own.in_transaction is None
        except (ValueError, sqlite3.ProgrammingError):
            return True

    def has_autocommit(self, raw: Any) -> bool:
        # Since Python 3.12 `autocommit` may be a bool; before, and where it is not set,
        # `isolation_level` decides.
        own = own_connection(raw)
        autocommit = getattr(own, "autocommit", None)
        return autocommit if isinstance(autocommit, bool) else own.isolation_level is None


class _Sqlite3(_Aiosqlite):
    def cursor(self, raw: Any) -> Any:
        return sqlite3.Cursor(raw)


_DRIVERS: Mapping[str, Driver] = {
    "psycopg": _Psycopg(),
    "psycopg2": _Psycopg2(),
    "pymysql": _Pymysql(),
    "MySQLdb": _Mysqlclient(),
    "sqlite3": _Sqlite3(),
}
_ASYNC_DRIVERS: Mapping[str, Driver] = {
    "psycopg": _AsyncPsycopg(),
    "asyncpg": _Asyncpg(),
    "aiomysql": _AsyncMysql(),
    "asyncmy": _AsyncMysql(),
    "aiosqlite": _Aiosqlite(),
}
"""Drivers whose connections SQLAlchemy's asyncio adapts."""

# asyncpg's own errors are not those of the DB-API: SQLAlchemy wraps them.
_ERROR_MODULES = {*_DRIVERS, *_ASYNC_DRIVERS, "sqlalchemy"}
