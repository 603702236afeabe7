"""SQLite: one file, one writer at a time; each batch is one statement over JSON."""

import json
import re
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache, partial
from typing import Any, cast

from sqlalchemy import Connection, Engine, Table

from oncely._util import sqlite_files
from oncely._util.forking import pause_at_forks
from oncely.core.cases import Case, Row
from oncely.core.record import Key
from oncely.stores.sql.dialect import Dialect, Fault, SqlConnection, key_of, roll_back
from oncely.stores.sql.record_rows import (
    INSERTED,
    LOADED,
    UPDATED,
    WAITING,
    Columns,
    believed,
    columns_of,
)
from oncely.stores.sql.table import SqlTables
from oncely.stores.store import Believed, Clock

_Build = Callable[..., str]
"""Builds a statement from the columns that differ from row to row."""
_KEYS = (
    "(SELECT json_extract(value, '$[0]') AS message_id, json_extract(value, '$[1]') AS provider"
    " FROM json_each(%(keys)s)) AS k"
)

_FORK_PATIENCE_S = 5.0
"""How long a fork waits for a writer, which may wait for a transaction of the forking thread."""


class Sqlite(Dialect):
    """One file. A statement does not tell which rows it has written: where not all are, they are
    looked up.
    """

    clock = "((julianday('now') - 2440587.5) * 86400.0)"
    # The same throughout a statement. A statement that writes reads it under the lock: waiting for
    # that may have taken longer than a lease.
    moment = f"coalesce(:now, {clock})"
    position = "instr"
    always = "0.0"
    denied = "let the user of this process read and write the file and its folder"
    to_migrate = denied
    skip_locked = ""
    locked = ""
    batches_at_once = 1
    poll_s = 0.02

    def __init__(
        self, engine: Engine, tables: SqlTables, clock: Clock | None, **kind: bool
    ) -> None:
        super().__init__(engine, tables, clock, **kind)
        # One thread at a time asks for the file's one write lock.
        self._lock = threading.Lock()
        pause_at_forks(self)
        columns = ", ".join(self.loaded_text(name) for name in LOADED)
        if self.is_inside:
            columns += f", {self.moment}"
        self._load = (
            f"SELECT {columns} FROM {self.name}"
            " WHERE message_id = :message_id AND provider = :provider"
        )
        due_at = ":now + :delay_s"
        self._keep = (
            f"INSERT INTO {self.waiting_name}"
            f" ({', '.join(WAITING)}, created_at, updated_at, due_at, held_until)"
            f" VALUES ({', '.join(f':{name}' for name in WAITING)}, :now, :now, {due_at},"
            f" CASE WHEN :delay_s > 0 THEN {due_at} ELSE {self.always} END)"
        )

    def insert(self, link: SqlConnection, case: Case) -> set[Key]:
        if self._write(link, self._build_insert, columns_of(case)) == len(case.rows):
            return {*map(key_of, case.rows)}
        # No two inserts under one key have the same version: these are ours.
        return self._unchanged(link, [(key, version) for key, _, version, *_ in case.rows])

    def update(self, link: SqlConnection, case: Case) -> set[Key]:
        columns, rows = columns_of(case), case.rows
        if len(rows) == 1:
            is_written = self._write(link, self._build_update, columns)
            return {rows[0][0]} if is_written else set()
        with self._writing(link):
            self.run(link, "SAVEPOINT batch")
            if self._execute(link, self._build_update, columns).rowcount < len(rows):
                # An update does not tell which rows it has written: it is done again for these.
                self.run(link, "ROLLBACK TO batch")
                unchanged = self._unchanged(link, [row[:2] for row in rows])
                rows = [row for row in rows if row[0] in unchanged]
                if rows:
                    self._execute(link, self._build_update, columns_of(case._replace(rows=rows)))
            self.run(link, "RELEASE batch")
            return {row[0] for row in rows}

    def delete(self, link: SqlConnection, case: Case) -> set[Key]:
        with self._writing(link):
            found = self._unchanged(link, case.rows)
            self._execute(link, self._build_removal, believed(case.rows))
        return found

    def batches(self, rows: Sequence[Row]) -> Iterable[Sequence[Row]]:
        # One transaction, which is rolled back as a whole.
        return [rows] if rows else []

    def rows_of(
        self,
        link: SqlConnection,
        keys: Sequence[Key],
        *,
        locks: bool,  # noqa: ARG002 - a writer has the file's one lock.
    ) -> Iterable[Sequence[Any]]:
        cursor = link.connection.cursor()
        for consumer, message_id in keys:
            this = {"message_id": message_id, "provider": consumer, "now": self.now()}
            yield from cursor.execute(self._load, this)

    def size(self, connection: Connection) -> int | None:
        pages = "pragma_page_count(), pragma_page_size()"
        found = connection.exec_driver_sql(f"SELECT page_count * page_size FROM {pages}")
        return int(found.scalar_one())

    def grants(self, link: SqlConnection, needed: Sequence[tuple[str, Table]]) -> list[str]:
        if all(privilege == "SELECT" for privilege, _ in needed):
            return []
        try:
            # Of a file that cannot be written to, SQLite takes BEGIN IMMEDIATE for BEGIN.
            self.run(link, f"UPDATE {self.name} SET version = version WHERE false")
        except sqlite3.OperationalError as error:
            if (fault := self.fault(error)) is Fault.DENIED:
                return [self.denied]
            if fault is not Fault.NO_TABLE:
                raise
        return []

    def fault(self, error: Exception) -> Fault:
        if "no such table" in str(error) or "no such column" in str(error):
            return Fault.NO_TABLE
        if sqlite_files.is_denied(error, self._engine.url.database):
            return Fault.DENIED
        if isinstance(error, sqlite3.OperationalError):
            return Fault.UNAVAILABLE
        return Fault.OTHER

    def loaded_text(self, column: str, of: str = "") -> str:
        return f"{of}{column}"

    def keep(self, link: SqlConnection, rows: Sequence[Mapping[str, Any]], *, renews: bool) -> None:
        at = self.time(link)
        statement = f"{self._keep} {self.on_conflict(renews=renews)}"
        link.connection.cursor().executemany(statement, [{**row, "now": at} for row in rows])

    def later(self, seconds: str) -> str:
        return f"{self.moment} + {seconds}"

    def epoch_text(self, column: str) -> str:
        return column

    def of_keys(self, name: str) -> str:
        return (
            f"FROM {_KEYS} CROSS JOIN {name} AS d"
            " WHERE d.message_id = k.message_id AND d.provider = k.provider"
        )

    def removal(self, name: str) -> str:
        these = f"SELECT k.message_id, k.provider FROM {_KEYS}"
        return f"DELETE FROM {name} WHERE (message_id, provider) IN ({these})"

    def run(
        self, link: SqlConnection, statement: str, values: Mapping[str, Any] | None = None
    ) -> Any:
        return super().run(link, _spelled(statement), values)

    def prepare(self, connection: Any, _: object) -> None:
        sqlite_files.prepare(connection)
        # What is removed is overwritten: a file keeps its free pages, and nobody looks there.
        connection.execute("PRAGMA secure_delete = ON")
        # Random ids change the same pages again and again: fewer checkpoints save a fifth.
        connection.execute("PRAGMA wal_autocheckpoint = 8000")

    def pause(self) -> None:
        """Let nobody write through this while the process is forked: for SQLite in the child, the
        file would be locked for ever, by a thread that does not exist there.
        """
        self._is_paused = self._lock.acquire(timeout=_FORK_PATIENCE_S)

    def go_on(self) -> None:
        """After the fork, in the parent."""
        if self._is_paused:
            self._lock.release()

    def start_afresh(self) -> None:
        self._lock = threading.Lock()

    @contextmanager
    def transaction(self, connection: Connection) -> Iterator[None]:
        # The file's one write lock is taken at once, so work that needs no lock is done before.
        with self._lock:
            cursor = connection.connection.cursor()
            sqlite_files.when_free(cursor, partial(cursor.execute, "BEGIN IMMEDIATE"))
            try:
                yield
            except BaseException as error:
                roll_back(connection, error)
                raise
            cursor.execute("COMMIT")

    def _writing(self, link: SqlConnection) -> AbstractContextManager[None]:
        return nullcontext() if self.is_inside else self.transaction(cast(Connection, link))

    def _write(self, link: SqlConnection, build: _Build, rows: Columns) -> int:
        """How many rows one statement has written, which outside a transaction commits by itself:
        then the time is asked for again each time that it finds the file locked.
        """
        if self.is_inside:
            return self._execute(link, build, rows).rowcount
        with self._lock:
            write = partial(self._execute, link, build, rows)
            # A cursor of its own: the row count is that of the last statement of a cursor.
            return sqlite_files.when_free(link.connection.cursor(), write).rowcount

    def _unchanged(self, link: SqlConnection, rows: Sequence[Believed]) -> set[Key]:
        """The keys of records that the table has in the same version."""
        return {Key(*row) for row in self._execute(link, self._build_find, believed(rows))}

    def _execute(self, link: SqlConnection, build: _Build, rows: Columns) -> sqlite3.Cursor:
        varying, constant = rows
        values: dict[str, Any] = {**constant, "now": self.now()}
        columns = [*varying.values()]
        if columns:
            given = columns[0] if len(columns) == 1 else [*zip(*columns, strict=True)]
            values["rows"] = json.dumps(given, ensure_ascii=False)
        cursor: sqlite3.Cursor = link.connection.cursor()
        return cursor.execute(self._text(build, tuple(varying), tuple(constant)), values)

    # ---- Statements ----------------------------------------------------------------------------

    def _build_insert(self, varying: tuple[str, ...], _: tuple[str, ...]) -> str:
        given = ", ".join(_value(name, varying) for name in INSERTED)
        lease_until = f"{_value('lease_s', varying)} + {self.moment}"
        return (
            f"INSERT INTO {self.name} ({', '.join(INSERTED)},"
            " lease_until, first_processed_at, last_processed_at)"
            f" SELECT {given}, {lease_until}, {self.moment}, {self.moment}"
            f"{_rows(varying)} WHERE true ON CONFLICT DO NOTHING"
        )

    def _build_update(self, varying: tuple[str, ...], constant: tuple[str, ...]) -> str:
        given = {*varying, *constant}
        value = {name: _value(name, varying) for name in UPDATED if name in given}
        if "lease_s" in given:
            value["lease_until"] = f"{_value('lease_s', varying)} + {self.moment}"
        value["last_processed_at"] = self.moment
        if not varying:
            written = ", ".join(f"{name} = {of}" for name, of in value.items())
            return f"UPDATE {self.name} AS t SET {written} {_unchanged(varying)}"
        # An insert that meets each row: SQLite chooses the order of an UPDATE that joins the batch.
        # With statistics from when the table was small, it would read the whole table.
        # Also what stays: a table that another program has made may have no defaults.
        names = (*INSERTED, "exhausted", "duplicates", "first_processed_at")
        kept = [name for name in names if name not in value]
        return (
            f"INSERT INTO {self.name} ({', '.join((*value, *kept))})"
            f" SELECT {', '.join((*value.values(), *(f't.{name}' for name in kept)))}"
            f"{self._joined(varying)} {_unchanged(varying)}"
            " ON CONFLICT (message_id, provider) DO UPDATE SET"
            f" {', '.join(f'{name} = excluded.{name}' for name in value)}"
        )

    def _build_removal(self, varying: tuple[str, ...], _: tuple[str, ...]) -> str:
        found = f"SELECT t.id{self._joined(varying)} {_unchanged(varying)}"
        return f"DELETE FROM {self.name} WHERE id IN ({found})"

    def _build_find(self, varying: tuple[str, ...], _: tuple[str, ...]) -> str:
        return f"SELECT t.provider, t.message_id{self._joined(varying)} {_unchanged(varying)}"

    def _joined(self, varying: tuple[str, ...]) -> str:
        # The rows first, then the table by its key, so that no other rows are read.
        return (
            f"{_rows(varying)} CROSS JOIN {self.name} AS t"
            if varying
            else f" FROM {self.name} AS t"
        )


def _rows(varying: tuple[str, ...]) -> str:
    """Where the rows of a batch come from, of which these columns differ."""
    return " FROM json_each(:rows) AS k" if varying else ""


def _value(name: str, varying: tuple[str, ...]) -> str:
    """A column of the batch."""
    if name not in varying:
        return f":{name}"
    return "k.value" if len(varying) == 1 else f"json_extract(k.value, '$[{varying.index(name)}]')"


def _unchanged(varying: tuple[str, ...]) -> str:
    key = " AND ".join(f"t.{name} = {_value(name, varying)}" for name in ("message_id", "provider"))
    return f"WHERE {key} AND t.version = {_value('believed', varying)}"


@lru_cache
def _spelled(statement: str) -> str:
    """A statement with its parameters written as SQLite expects them."""
    return re.sub(r"%\((\w+)\)s", r":\1", statement)
