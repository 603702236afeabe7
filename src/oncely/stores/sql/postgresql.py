"""PostgreSQL through psycopg: each batch is one statement over arrays, and commits by itself."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import psycopg
from sqlalchemy import ColumnElement, Connection, Engine, Select, Table, literal_column, select

from oncely.core.record import Key, Record
from oncely.stores.sql.batches import split
from oncely.stores.sql.database import Database, Fault, in_transaction, raw_cursor
from oncely.stores.sql.rows import (
    LOADED,
    TIMES,
    Columns,
    Pair,
    believed,
    inserted,
    key_columns,
    swapped,
)

SETTINGS = (
    # Statements here look rows up by their key, in batches. On a table that was never analysed the
    # planner would rather read all of it for each batch; prepared once, with these, it does not.
    "-c plan_cache_mode=force_generic_plan",
    "-c random_page_cost=0.1",
    "-c enable_hashjoin=off",
    "-c enable_mergejoin=off",
    "-c jit=off",
)
"""What sessions are opened with."""

_TYPES = {
    "message_id": "text",
    "provider": "text",
    "status": "text",
    "attempts": "int4",
    "metadata": "text",
    "fence": "int8",
    "version": "int8",
    "lease_s": "float8",
    "fingerprint": "text",
    "result": "text",
    "exhausted": "bool",
    "duplicates": "int8",
    "believed": "int8",
}
_LEASE_END = "now + lease_s * interval '1 second'"
_THIS = "WHERE t.message_id = k.message_id AND t.provider = k.provider"
_UNCHANGED = f"{_THIS} AND t.version = k.believed"

_ROLLED_BACK = ("40001", "40P01")
_NO_TABLE = ("42P01", "42703", "3F000")
_READ_ONLY = "25006"
"""As a server is that was failed over to, or from."""
_SHUT_DOWN = ("57P01", "57P02", "57P03", "57P05")


class Postgresql(Database):
    """One table. Rows are written in the order of their keys, so that no two writers deadlock."""

    clock = "extract(epoch FROM clock_timestamp())::float8"
    position = "strpos"

    def __init__(self, engine: Engine, table: Table) -> None:
        super().__init__(engine, table)
        # A batch has one of few shapes: which columns differ from row to row.
        self._insert_text = lru_cache(self._build_insert)
        self._swap_text = lru_cache(self._build_swap)
        self._removal_text = lru_cache(self._build_removal)
        self._load_text = lru_cache(self._build_load)

    def insert(
        self, connection: Connection, records: Sequence[Record], now: float | None
    ) -> set[Key]:
        cursor = _executed(connection, self._insert_text, inserted(records), now)
        return _written(cursor, records)

    def swap(self, connection: Connection, pairs: Sequence[Pair], now: float | None) -> set[Key]:
        cursor = _executed(connection, self._swap_text, swapped(pairs), now)
        return _written(cursor, [old for old, _ in pairs])

    def remove(self, connection: Connection, records: Sequence[Record]) -> set[Key]:
        return _written(_executed(connection, self._removal_text, believed(records)), records)

    def rows_of(self, connection: Connection, keys: Sequence[Key]) -> Iterable[Sequence[Any]]:
        return _executed(connection, self._load_text, key_columns(keys)).fetchall()

    def purge(self, connection: Connection, condition: ColumnElement[bool], limit: int) -> int:
        # Rows that another cleaner, or a worker, is at are left to them.
        chosen: Select[Any] = (
            select(literal_column("ctid"))
            .select_from(self.table)
            .where(condition)
            .limit(limit)
            .with_for_update(skip_locked=True)
        )
        compiled = chosen.compile(connection, compile_kwargs={"render_postcompile": True})
        removed = connection.exec_driver_sql(
            f"DELETE FROM {self.name} WHERE ctid = ANY (ARRAY ({compiled}))",
            dict(compiled.params),
        )
        return removed.rowcount

    @contextmanager
    def migrating(self, connection: Connection) -> Iterator[None]:
        with in_transaction(connection):
            lock = f"SELECT pg_advisory_xact_lock(hashtext('oncely'), hashtext('{self.name}'))"
            connection.exec_driver_sql(lock)
            yield

    def size(self, connection: Connection) -> int | None:
        found = connection.exec_driver_sql(f"SELECT pg_total_relation_size('{self.name}')")
        return int(found.scalar_one())

    def fault(self, error: Exception) -> Fault:
        state = getattr(error, "sqlstate", None) or ""
        if state in _ROLLED_BACK:
            return Fault.ROLLED_BACK
        if state in _NO_TABLE:
            return Fault.NO_TABLE
        if state in _SHUT_DOWN or state.startswith("08"):
            return Fault.LOST
        if not state and isinstance(error, psycopg.OperationalError | psycopg.InterfaceError):
            return Fault.LOST
        is_away = state == _READ_ONLY or isinstance(error, psycopg.OperationalError)
        return Fault.UNAVAILABLE if is_away else Fault.OTHER

    def loaded_text(self, column: str, of: str = "") -> str:
        if column in TIMES:
            return f"extract(epoch FROM {of}{column})::float8"
        return f"{of}metadata::text" if column == "metadata" else f"{of}{column}"

    # ---- Statements ----------------------------------------------------------------------------

    def _build_insert(self, varying: tuple[str, ...], constant: tuple[str, ...]) -> str:
        plain = ("message_id", "provider", "status", "attempts", "fence", "version", "fingerprint")
        return (
            f"INSERT INTO {self.name} ({', '.join(plain)}, metadata, lease_until,"
            " first_processed_at, last_processed_at)"
            f" SELECT {', '.join(plain)}, metadata::jsonb, {_LEASE_END}, now, now"
            f" FROM {_rows(varying, constant)}"
            " ON CONFLICT DO NOTHING RETURNING provider, message_id"
        )

    def _build_swap(self, varying: tuple[str, ...], constant: tuple[str, ...]) -> str:
        plain = ("status", "attempts", "fence", "version", "fingerprint", "result")
        written = (*plain, "exhausted", "duplicates")
        return (
            f"UPDATE {self.name} AS t SET {', '.join(f'{name} = k.{name}' for name in written)},"
            f" metadata = k.metadata::jsonb, lease_until = {_LEASE_END}, last_processed_at = now"
            f" FROM {_rows(varying, constant)} {_UNCHANGED} RETURNING t.provider, t.message_id"
        )

    def _build_removal(self, varying: tuple[str, ...], constant: tuple[str, ...]) -> str:
        return (
            f"DELETE FROM {self.name} AS t USING {_rows(varying, constant)}"
            f" {_UNCHANGED} RETURNING t.provider, t.message_id"
        )

    def _build_load(self, varying: tuple[str, ...], constant: tuple[str, ...]) -> str:
        columns = ", ".join(self.loaded_text(name, "t.") for name in LOADED)
        return f"SELECT {columns} FROM {_rows(varying, constant)}, {self.name} AS t {_THIS}"


def _rows(varying: tuple[str, ...], constant: tuple[str, ...]) -> str:
    """The table `k` of the batch: a row for each record, with its values and the time."""
    arrays = ", ".join(f"%({name})b::{_TYPES[name]}[]" for name in varying)
    now = "coalesce(to_timestamp(%(now)s::float8), clock_timestamp()) AS now"
    singles = [f"%({name})b::{_TYPES[name]} AS {name}" for name in constant]
    source = f" FROM unnest({arrays}) AS u ({', '.join(varying)})" if varying else ""
    # The offset keeps the planner from taking `k` apart: compared with constants, rows of the
    # table would seem to it to be found in a shorter way than by their key.
    return f"(SELECT {', '.join((*varying, *singles, now))}{source} OFFSET 0) AS k"


def _executed(
    connection: Connection,
    build: Callable[[tuple[str, ...], tuple[str, ...]], str],
    columns: Columns,
    now: float | None = None,
) -> "psycopg.Cursor[tuple[Any, ...]]":
    """A cursor that has executed the statement for these rows."""
    varying, constant = split(columns)
    parameters = {**varying, **constant, "now": now}
    cursor: psycopg.Cursor[tuple[Any, ...]] = raw_cursor(connection)
    cursor.execute(build(tuple(varying), tuple(constant)), parameters, prepare=True, binary=True)
    return cursor


def _written(cursor: "psycopg.Cursor[tuple[Any, ...]]", records: Sequence[Record]) -> set[Key]:
    """The keys that a statement returns, of those that it was given."""
    if cursor.rowcount == len(records):
        # As nearly always: what comes back need not be read.
        return {record.key for record in records}
    return {Key(*row) for row in cursor.fetchall()}
