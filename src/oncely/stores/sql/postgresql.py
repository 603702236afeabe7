"""PostgreSQL through psycopg: each batch is one statement over arrays, and commits by itself."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import psycopg
from sqlalchemy import ColumnElement, Connection, Engine, Select, literal_column, select

from oncely.core.record import Key, Record
from oncely.stores.sql.batches import split
from oncely.stores.sql.database import Database, Fault, Link, in_transaction, raw_cursor
from oncely.stores.sql.rows import (
    DEFERRED,
    LOADED,
    TIMES,
    Pair,
    Rows,
    believed,
    deferred,
    inserted,
    sought,
    swapped,
)
from oncely.stores.sql.table import Tables

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
    "name": "text",
    "position": "int4",
    "destination": "text",
    "deferred_id": "text",
    "type": "text",
    "body": "bytea",
    "headers": "text",
    "source": "text",
    "sent_at": "text",
    "content_type": "text",
    "ordering_key": "text",
    "delay_s": "float8",
    "lane": "text",
}
_NOW = "coalesce(to_timestamp(%(now)s::float8), clock_timestamp())"
_LEASE_END = "now + lease_s * interval '1 second'"
_KEYS = "unnest(%(message_ids)s::text[], %(providers)s::text[]) AS k (message_id, provider)"
_OF_KEY = "WHERE d.message_id = k.message_id AND d.provider = k.provider"
_THIS = "WHERE t.message_id = k.message_id AND t.provider = k.provider"
_UNCHANGED = f"{_THIS} AND t.version = k.believed"

_TELL_AGAIN_S = 0.1
"""How long a process is silent after it has told of deferred messages: of transactions that tell,
only one commits at a time. What it does not tell is found by those who look."""

_ROLLED_BACK = ("40001", "40P01")
_NO_TABLE = ("42P01", "42703", "3F000")
_READ_ONLY = "25006"
"""As a server is that was failed over to, or from."""
_SHUT_DOWN = ("57P01", "57P02", "57P03", "57P05")


class Postgresql(Database):
    """One table. Rows are written in the order of their keys, so that no two writers deadlock."""

    clock = "extract(epoch FROM clock_timestamp())::float8"
    position = "strpos"
    always = "to_timestamp(0)"
    skip_locked = "FOR UPDATE OF d SKIP LOCKED"
    moment = _NOW

    def __init__(self, engine: Engine, tables: Tables, *, is_inside: bool = False) -> None:
        super().__init__(engine, tables, is_inside=is_inside)
        # A batch has one of few shapes: which columns differ from row to row.
        self._insert_text = lru_cache(self._build_insert)
        self._swap_text = lru_cache(self._build_swap)
        self._removal_text = lru_cache(self._build_removal)
        self._load_text = lru_cache(self._build_load)
        self._defer_text = lru_cache(self._build_defer)
        self._telling_text = lru_cache(self._build_telling)
        self._told_at = -math.inf

    def insert(self, link: Link, records: Sequence[Record], now: float | None) -> set[Key]:
        cursor = _executed(link, self._insert_text, inserted(records), now)
        return _written(cursor, records)

    def insert_alike(
        self, link: Link, record: Record, message_ids: Sequence[str], now: float | None
    ) -> set[str]:
        # Records and their rows, made one by one, would take longer than the server does.
        columns = split(inserted([record])).constant
        constant = tuple(name for name in columns if name != "message_id")
        values = {**columns, "message_id": message_ids, "now": now, "count": len(message_ids)}
        cursor: psycopg.Cursor[tuple[Any, ...]] = raw_cursor(link)
        statement = self._insert_text(("message_id",), constant)
        cursor.execute(statement, values, prepare=True, binary=True)
        if cursor.rowcount == len(message_ids):
            return set(message_ids)
        return {message_id for _, message_id in cursor.fetchall()}

    def swap(self, link: Link, pairs: Sequence[Pair], now: float | None) -> set[Key]:
        cursor = _executed(link, self._swap_text, swapped(pairs), now)
        return _written(cursor, [old for old, _ in pairs])

    def remove(self, link: Link, records: Sequence[Record]) -> set[Key]:
        return _written(_executed(link, self._removal_text, believed(records)), records)

    def rows_of(
        self, link: Link, keys: Sequence[Key], now: float | None
    ) -> Iterable[Sequence[Any]]:
        return _executed(link, self._load_text, sought(keys), now).fetchall()

    def sample_ids(self, link: Link, number: int) -> Sequence[str]:
        # By pages: nothing looks rows up by their number here. A page holds dozens of rows, which
        # may have come one after another; some times as many are more than enough.
        pages = f"pg_relation_size('{self.name}') / current_setting('block_size')::int"
        share = f"least(100, {100 * number}.0 / greatest(1, {pages}))"
        statement = (
            f"SELECT message_id FROM {self.name} TABLESAMPLE SYSTEM ({share}) ORDER BY message_id"
        )
        return [row[0] for row in self.run(link, statement).fetchall()]

    def purge(
        self, connection: Connection, condition: ColumnElement[bool], limit: int, *, steps: bool
    ) -> int:
        # Rows that another cleaner, or a worker, is at are left to them.
        chosen: Select[Any] = (
            select(literal_column("ctid"))
            .select_from(self.table)
            .where(condition)
            .limit(limit)
            .with_for_update(skip_locked=True)
        )
        compiled = chosen.compile(connection, compile_kwargs={"render_postcompile": True})
        removal = f"DELETE FROM {self.name} WHERE ctid = ANY (ARRAY ({compiled}))"
        if steps:
            removal = (
                f"WITH gone AS ({removal} RETURNING message_id, provider), steps AS"
                f" (DELETE FROM {self.steps_name} AS d USING gone AS k {_OF_KEY})"
                " SELECT FROM gone"
            )
        return connection.exec_driver_sql(removal, dict(compiled.params)).rowcount

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
        # psycopg2 has another name for it. Types go by their names: a caller's driver has its own.
        state = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None) or ""
        kinds = {kind.__name__ for kind in type(error).__mro__}
        if state in _ROLLED_BACK:
            return Fault.ROLLED_BACK
        if state in _NO_TABLE:
            return Fault.NO_TABLE
        if state in _SHUT_DOWN or state.startswith("08"):
            return Fault.LOST
        if not state and kinds & {"OperationalError", "InterfaceError"}:
            return Fault.LOST
        is_away = state == _READ_ONLY or "OperationalError" in kinds
        return Fault.UNAVAILABLE if is_away else Fault.OTHER

    def defer(self, link: Link, rows: Sequence[Mapping[str, Any]], now: float | None) -> None:
        tells = time.monotonic() - self._told_at > _TELL_AGAIN_S
        _executed(link, self._telling_text if tells else self._defer_text, deferred(rows), now)
        if tells:
            self._told_at = time.monotonic()

    def later(self, seconds: str) -> str:
        return f"{_NOW} + {seconds}::float8 * interval '1 second'"

    def epoch_text(self, column: str) -> str:
        return f"extract(epoch FROM {column})::float8"

    def of_keys(self, name: str) -> str:
        return f"FROM {_KEYS}, {name} AS d {_OF_KEY}"

    @property
    def steps_removal(self) -> str:
        return f"DELETE FROM {self.steps_name} AS d USING {_KEYS} {_OF_KEY}"

    def key_values(self, keys: Sequence[Key]) -> Mapping[str, Any]:
        return {
            "message_ids": [key.message_id for key in keys],
            "providers": [key.consumer for key in keys],
        }

    def loaded_text(self, column: str, of: str = "") -> str:
        if column in TIMES:
            return self.epoch_text(f"{of}{column}")
        return f"{of}metadata::text" if column == "metadata" else f"{of}{column}"

    # ---- Statements ----------------------------------------------------------------------------

    def _build_insert(self, varying: tuple[str, ...], constant: tuple[str, ...]) -> str:
        plain = ("message_id", "provider", "status", "attempts", "fence", "version", "fingerprint")
        return (
            f"INSERT INTO {self.name} ({', '.join(plain)}, metadata, lease_until,"
            " first_processed_at, last_processed_at)"
            f" SELECT {', '.join(plain)}, metadata::jsonb, {_LEASE_END}, now, now"
            f" FROM {_rows(varying, constant)}"
            f" ON CONFLICT DO NOTHING{_returning(varying)}"
        )

    def _build_swap(self, varying: tuple[str, ...], constant: tuple[str, ...]) -> str:
        plain = ("status", "attempts", "fence", "version", "fingerprint", "result")
        written = (*plain, "exhausted", "duplicates")
        return (
            f"UPDATE {self.name} AS t SET {', '.join(f'{name} = k.{name}' for name in written)},"
            f" metadata = k.metadata::jsonb, lease_until = {_LEASE_END}, last_processed_at = now"
            f" FROM {_rows(varying, constant)} {_UNCHANGED}{_returning(varying, 't.')}"
        )

    def _build_removal(self, varying: tuple[str, ...], constant: tuple[str, ...]) -> str:
        return (
            f"DELETE FROM {self.name} AS t USING {_rows(varying, constant)}"
            f" {_UNCHANGED}{_returning(varying, 't.')}"
        )

    def _build_load(self, varying: tuple[str, ...], constant: tuple[str, ...]) -> str:
        columns = ", ".join(self.loaded_text(name, "t.") for name in LOADED)
        if self.is_inside:
            columns += f", {self.epoch_text('k.now')}"
        lock = " FOR UPDATE OF t" if self.is_inside else ""
        return f"SELECT {columns} FROM {_rows(varying, constant)}, {self.name} AS t {_THIS}{lock}"

    def _build_defer(self, varying: tuple[str, ...], constant: tuple[str, ...]) -> str:
        due_at = "now + delay_s * interval '1 second'"
        columns = ", ".join(DEFERRED)
        return (
            f"INSERT INTO {self.deferred_name} ({columns}, created_at, due_at, held_until)"
            f" SELECT {columns}, now, {due_at}, CASE WHEN delay_s > 0 THEN {due_at}"
            f" ELSE {self.always} END FROM {_rows(varying, constant)} ON CONFLICT DO NOTHING"
        )

    def _build_telling(self, varying: tuple[str, ...], constant: tuple[str, ...]) -> str:
        # In the same statement; whoever listens is told when the transaction commits.
        return (
            f"WITH kept AS ({self._build_defer(varying, constant)} RETURNING id)"
            f" SELECT pg_notify('{self.channel}', '') WHERE EXISTS (SELECT FROM kept)"
        )


def _rows(varying: tuple[str, ...], constant: tuple[str, ...]) -> str:
    """The table `k` of the batch: a row for each record, with its values and the time."""
    arrays = ", ".join(f"%({name})b::{_TYPES[name]}[]" for name in varying)
    singles = [f"%({name})b::{_TYPES[name]} AS {name}" for name in constant]
    columns = ", ".join((*varying, *singles, f"{_NOW} AS now"))
    source = f" FROM unnest({arrays}) AS u ({', '.join(varying)})" if varying else ""
    # The end keeps the planner from taking `k` apart: compared with constants, rows of the table
    # would seem to it to be found in a shorter way than by their key. Of a limit that it does not
    # know it expects few rows: else a plan that it made for a small table, and keeps, reads all of
    # it, in sessions without our settings.
    end = "LIMIT %(count)b::int8" if varying else "OFFSET 0"
    return f"(SELECT {columns}{source} {end}) AS k"


def _returning(varying: tuple[str, ...], of: str = "") -> str:
    """Which rows were written; of a single one, of which nothing varies, their number tells."""
    return f" RETURNING {of}provider, {of}message_id" if varying else ""


def _executed(
    link: Link,
    build: Callable[[tuple[str, ...], tuple[str, ...]], str],
    rows: Rows,
    now: float | None = None,
) -> "psycopg.Cursor[tuple[Any, ...]]":
    """A cursor that has executed the statement for these rows."""
    varying, constant = split(rows)
    parameters = {**varying, **constant, "now": now, "count": len(rows.values)}
    cursor: psycopg.Cursor[tuple[Any, ...]] = raw_cursor(link)
    cursor.execute(build(tuple(varying), tuple(constant)), parameters, prepare=True, binary=True)
    return cursor


def _written(cursor: "psycopg.Cursor[tuple[Any, ...]]", records: Sequence[Record]) -> set[Key]:
    """The keys that a statement has written, of those that it was given."""
    if cursor.rowcount == len(records):
        # As nearly always: what comes back need not be read.
        return {record.key for record in records}
    return {Key(*row) for row in cursor.fetchall()} if len(records) > 1 else set()
