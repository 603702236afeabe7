"""SQLite: one file, one writer at a time, rows written one by one."""

import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from sqlalchemy import ColumnElement, Connection, Engine, Table, delete, select

from oncely.core.record import Key, Record
from oncely.stores.sql.database import Database, Fault, raw_cursor
from oncely.stores.sql.rows import (
    LOADED,
    Pair,
    believed,
    inserted,
    swapped,
)

T = TypeVar("T")

BUSY_TIMEOUT_S = 30.0
"""How long to wait for another process that writes to the same file."""
_PATIENT = f"PRAGMA busy_timeout = {BUSY_TIMEOUT_S * 1000:.0f}"
_LOCKED = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
_RETRY_S = 0.001


class Sqlite(Database):
    """One file. To write row by row costs no round trip, and tells which were written."""

    clock = "((julianday('now') - 2440587.5) * 86400.0)"
    position = "instr"

    def __init__(self, engine: Engine, table: Table) -> None:
        super().__init__(engine, table)
        # One thread at a time asks for the file's one write lock.
        self._lock = threading.Lock()
        columns = ", ".join(self.loaded_text(name) for name in LOADED)
        this = "message_id = ?1 AND provider = ?2"
        self._load = f"SELECT {columns} FROM {self.name} WHERE {this}"
        self._remove = f"DELETE FROM {self.name} WHERE {this} AND version = ?3"
        self._insert = (
            f"INSERT INTO {self.name} (message_id, provider, status, attempts, metadata, fence,"
            " version, lease_until, fingerprint, first_processed_at, last_processed_at)"
            " VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8 + ?10, ?9, ?10, ?10) ON CONFLICT DO NOTHING"
        )
        self._swap = (
            f"UPDATE {self.name} SET status = ?4, attempts = ?5, metadata = ?6, fence = ?7,"
            " version = ?8, lease_until = ?9 + ?14, fingerprint = ?10, result = ?11,"
            " exhausted = ?12, duplicates = ?13, last_processed_at = ?14"
            f" WHERE {this} AND version = ?3"
        )

    def insert(
        self, connection: Connection, records: Sequence[Record], now: float | None
    ) -> set[Key]:
        columns = inserted(records).values()
        with self._writing(connection):
            # Asked for now: to wait for the lock may have taken longer than a lease.
            rows = _rows(columns, self.now(connection, now))
            return _write_each(connection, self._insert, rows, records)

    def swap(self, connection: Connection, pairs: Sequence[Pair], now: float | None) -> set[Key]:
        columns = swapped(pairs).values()
        with self._writing(connection):
            rows = _rows(columns, self.now(connection, now))
            return _write_each(connection, self._swap, rows, [old for old, _ in pairs])

    def remove(self, connection: Connection, records: Sequence[Record]) -> set[Key]:
        rows = list(zip(*believed(records).values(), strict=True))
        with self._writing(connection):
            return _write_each(connection, self._remove, rows, records)

    def batches(self, items: Sequence[T]) -> Iterable[Sequence[T]]:
        # One transaction: it is undone as a whole.
        return [items] if items else []

    def rows_of(self, connection: Connection, keys: Sequence[Key]) -> Iterable[Sequence[Any]]:
        cursor = raw_cursor(connection)
        for key in keys:
            yield from cursor.execute(self._load, (key.message_id, key.consumer))

    def purge(self, connection: Connection, condition: ColumnElement[bool], limit: int) -> int:
        id_ = self.table.c.id
        chosen = select(id_).where(condition).limit(limit)
        with self._writing(connection):
            return connection.execute(delete(self.table).where(id_.in_(chosen))).rowcount

    @contextmanager
    def migrating(self, connection: Connection) -> Iterator[None]:
        with self._writing(connection):
            yield

    def size(self, connection: Connection) -> int | None:
        pages = "pragma_page_count(), pragma_page_size()"
        found = connection.exec_driver_sql(f"SELECT page_count * page_size FROM {pages}")
        return int(found.scalar_one())

    def fault(self, error: Exception) -> Fault:
        if "no such table" in str(error) or "no such column" in str(error):
            return Fault.NO_TABLE
        if isinstance(error, sqlite3.OperationalError):
            return Fault.UNAVAILABLE
        return Fault.OTHER

    def loaded_text(self, column: str, of: str = "") -> str:
        return f"{of}{column}"

    def prepare(self, connection: Any, _: object) -> None:
        connection.isolation_level = None  # BEGIN IMMEDIATE is ours to say, and to wait for.
        connection.execute(_PATIENT)
        switch_to_wal(connection)
        # A commit that a power cut can undo would run its message twice.
        connection.execute("PRAGMA synchronous = FULL")
        # Random ids touch most pages again and again: to copy them back less often saves a fifth.
        connection.execute("PRAGMA wal_autocheckpoint = 8000")

    def start_afresh(self) -> None:
        self._lock = threading.Lock()

    @contextmanager
    def _writing(self, connection: Connection) -> Iterator[None]:
        """A transaction that holds the file's one write lock. What can be done before, is."""
        with self._lock:
            _begin(connection)
            try:
                yield
            except BaseException:
                # A full disk has ended the transaction already.
                if getattr(connection.connection.dbapi_connection, "in_transaction", False):
                    connection.exec_driver_sql("ROLLBACK")
                raise
            connection.exec_driver_sql("COMMIT")


def _rows(columns: Iterable[Sequence[Any]], now: float) -> list[tuple[Any, ...]]:
    return [(*row, now) for row in zip(*columns, strict=True)]


def _write_each(
    connection: Connection,
    statement: str,
    rows: Sequence[tuple[Any, ...]],
    records: Sequence[Record],
) -> set[Key]:
    cursor = raw_cursor(connection)
    written = set()
    for row, record in zip(rows, records, strict=True):
        if cursor.execute(statement, row).rowcount:
            written.add(record.key)
    return written


def _begin(connection: Connection) -> None:
    # SQLite's own busy timeout sleeps for up to a tenth of a second at a time, in which the
    # lock stands free; with two writers that halves the rate.
    deadline = time.monotonic() + BUSY_TIMEOUT_S
    cursor = raw_cursor(connection)
    cursor.execute("PRAGMA busy_timeout = 0")
    try:
        while True:
            try:
                cursor.execute("BEGIN IMMEDIATE")
                return
            except sqlite3.OperationalError as error:
                # The low byte: the rest says why it is locked, such as a recovery going on.
                if error.sqlite_errorcode & 0xFF not in _LOCKED or time.monotonic() > deadline:
                    raise
                time.sleep(_RETRY_S)
    finally:
        cursor.execute(_PATIENT)


def switch_to_wal(connection: Any, patience_s: float = BUSY_TIMEOUT_S) -> None:
    """Set WAL mode, which stays with the file. Raises OperationalError where it stays locked."""
    # The switch needs the file for itself, and SQLite does not apply the busy timeout to it.
    deadline = time.monotonic() + patience_s
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
