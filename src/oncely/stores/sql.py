"""Records in a relational database, by SQLAlchemy Core: SQLite so far.

Statements are built once and compiled once per process; what runs for each record is the compiled
text with a tuple, because SQLAlchemy's own work per row would cost more than SQLite's.
"""

import json
import os
import sqlite3
import threading
import time
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from sqlalchemy import (
    Boolean,
    Column,
    ColumnElement,
    Connection,
    Engine,
    Float,
    Integer,
    MetaData,
    Select,
    String,
    Table,
    Text,
    UniqueConstraint,
    bindparam,
    delete,
    func,
    literal_column,
    select,
    true,
    update,
)
from sqlalchemy.dialects.sqlite import insert as sqlite_insert
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.sql import ClauseElement

from oncely.core.errors import StoreError, StoreUnavailable, mask_passwords
from oncely.core.message import MAX_ID_LENGTH
from oncely.core.record import Key, Record, State
from oncely.stores.base import Change, Clock, Loaded, Query

TABLE_NAME = "processed_messages"

BUSY_TIMEOUT_S = 30.0
"""How long to wait for another process that writes to the same SQLite file."""
_PATIENT = f"PRAGMA busy_timeout = {BUSY_TIMEOUT_S * 1000:.0f}"
_LOCKED = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
_RETRY_S = 0.001

_metadata = MetaData()
_table = Table(
    TABLE_NAME,
    _metadata,
    # The columns that a hand-written processed_messages table has, under its names.
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("message_id", String(MAX_ID_LENGTH), nullable=False),
    Column("provider", String(MAX_ID_LENGTH), nullable=False),
    Column("status", String(50), nullable=False, server_default=State.PROCESSING.value),
    Column("attempts", Integer, server_default="1"),
    Column("first_processed_at", Float, nullable=False),
    Column("last_processed_at", Float, nullable=False),
    Column("metadata", Text),
    # What is added: nullable or with a default, so that a row written by hand is a record too.
    Column("fence", Integer, nullable=False, server_default="1"),
    Column("version", Integer, nullable=False, server_default="0"),
    Column("lease_until", Float),
    Column("fingerprint", String(64)),
    Column("result", Text),
    Column("exhausted", Boolean, nullable=False, server_default="0"),
    Column("duplicates", Integer, nullable=False, server_default="0"),
    UniqueConstraint("provider", "message_id", name="uq_message_provider"),
)
_c = _table.c

_MACHINE_CLOCK: ColumnElement[float] = literal_column("((julianday('now') - 2440587.5) * 86400.0)")


class SqlStore:
    """One table, `processed_messages`, in the database of an Engine.

    `clock` replaces the database's clock; only tests want that.
    """

    def __init__(self, engine: Engine, clock: Clock | None = None) -> None:
        self._engine = engine
        self._clock = clock
        self._statements = _Statements(engine)
        self._lock = threading.Lock()
        _start_afresh_after_fork(self)

    def insert(self, records: Sequence[Record]) -> set[Key]:
        ordered = sorted(records, key=_key_of)
        with self._connected() as connection:
            now = self._now(connection)
            rows = [_insert_row(record, now) for record in ordered]
            with self._writing(connection):
                return self._write_each(connection, self._statements.insert, rows, ordered)

    def swap(self, changes: Sequence[Change]) -> set[Key]:
        ordered = sorted(changes, key=_changed_key)
        kept = [(old, new) for old, new in ordered if new is not None]
        gone = [old for old, new in ordered if new is None]
        removals = [(*old.key, old.version) for old in gone]
        with self._connected() as connection:
            now = self._now(connection)
            rows = [_swap_row(old, new, now) for old, new in kept]
            with self._writing(connection):
                written = self._write_each(
                    connection, self._statements.swap, rows, [old for old, _ in kept]
                )
                return written | self._write_each(
                    connection, self._statements.remove, removals, gone
                )

    def load(self, keys: Collection[Key]) -> Loaded:
        with self._connected() as connection:
            cursor = _cursor(connection)
            found = {}
            for key in sorted(keys):
                row = cursor.execute(self._statements.load, tuple(key)).fetchone()
                if row is not None:
                    found[key] = _record(row)
            return Loaded(found, self._now(connection))

    def scan(self, query: Query) -> Sequence[Record]:
        with self._connected() as connection:
            chosen = _fitting(select(*_LOADED), query, self._now(connection))
            oldest = chosen.order_by(_c.last_processed_at, _c.id).limit(query.limit)
            return [_record(tuple(row)) for row in connection.execute(oldest)]

    def counts(self) -> Mapping[tuple[str, State], int]:
        grouped = select(_c.provider, _c.status, func.count()).group_by(_c.provider, _c.status)
        with self._connected() as connection:
            return {(name, State(status)): n for name, status, n in connection.execute(grouped)}

    def purge(self, query: Query, states: Sequence[State]) -> int:
        with self._connected() as connection, self._writing(connection):
            chosen = _fitting(select(_c.id), query, self._now(connection))
            oldest = (
                chosen.where(_c.status.in_([state.value for state in states]))
                .order_by(_c.last_processed_at)
                .limit(query.limit)
            )
            return connection.execute(delete(_table).where(_c.id.in_(oldest))).rowcount

    def migrate(self) -> None:
        with self._connected() as connection, self._writing(connection):
            _metadata.create_all(connection)

    def close(self) -> None:
        self._engine.dispose()

    def start_afresh(self) -> None:
        """Leave connections and lock to the parent: called in a forked child."""
        self._lock = threading.Lock()
        self._engine.dispose(close=False)

    def _now(self, connection: Connection) -> float:
        if self._clock is not None:
            return self._clock()
        return float(_cursor(connection).execute(self._statements.now).fetchone()[0])

    @staticmethod
    def _write_each(
        connection: Connection,
        statement: str,
        rows: Sequence[tuple[Any, ...]],
        records: Sequence[Record],
    ) -> set[Key]:
        # One by one costs no round trip in an embedded database, and tells which were written.
        cursor = _cursor(connection)
        written = set()
        for row, record in zip(rows, records, strict=True):
            if cursor.execute(statement, row).rowcount:
                written.add(record.key)
        return written

    @contextmanager
    def _connected(self) -> Iterator[Connection]:
        try:
            with self._engine.connect() as connection:
                yield connection
        except Exception as error:
            raise _translated(error, self._engine) from error

    @contextmanager
    def _writing(self, connection: Connection) -> Iterator[None]:
        """A transaction that holds the file's one write lock. What can be done before, is."""
        with self._lock:
            self._begin(connection)
            try:
                yield
            except BaseException:
                # A full disk has ended the transaction already.
                if getattr(connection.connection.dbapi_connection, "in_transaction", False):
                    connection.exec_driver_sql("ROLLBACK")
                raise
            connection.exec_driver_sql("COMMIT")

    @staticmethod
    def _begin(connection: Connection) -> None:
        # SQLite's own busy timeout sleeps for up to a tenth of a second at a time, in which the
        # lock stands free; with two writers that halves the rate.
        deadline = time.monotonic() + BUSY_TIMEOUT_S
        cursor = _cursor(connection)
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


# ---- Statements --------------------------------------------------------------------------------

_LOADED = (
    _c.provider,
    _c.message_id,
    _c.status,
    _c.attempts,
    _c.fence,
    _c.first_processed_at,
    _c.last_processed_at,
    _c.lease_until,
    _c.metadata,
    _c.result,
    _c.fingerprint,
    _c.exhausted,
    _c.duplicates,
    _c.version,
)


class _Statements:
    """The compiled text of what runs for each record, parameters by position."""

    def __init__(self, engine: Engine) -> None:
        this = (_c.provider == bindparam("provider_"), _c.message_id == bindparam("id_"))
        unchanged = (*this, _c.version == bindparam("version_"))
        conflict_ignored = sqlite_insert(_table).on_conflict_do_nothing()
        new: list[tuple[str, Any]] = [(name, bindparam(f"{name}_new")) for name in _SWAPPED]
        self.now = _compiled(engine, select(_MACHINE_CLOCK))
        self.load = _compiled(engine, select(*_LOADED).where(*this))
        self.insert = _compiled(
            engine, conflict_ignored.values({name: bindparam(name) for name in _INSERTED})
        )
        self.swap = _compiled(engine, update(_table).ordered_values(*new).where(*unchanged))
        self.remove = _compiled(engine, delete(_table).where(*unchanged))


# Rows below are tuples in these orders; the first is that of the table's columns.
_INSERTED = (
    "message_id",
    "provider",
    "status",
    "attempts",
    "first_processed_at",
    "last_processed_at",
    "metadata",
    "fence",
    "version",
    "lease_until",
    "fingerprint",
)
_SWAPPED = (
    "status",
    "attempts",
    "last_processed_at",
    "metadata",
    "fence",
    "version",
    "lease_until",
    "fingerprint",
    "result",
    "exhausted",
    "duplicates",
)


def _compiled(engine: Engine, statement: ClauseElement) -> str:
    return str(statement.compile(engine))


def _fitting(statement: Select[Any], query: Query, now: float) -> Select[Any]:
    conditions: list[ColumnElement[bool]] = [true()]
    if query.consumer is not None:
        conditions.append(_c.provider == query.consumer)
    if query.state is not None:
        conditions.append(_c.status == query.state.value)
    if query.older_than_s is not None:
        conditions.append(_c.last_processed_at < now - query.older_than_s)
    return statement.where(*conditions)


# ---- Rows --------------------------------------------------------------------------------------


def _insert_row(record: Record, now: float) -> tuple[Any, ...]:
    return (
        record.key.message_id,
        record.key.consumer,
        record.state.value,
        record.attempts,
        now,
        now,
        _json(record.metadata),
        record.fence,
        record.version,
        None if record.lease_until is None else now + record.lease_until,
        record.fingerprint,
    )


def _swap_row(old: Record, new: Record, now: float) -> tuple[Any, ...]:
    return (
        new.state.value,
        new.attempts,
        now,
        _json(new.metadata),
        new.fence,
        new.version,
        None if new.lease_until is None else now + new.lease_until,
        new.fingerprint,
        _json(new.result),
        new.exhausted,
        new.duplicates,
        *old.key,
        old.version,
    )


def _record(row: tuple[Any, ...]) -> Record:
    (consumer, message_id, status, attempts, fence, first_seen, last_seen, lease_until) = row[:8]
    metadata, result, fingerprint, exhausted, duplicates, version = row[8:]
    return Record(
        key=Key(consumer, message_id),
        state=State(status),
        attempts=attempts,
        fence=fence,
        first_seen=first_seen,
        last_seen=last_seen,
        lease_until=lease_until,
        metadata=None if metadata is None else json.loads(metadata),
        result=None if result is None else json.loads(result),
        fingerprint=fingerprint,
        exhausted=bool(exhausted),
        duplicates=duplicates,
        version=version,
    )


def _json(value: Any) -> str | None:
    return None if value is None else json.dumps(value)


def _key_of(record: Record) -> Key:
    return record.key


def _changed_key(change: Change) -> Key:
    return change.old.key


# ---- Connections -------------------------------------------------------------------------------


def _cursor(connection: Connection) -> Any:
    return connection.connection.cursor()


def _translated(error: Exception, engine: Engine) -> Exception:
    """The error that the Store protocol promises, for one from the driver."""
    if isinstance(error, PoolTimeout):
        return StoreUnavailable(f"{engine.url!r}: no connection became free: {error}")
    driver_error = error.orig if isinstance(error, DBAPIError) else error
    if not isinstance(driver_error, engine.dialect.loaded_dbapi.Error):
        return error
    text = mask_passwords(str(driver_error))
    if "no such table" in text:
        return StoreError(f"the ledger has no table {TABLE_NAME} yet; call migrate() first")
    if isinstance(driver_error, engine.dialect.loaded_dbapi.OperationalError):
        return StoreUnavailable(f"{engine.url!r}: {text}")
    return StoreError(f"{engine.url!r}: {text}")


def _start_afresh_after_fork(store: SqlStore) -> None:
    reference = weakref.ref(store)

    def start_afresh() -> None:
        inherited = reference()
        if inherited is not None:
            inherited.start_afresh()

    os.register_at_fork(after_in_child=start_afresh)


def prepare_sqlite(connection: Any, _: object) -> None:
    """Make a new SQLite connection fit for a ledger that other processes write to as well."""
    connection.isolation_level = None  # BEGIN IMMEDIATE is ours to say, and to wait for.
    connection.execute(_PATIENT)
    switch_to_wal(connection)
    # A commit that a power cut can undo would run its message twice.
    connection.execute("PRAGMA synchronous = FULL")
    # Random ids touch most pages again and again: copying them back less often is a fifth faster.
    connection.execute("PRAGMA wal_autocheckpoint = 8000")


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
