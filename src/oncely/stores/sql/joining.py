"""Joining: the ledger inside a transaction that its owner begins and ends."""

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from functools import lru_cache, partial
from itertools import count
from typing import Any, Self, cast

from sqlalchemy.util import await_only

from oncely import sqlite_files
from oncely.core.errors import ConfigError, ContentionError, EndedError
from oncely.stores.base import Clock
from oncely.stores.sql.database import Database, Fault
from oncely.stores.sql.drivers import Driver, driver_of, is_driver_error, own_connection
from oncely.stores.sql.foreign import Foreign, foreign
from oncely.stores.sql.inside import SqlInside

_FIRST_TRIES = 6
"""How often the first statement of a transaction may lose against others."""
_FIRST_WAIT_S = 0.02

_marks = count()

Translate = Callable[[Exception, Fault], Exception]
"""The error that the Store protocol promises, for one of a driver and what it means."""


class Joining:
    """As `Store.within` says; `kind` is that of the database."""

    def __init__(
        self,
        connection: Any,
        database: Database,
        kind: str,
        clock: Clock | None,
        translate: Translate,
    ) -> None:
        self._connection = connection
        self._database = database
        self._kind = kind
        self._clock = clock
        self._translate = translate

    def __enter__(self) -> "_JoinedInside":
        transaction = foreign(self._connection)
        try:
            driver = _driver_for(transaction.raw)
            if driver.kind != self._kind:
                raise ConfigError(
                    f"transaction: this is a connection to {driver.kind}, and the ledger is in"
                    f" {self._kind}; open the ledger on the same database, as in"
                    " open_ledger(engine)"
                )
            self._link = _ForeignLink(transaction, driver, self._database)
            self._inside = _JoinedInside(self._link, self._database, self._clock, self._translate)
        except BaseException:
            transaction.leave()
            raise
        return self._inside

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        try:
            if error is None:
                self._inside.check_end()
        finally:
            self._link.is_left = True
            self._link.transaction.leave()


def kind_of(connection: Any) -> str:
    """The kind of database that `connection` is to. Raises ConfigError as joining it does."""
    transaction = foreign(connection)
    try:
        return _driver_for(transaction.raw).kind
    finally:
        transaction.leave()


def _driver_for(raw: Any) -> Driver:
    driver = driver_of(raw)
    if driver is None:
        name = type(own_connection(raw)).__module__.partition(".")[0]
        raise ConfigError(f"transaction: the driver {name} is not known; connect with another")
    return driver


class _JoinedInside(SqlInside):
    """Inside a transaction that is somebody else's."""

    def __init__(
        self, link: "_ForeignLink", database: Database, clock: Clock | None, translate: Translate
    ) -> None:
        def translated(error: Exception) -> Exception:
            fault = link.fault(error)
            if fault is Fault.LOST:
                link.transaction.lose()
            return error if fault is None else translate(error, fault)

        super().__init__(database, link, clock, translated)
        self._joined = link
        self.is_guarded = link.transaction.is_guarded
        if link.driver.kind == "sqlite":
            with self._translated:
                link.lock_file()

    def watch(self, on_savepoint: Callable[[], None], on_undo: Callable[[], None]) -> None:
        self._joined.transaction.on_savepoint = on_savepoint
        self._joined.transaction.on_undo = on_undo

    def check(self) -> None:
        self._joined.check()

    def check_call(self) -> None:
        pass  # Each statement is checked.

    def check_end(self) -> None:
        """Raise EndedError where the transaction is over, whether that is easily seen or not."""
        if self.error is not None:
            raise EndedError(f"the transaction is over: {self.error}") from self.error
        self._joined.check_end()


class _ForeignLink:
    """The Link to a transaction that is somebody else's."""

    is_left = False
    """Whether it is joined no more."""

    def __init__(self, transaction: Foreign, driver: Driver, database: Database) -> None:
        self.transaction = transaction
        self.driver = driver
        self._database = database
        self._own = own_connection(transaction.raw)
        self._has_begun = False
        """Whether the transaction was seen to have begun."""
        self._mark: str | None = None

    @property
    def connection(self) -> Self:
        return self

    @property
    def info(self) -> MutableMapping[Any, Any]:
        """Of MariaDB and MySQL; asked for where a statement is long."""
        [value] = self.cursor().execute("SELECT @@max_allowed_packet").fetchone()
        return {"max_allowed_packet": value}

    def cursor(self) -> "_Cursor":
        return _Cursor(self, self.driver.cursor(self.transaction.raw))

    def fault(self, error: Exception) -> Fault | None:
        """What an error means; None where it is not the driver's."""
        return self._database.fault(error) if is_driver_error(error) else None

    # ---- Running -------------------------------------------------------------------------------

    def run(self, execute: Callable[..., object], *args: Any, **options: Any) -> None:
        """Let `execute` run a statement; raises as `check` does."""
        if self.check():
            self._run_first(partial(execute, *args, **options))
        else:
            execute(*args, **options)
        if not self._has_begun:
            self._note_beginning()

    def begin_with(self, statement: str, parameters: Any) -> int | None:
        """Execute the first statement of the transaction together with its beginning; how many
        rows it wrote. None where that cannot be, and nothing is done.
        """
        begin_with = self.driver.begin_with
        if begin_with is None or not _is_plain_write(statement) or not self.check():
            return None
        written = begin_with(self._own, statement, parameters)
        if written is not None:
            self._note_beginning()
        return written

    def _run_first(self, call: Callable[[], object]) -> None:
        """Nothing is done in the transaction yet: where it loses, it may quietly begin again."""
        for lost in range(_FIRST_TRIES - 1):
            try:
                call()
                return
            except Exception as error:
                if self.fault(error) is not Fault.ROLLED_BACK:
                    raise
            self.transaction.raw.rollback()
            self._wait(_FIRST_WAIT_S * 2**lost * random.uniform(0.5, 1.0))  # noqa: S311
        call()

    def _wait(self, seconds: float) -> None:
        if self._own is self.transaction.raw:
            time.sleep(seconds)
        else:
            await_only(asyncio.sleep(seconds))

    def lock_file(self) -> None:
        """Take SQLite's one write lock: from now on nobody else writes.

        Raises ContentionError where somebody has written since the transaction read.
        """
        is_idle = self.driver.is_idle(self._own)
        nothing = f"UPDATE {self._database.name} SET version = version WHERE false"
        cursor = self.driver.cursor(self.transaction.raw)
        cursor.execute("PRAGMA busy_timeout")
        [patience_ms] = cursor.fetchone()
        cursor.execute(f"PRAGMA busy_timeout = {sqlite_files.BUSY_TIMEOUT_S * 1000:.0f}")
        try:
            cursor.execute("BEGIN IMMEDIATE" if is_idle else nothing)
        except Exception as error:
            if is_idle or not sqlite_files.is_locked(error):
                raise
            raise ContentionError("others have written to the file since it was read") from error
        finally:
            cursor.execute(f"PRAGMA busy_timeout = {patience_ms}")
        self._note_beginning()

    # ---- Noticing the end ----------------------------------------------------------------------

    def check(self) -> bool:
        """Whether nothing was done in the transaction yet.

        Raises EndedError where it is over already, and ConfigError after it was joined.
        """
        if self.is_left:
            raise ConfigError("transaction: this inbox was left; ask it inside its `with` block")
        is_idle = self._check_open()
        self.transaction.prepare()
        return is_idle

    def check_end(self) -> None:
        """Raise EndedError where the transaction is over already, as far as that can be known."""
        self._check_open()
        if self._has_begun and self.driver.is_broken(self.transaction.raw):
            raise EndedError(
                "a statement has failed inside the block, after which the database stores nothing "
                "of the transaction: let its error leave the block, or use a savepoint"
            )
        if self._mark is not None:
            try:
                self.driver.cursor(self.transaction.raw).execute(f"RELEASE SAVEPOINT {self._mark}")
            except Exception as error:
                if not is_driver_error(error):
                    raise
                raise _ended() from error

    def _check_open(self) -> bool:
        is_idle = self.driver.is_idle(self._own)
        if self.transaction.has_ended or (is_idle and self._has_begun):
            raise _ended()
        return is_idle

    def _note_beginning(self) -> None:
        if self.driver.is_idle(self._own):
            return
        self._has_begun = True
        if not self.transaction.is_guarded:
            # A savepoint does not outlive its transaction, whoever ends that, and in whatever way.
            mark = f"oncely_{next(_marks)}"
            self.driver.cursor(self.transaction.raw).execute(f"SAVEPOINT {mark}")
            self._mark = mark


def _ended() -> EndedError:
    return EndedError(
        "the transaction was ended inside the block that joined it; leave that to whoever began it"
    )


@lru_cache
def _is_plain_write(statement: str) -> bool:
    return statement.startswith("INSERT ") and " RETURNING " not in statement


class _Cursor:
    """A cursor that takes what those of our own connections do."""

    def __init__(self, link: _ForeignLink, cursor: Any) -> None:
        self._link = link
        self._cursor = cursor
        self._written: int | None = None
        self.fetchone = cursor.fetchone
        self.fetchall = cursor.fetchall

    def execute(self, statement: str, parameters: Any = None, **options: Any) -> Self:
        self._written = self._link.begin_with(statement, parameters)
        if self._written is not None:
            return self
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
        return int(self._cursor.rowcount) if self._written is None else self._written

    @property
    def lastrowid(self) -> int | None:
        return cast(int | None, self._cursor.lastrowid)

    def __iter__(self) -> Iterator[Sequence[Any]]:
        return iter(self._cursor)
