"""SQLite: one file, one writer at a time, rows written one by one."""

import re
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from typing import Any, TypeVar, cast

from sqlalchemy import Connection, Engine

from oncely._util import sqlite_files
from oncely._util.forking import pause_at_forks
from oncely.core.record import Key, Record
from oncely.stores.sql.database import Database, Fault, Link, raw_cursor, roll_back
from oncely.stores.sql.record_rows import (
    INSERTED,
    LOADED,
    SWAPPED,
    WAITING,
    Pair,
    RowValues,
    believed,
    inserted,
    sought,
    swapped,
)
from oncely.stores.sql.table import SqlTables
from oncely.stores.store import Clock

T = TypeVar("T")

_KEYS = (
    "(SELECT json_extract(value, '$[0]') AS message_id, json_extract(value, '$[1]') AS provider"
    " FROM json_each(%(keys)s)) AS k"
)

_FORK_PATIENCE_S = 5.0
"""How long a fork waits for a writer, who may wait for a transaction of the thread that forks."""


class Sqlite(Database):
    """One file. To write row by row costs no round trip, and tells which were written."""

    clock = "((julianday('now') - 2440587.5) * 86400.0)"
    position = "instr"
    always = "0.0"
    skip_locked = ""
    locked = ""
    look_s = 0.02

    def __init__(
        self, engine: Engine, tables: SqlTables, clock: Clock | None, **kind: bool
    ) -> None:
        super().__init__(engine, tables, clock, **kind)
        # One thread at a time asks for the file's one write lock.
        self._lock = threading.Lock()
        pause_at_forks(self)
        columns = ", ".join(self.loaded_text(name) for name in LOADED)
        if self.is_inside:
            columns += f", {_spelled(self.moment)}"
        this = "message_id = :message_id AND provider = :provider"
        self._load = f"SELECT {columns} FROM {self.name} WHERE {this}"
        self._remove = f"DELETE FROM {self.name} WHERE {this} AND version = :believed"
        self._insert = (
            f"INSERT INTO {self.name} ({', '.join(INSERTED)},"
            " lease_until, first_processed_at, last_processed_at)"
            f" VALUES ({', '.join(f':{name}' for name in INSERTED)}, :lease_s + :now, :now, :now)"
            " ON CONFLICT DO NOTHING"
        )
        self._swap = (
            f"UPDATE {self.name} SET {', '.join(f'{name} = :{name}' for name in SWAPPED)},"
            " lease_until = :lease_s + :now, last_processed_at = :now"
            f" WHERE {this} AND version = :believed"
        )

        due_at = ":now + :delay_s"
        self._keep = (
            f"INSERT INTO {self.waiting_name}"
            f" ({', '.join(WAITING)}, created_at, updated_at, due_at, held_until)"
            f" VALUES ({', '.join(f':{name}' for name in WAITING)}, :now, :now, {due_at},"
            f" CASE WHEN :delay_s > 0 THEN {due_at} ELSE {self.always} END)"
        )

    def insert(self, link: Link, records: Sequence[Record]) -> set[Key]:
        return self._write(link, self._insert, inserted(records), records)

    def swap(self, link: Link, pairs: Sequence[Pair]) -> set[Key]:
        return self._write(link, self._swap, swapped(pairs), [old for old, _ in pairs])

    def remove(self, link: Link, records: Sequence[Record]) -> set[Key]:
        return self._write(link, self._remove, believed(records), records)

    def batches(self, items: Sequence[T]) -> Iterable[Sequence[T]]:
        # One transaction: it is undone as a whole.
        return [items] if items else []

    def rows_of(
        self,
        link: Link,
        keys: Sequence[Key],
        *,
        locks: bool,  # noqa: ARG002 - who writes has the file's one lock.
    ) -> Iterable[Sequence[Any]]:
        cursor = raw_cursor(link)
        for this in _named(sought(keys)):
            yield from cursor.execute(self._load, {**this, "now": self.now})

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

    def keep(self, link: Link, rows: Sequence[Mapping[str, Any]], *, renews: bool) -> None:
        at = self.time(link)
        statement = f"{self._keep} {self.on_conflict(renews=renews)}"
        raw_cursor(link).executemany(statement, [{**row, "now": at} for row in rows])

    @property
    def moment(self) -> str:
        return f"coalesce(%(now)s, {self.clock})"

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

    def run(self, link: Link, statement: str, values: Mapping[str, Any] | None = None) -> Any:
        return super().run(link, _spelled(statement), values)

    def prepare(self, connection: Any, _: object) -> None:
        sqlite_files.prepare(connection)
        # Random ids touch most pages again and again: to copy them back less often saves a fifth.
        connection.execute("PRAGMA wal_autocheckpoint = 8000")
        connection.execute("PRAGMA cache_size = -65536")

    def pause(self) -> None:
        """Let nobody write through this while the process is forked: SQLite in the child would take
        the file for locked by that thread, which is not there, for ever.
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
        # The file's one write lock is taken at once. What can be done before, is.
        with self._lock:
            sqlite_files.begin(raw_cursor(connection))
            try:
                yield
            except BaseException as error:
                roll_back(connection, error)
                raise
            raw_cursor(connection).execute("COMMIT")

    def _write(
        self, link: Link, statement: str, rows: RowValues, records: Sequence[Record]
    ) -> set[Key]:
        """Run a statement for the row of each record; the keys of those that it has written."""
        named = _named(rows)
        written = set()
        with nullcontext() if self.is_inside else self.transaction(cast(Connection, link)):
            # Asked for now: to wait for the lock may have taken longer than a lease.
            now = self.time(link)
            cursor = raw_cursor(link)
            for row, record in zip(named, records, strict=True):
                if cursor.execute(statement, {**row, "now": now}).rowcount:
                    written.add(record.key)
        return written


@lru_cache
def _spelled(statement: str) -> str:
    """A statement with its parameters as SQLite has them."""
    return re.sub(r"%\((\w+)\)s", r":\1", statement)


def _named(rows: RowValues) -> list[dict[str, Any]]:
    """The parameters for each row."""
    return [dict(zip(rows.names, row, strict=True)) for row in rows.values]
