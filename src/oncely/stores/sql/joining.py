"""Joining: the ledger inside a transaction that its owner begins and ends."""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from itertools import count
from typing import Any, Self, TypeVar, cast

from sqlalchemy.util import await_only

from oncely._util import sqlite_files
from oncely._util.chance import CHANCE
from oncely.core.errors import ConfigError, ContentionError, EndedError, describe
from oncely.stores.sql.dialect import Dialect, Fault
from oncely.stores.sql.drivers import Driver, driver_of, is_driver_error, of_driver, own_connection
from oncely.stores.sql.joined_connection import JoinedConnection, foreign
from oncely.stores.sql.sql_transaction import SqlTransaction, guarded
from oncely.stores.store import CallersTransaction

_FIRST_TRIES = 6
"""How often the first statement of a transaction may lose against others."""
_FIRST_WAIT_S = 0.02
_IN_ERROR = "25P02"
"""PostgreSQL's answer to a statement in a transaction that can only be rolled back."""

_TIMED_OUT = ("25P03", "25P04")
"""PostgreSQL's last words to a session whose transaction stood idle, or lasted, for too long."""

_marks = count()

T = TypeVar("T")

Translate = Callable[[Exception, Fault], Exception]
"""Turns an error of a driver, and what it means, into one of the Store protocol."""


@contextmanager
def joined(
    connection: Any, dialect: Dialect, kind: str, translate: Translate
) -> Iterator[CallersTransaction]:
    """As `Store.within` says; `kind` is that of the database."""
    owner = foreign(connection)
    driver = _driver_for(owner.raw)
    if driver.kind != kind:
        raise ConfigError(
            f"transaction: this is a connection to {driver.kind}, and the ledger is in {kind}; open"
            " the ledger on the same database, as in open_ledger(engine)"
        )
    if driver.commits_each(owner.raw):
        raise ConfigError(
            "transaction: this connection commits each statement: switch autocommit off (of"
            " SQLAlchemy, take an isolation level that is not AUTOCOMMIT), or begin a"
            " transaction first"
        )
    link = _JoinedSqlConnection(owner, driver, dialect)
    transaction = _JoinedSqlTransaction(link, dialect, translate)
    try:
        yield transaction
        transaction.check_end()
    except Exception as error:
        if link.fault(of_driver(error)) is Fault.READ_ONLY:
            owner.lose()
        if transaction.error is None:
            # The error is raised as it is; but where the transaction was ended, its owner is told.
            link.has_ended()
        raise
    finally:
        link.is_left = True


def kind_of(connection: Any) -> str:
    """The kind of database behind `connection`. Raises ConfigError as joining it does."""
    return _driver_for(foreign(connection).raw).kind


def _driver_for(raw: Any) -> Driver:
    driver = driver_of(raw)
    if driver is None:
        name = type(own_connection(raw)).__module__.partition(".")[0]
        raise ConfigError(f"transaction: the driver {name} is not supported; use another")
    return driver


class _JoinedSqlTransaction(SqlTransaction):
    """Inside a caller's transaction."""

    def __init__(
        self, link: "_JoinedSqlConnection", dialect: Dialect, translate: Translate
    ) -> None:
        def translated(error: Exception) -> Exception:
            state = _state_of(error)
            if state == _IN_ERROR:
                return _undone(
                    "a statement has failed inside the block, so the database stores nothing of "
                    "the transaction; let that error leave the block, or use a savepoint"
                )
            if state in _TIMED_OUT:
                link.owner.lose()
                return _undone(
                    "the server has ended the session, since its transaction stood idle or lasted "
                    "for longer than it allows, and stores nothing of it; raise "
                    "idle_in_transaction_session_timeout or transaction_timeout, or do what takes "
                    "long outside the transaction"
                )
            fault = link.fault(error)
            if fault in (Fault.NO_TABLE, Fault.OTHER) and link.has_ended():
                return _ended()
            return error if fault is None else translate(error, fault)

        super().__init__(dialect, link, translated)
        self._joined = link
        self._begin()

    @guarded
    def _begin(self) -> None:
        # Asked before the mark is set, which begins the transaction.
        self.reads_anew = self.dialect.has_read_nothing(self._joined)
        self._joined.begin()

    def check(self) -> None:
        pass  # Each statement is checked.

    def check_end(self) -> None:
        """Raise EndedError where the transaction that was joined has ended."""
        if self.error is not None:
            raise EndedError(f"the transaction is over: {describe(self.error)}") from self.error
        self._end()

    @guarded
    def _end(self) -> None:
        self._joined.end()


class _JoinedSqlConnection:
    """A SqlConnection in a caller's transaction."""

    is_left = False
    """Whether the block that joined it was left."""

    def __init__(self, owner: JoinedConnection, driver: Driver, dialect: Dialect) -> None:
        self.owner = owner
        self.driver = driver
        self._dialect = dialect
        self._own = own_connection(owner.raw)
        self._has_begun = False
        """Whether the transaction was seen to have begun."""
        self._mark = f"oncely_{next(_marks)}"
        self._is_marked = False

    @property
    def connection(self) -> Self:
        return self

    @cached_property
    def info(self) -> MutableMapping[Any, Any]:
        """For MariaDB and MySQL: their `max_allowed_packet`, read where a statement is long."""
        [value] = self.cursor().execute("SELECT @@max_allowed_packet").fetchone()
        return {"max_allowed_packet": value}

    def cursor(self) -> "_Cursor":
        return _Cursor(self, self.call(self.driver.cursor, self.owner.raw))

    def fault(self, error: BaseException) -> Fault | None:
        """What an error means; None where it is not the driver's."""
        if isinstance(error, Exception) and is_driver_error(error):
            return self._dialect.fault(error)
        return None

    def call(self, function: Callable[..., T], *args: Any, **options: Any) -> T:
        """What a call of the driver returns. All of the ledger's go through here.

        An error that is not the database's answer, such as a cancellation, has broken it off. Then
        nobody may use the connection: asyncpg left a BEGIN that nobody awaited to whoever got it
        from the pool next, whose work was never committed.
        """
        try:
            return function(*args, **options)
        except BaseException as error:
            if self.fault(error) in (None, Fault.LOST, Fault.READ_ONLY):
                self.owner.lose()
            raise

    # ---- Beginning and end ---------------------------------------------------------------------

    def begin(self) -> None:
        """Begin the transaction, where it has not begun, and mark it.

        The mark is a savepoint: it ends with its transaction, in whatever way that ends. It is
        older than savepoints that are set inside the block, so that rolling those back keeps it.
        """
        self.owner.prepare()
        if self.driver.kind == "sqlite":
            self._lock_file()
        self._set_mark()

    def _set_mark(self) -> None:
        mark = f"{self.driver.begins_with}SAVEPOINT {self._mark}"
        self._execute(mark)
        self._is_marked = True
        self._note_beginning()

    def end(self) -> None:
        """Take the mark away. Raises EndedError where it is gone."""
        self._check_open()
        try:
            self._execute(f"RELEASE SAVEPOINT {self._mark}")
        except Exception as error:
            if _state_of(error) in (_IN_ERROR, *_TIMED_OUT):
                raise
            if self.fault(error) in (None, Fault.LOST):
                raise
            raise self._lost() from error

    def _lost(self) -> EndedError:
        # Nobody knows what else the program has done on the connection: it may have locked tables,
        # or begun another transaction.
        self.owner.lose()
        return _ended()

    def has_ended(self) -> bool:
        """Whether the mark was gone already, after an error of another kind. It is removed here."""
        if not self._is_marked:
            return False
        try:
            self.end()
        except EndedError:
            return True
        except Exception as error:
            # After an error, PostgreSQL refuses every statement: nothing more can be found out.
            if self.fault(error) is None:
                raise
        return False

    # ---- Running -------------------------------------------------------------------------------

    def run(self, execute: Callable[..., object], *args: Any, **options: Any) -> None:
        """Let `execute` run a statement; raises as `check` does."""
        if self.check():
            self._run_first(partial(self.call, execute, *args, **options))
        else:
            self.call(execute, *args, **options)
        self._note_beginning()

    def _execute(self, statement: str) -> None:
        self.call(self.call(self.driver.cursor, self.owner.raw).execute, statement)

    def _run_first(self, call: Callable[[], object]) -> None:
        """Run the first statement of the transaction: where it loses, the transaction may begin
        again, unnoticed, since nothing was done in it.

        Only on MariaDB and MySQL, where a savepoint alone does not begin a transaction.
        """
        for lost in range(_FIRST_TRIES - 1):
            try:
                call()
                return
            except Exception as error:
                if self.fault(error) is not Fault.ROLLED_BACK:
                    raise
            self.call(self.owner.raw.rollback)
            self._set_mark()
            self._wait(_FIRST_WAIT_S * 2**lost * CHANCE.uniform(0.5, 1.0))
        call()

    def _wait(self, seconds: float) -> None:
        if self._own is self.owner.raw:
            time.sleep(seconds)
        else:
            await_only(asyncio.sleep(seconds))

    def _lock_file(self) -> None:
        """Take SQLite's one write lock: from now on nobody else writes.

        Raises ContentionError where another connection has written since the transaction read.
        """
        is_idle = self.driver.is_idle(self._own)
        nothing = f"UPDATE {self._dialect.name} SET version = version WHERE false"
        cursor = self.call(self.driver.cursor, self.owner.raw)
        execute = partial(self.call, cursor.execute)
        execute("PRAGMA busy_timeout")
        [patience_ms] = cursor.fetchone()
        execute(f"PRAGMA busy_timeout = {sqlite_files.BUSY_TIMEOUT_S * 1000:.0f}")
        try:
            execute("BEGIN IMMEDIATE" if is_idle else nothing)
        except Exception as error:
            if is_idle or not sqlite_files.is_locked(error):
                raise
            raise ContentionError(
                "another connection has written to the file since this transaction read it"
            ) from error
        finally:
            if not self.owner.has_ended:
                execute(f"PRAGMA busy_timeout = {patience_ms}")

    # ---- Noticing the end ----------------------------------------------------------------------

    def check(self) -> bool:
        """Whether nothing was done in the transaction yet.

        Raises EndedError where it is over already, and ConfigError after the block was left.
        """
        if self.is_left:
            raise ConfigError("transaction: this inbox was left; use it inside its `with` block")
        is_idle = self._check_open()
        self.owner.prepare()
        return is_idle

    def _check_open(self) -> bool:
        """Whether nothing was done in the transaction yet. Raises EndedError where it is over."""
        if self.owner.has_ended:
            raise _ended()
        if self.driver.is_closed(self._own):
            raise self._lost()
        is_idle = bool(self.driver.is_idle(self._own))
        if is_idle and self._has_begun:
            raise self._lost()
        return is_idle

    def _note_beginning(self) -> None:
        self._has_begun = self._has_begun or not self.driver.is_idle(self._own)


def _state_of(error: Exception) -> str | None:
    """The code of an error of a driver of PostgreSQL."""
    state = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
    return state if is_driver_error(error) else None


def _ended() -> EndedError:
    return EndedError(
        "the transaction was ended inside the block that joined it: by a commit or rollback, by a "
        "statement that commits implicitly, or by the database, as the victim of a deadlock; "
        "leave its end to the code that began it, and let the database's errors leave the block"
    )


def _undone(why: str) -> EndedError:
    error = EndedError(why)
    error.is_undone = True
    return error


class _Cursor:
    """A cursor that takes the same statements as those of our own connections."""

    def __init__(self, link: _JoinedSqlConnection, cursor: Any) -> None:
        self._link = link
        self._cursor = cursor
        self.fetchone = cursor.fetchone
        self.fetchall = cursor.fetchall

    def execute(self, statement: str, parameters: Any = None, **options: Any) -> Self:
        adapted = self._link.driver.adapted
        if adapted is not None:
            (statement, parameters), options = adapted(statement, parameters), {}
        self._link.run(self._cursor.execute, statement, parameters, **options)
        return self

    def executemany(self, statement: str, rows: Sequence[Any]) -> None:
        for row in rows:
            self.execute(statement, row)

    def mogrify(self, statement: str, values: Mapping[str, Any]) -> str:
        """As PyMySQL's; other drivers of MariaDB and MySQL have none."""
        from pymysql.converters import encoders, escape_item

        escaped = {name: escape_item(value, "utf8mb4", encoders) for name, value in values.items()}
        return statement % escaped

    @property
    def rowcount(self) -> int:
        return int(self._cursor.rowcount)

    @property
    def lastrowid(self) -> int | None:
        return cast(int | None, self._cursor.lastrowid)

    def __iter__(self) -> Iterator[Sequence[Any]]:
        return iter(self._cursor)
