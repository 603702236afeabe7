"""SQLite: one file, one writer at a time, rows written one by one."""

import json
import re
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import Any, TypeVar, cast

from sqlalchemy import Connection, Engine

from oncely import sqlite_files
from oncely.core.record import Key, Record
from oncely.stores.sql.database import Database, Fault, Link, raw_cursor, roll_back
from oncely.stores.sql.rows import (
    DEFERRED,
    LOADED,
    Pair,
    Rows,
    believed,
    inserted,
    sought,
    swapped,
)
from oncely.stores.sql.table import Tables

T = TypeVar("T")

_KEYS = (
    "(SELECT json_extract(value, '$[0]') AS message_id, json_extract(value, '$[1]') AS provider"
    " FROM json_each(%(keys)s)) AS k"
)


class Sqlite(Database):
    """One file. To write row by row costs no round trip, and tells which were written."""

    clock = "((julianday('now') - 2440587.5) * 86400.0)"
    position = "instr"
    always = "0.0"
    skip_locked = ""

    def __init__(self, engine: Engine, tables: Tables, *, is_inside: bool = False) -> None:
        super().__init__(engine, tables, is_inside=is_inside)
        # One thread at a time asks for the file's one write lock.
        self._lock = threading.Lock()
        columns = ", ".join(self.loaded_text(name) for name in LOADED)
        if is_inside:
            columns += f", {_spelled(self.moment)}"
        this = "message_id = :message_id AND provider = :provider"
        self._load = f"SELECT {columns} FROM {self.name} WHERE {this}"
        self._remove = f"DELETE FROM {self.name} WHERE {this} AND version = :believed"
        plain = ("message_id", "provider", "status", "attempts", "metadata", "fence", "version")
        given = (*plain, "fingerprint")
        self._insert = (
            f"INSERT INTO {self.name} ({', '.join(given)},"
            " lease_until, first_processed_at, last_processed_at)"
            f" VALUES ({', '.join(f':{name}' for name in given)}, :lease_s + :now, :now, :now)"
            " ON CONFLICT DO NOTHING"
        )
        written = (*plain[2:], "fingerprint", "result", "exhausted", "duplicates")
        self._swap = (
            f"UPDATE {self.name} SET {', '.join(f'{name} = :{name}' for name in written)},"
            " lease_until = :lease_s + :now, last_processed_at = :now"
            f" WHERE {this} AND version = :believed"
        )

        due_at = ":now + :delay_s"
        self._defer = (
            f"INSERT INTO {self.deferred_name}"
            f" ({', '.join(DEFERRED)}, created_at, due_at, held_until)"
            f" VALUES ({', '.join(f':{name}' for name in DEFERRED)}, :now, {due_at},"
            f" CASE WHEN :delay_s > 0 THEN {due_at} ELSE {self.always} END) ON CONFLICT DO NOTHING"
        )

    def insert(self, link: Link, records: Sequence[Record], now: float | None) -> set[Key]:
        rows = _named(inserted(records))
        with self._writing(link):
            # Asked for now: to wait for the lock may have taken longer than a lease.
            return _write_each(link, self._insert, rows, records, self.now(link, now))

    def swap(self, link: Link, pairs: Sequence[Pair], now: float | None) -> set[Key]:
        rows, olds = _named(swapped(pairs)), [old for old, _ in pairs]
        with self._writing(link):
            return _write_each(link, self._swap, rows, olds, self.now(link, now))

    def remove(self, link: Link, records: Sequence[Record]) -> set[Key]:
        rows = _named(believed(records))
        with self._writing(link):
            return _write_each(link, self._remove, rows, records)

    def batches(self, items: Sequence[T]) -> Iterable[Sequence[T]]:
        # One transaction: it is undone as a whole.
        return [items] if items else []

    def rows_of(
        self, link: Link, keys: Sequence[Key], now: float | None
    ) -> Iterable[Sequence[Any]]:
        cursor = raw_cursor(link)
        for this in _named(sought(keys)):
            yield from cursor.execute(self._load, {**this, "now": now})

    @contextmanager
    def migrating(self, connection: Connection) -> Iterator[None]:
        with self.transaction(connection):
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

    def defer(self, link: Link, rows: Sequence[Mapping[str, Any]], now: float | None) -> None:
        at = self.now(link, now)
        raw_cursor(link).executemany(self._defer, [{**row, "now": at} for row in rows])

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

    @property
    def steps_removal(self) -> str:
        these = f"SELECT k.message_id, k.provider FROM {_KEYS}"
        return f"DELETE FROM {self.steps_name} WHERE (message_id, provider) IN ({these})"

    def key_values(self, keys: Sequence[Key]) -> Mapping[str, Any]:
        return {"keys": json.dumps([[key.message_id, key.consumer] for key in keys])}

    def run(self, link: Link, statement: str, values: Mapping[str, Any] | None = None) -> Any:
        return super().run(link, _spelled(statement), values)

    def prepare(self, connection: Any, _: object) -> None:
        sqlite_files.prepare(connection)
        # Random ids touch most pages again and again: to copy them back less often saves a fifth.
        connection.execute("PRAGMA wal_autocheckpoint = 8000")
        connection.execute("PRAGMA cache_size = -65536")

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

    def _writing(self, link: Link) -> AbstractContextManager[None]:
        """A transaction; the one that is open, where one is."""
        return nullcontext() if self.is_inside else self.transaction(cast(Connection, link))


@lru_cache
def _spelled(statement: str) -> str:
    """A statement with its parameters as SQLite has them."""
    return re.sub(r"%\((\w+)\)s", r":\1", statement)


def _named(rows: Rows) -> list[dict[str, Any]]:
    """The parameters for each row."""
    return [dict(zip(rows.names, row, strict=True)) for row in rows.values]


def _write_each(
    link: Link,
    statement: str,
    rows: Sequence[dict[str, Any]],
    records: Sequence[Record],
    now: float | None = None,
) -> set[Key]:
    cursor = raw_cursor(link)
    written = set()
    for row, record in zip(rows, records, strict=True):
        row["now"] = now
        if cursor.execute(statement, row).rowcount:
            written.add(record.key)
    return written
