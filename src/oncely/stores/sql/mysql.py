"""MariaDB and MySQL through PyMySQL: each batch is one statement over a JSON document."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, TypeVar

from pymysql.constants import CR, ER
from pymysql.err import InterfaceError
from sqlalchemy import ColumnElement, Connection, Engine, Table, delete

from oncely.core.errors import StoreError, StoreUnavailable
from oncely.core.record import Key, Record
from oncely.stores.sql.batches import batches, split
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

T = TypeVar("T")

_TYPES = {
    "message_id": "VARCHAR(255)",
    "provider": "VARCHAR(255)",
    "status": "VARCHAR(50)",
    "attempts": "INT",
    "metadata": "LONGTEXT",
    "fence": "BIGINT",
    "version": "BIGINT",
    "lease_s": "DOUBLE",
    "fingerprint": "VARCHAR(64)",
    "result": "LONGTEXT",
    "exhausted": "TINYINT",
    "duplicates": "BIGINT",
    "believed": "BIGINT",
}
_EPOCH = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', {}) / 1e6"
# NOW() would be when the statement began, before it waited for others.
_NOW = "COALESCE(CAST('1970-01-01' AS DATETIME(6)) + INTERVAL %(now)s SECOND, SYSDATE(6))"
_MIGRATION_WAIT_S = 100
"""For another program's migration; shorter than a connection waits for an answer."""
_MAX_PACKET = "max_allowed_packet"
_LONG_COLUMNS = ("metadata", "result")
_LONG = 1 << 20
"""Characters from which on a statement is measured: the server hangs up on one too long for it."""

_ROLLED_BACK = (ER.LOCK_DEADLOCK, ER.LOCK_WAIT_TIMEOUT)
_NO_TABLE = (ER.NO_SUCH_TABLE, ER.BAD_FIELD_ERROR)
_CONNECTION_KILLED = 1927
_LOST = (ER.SERVER_SHUTDOWN, ER.NORMAL_SHUTDOWN, _CONNECTION_KILLED)
_CLIENT_ERRORS = range(CR.CR_ERROR_FIRST, 3000)
"""Those of the driver, about its connection."""
_TIMED_OUT = (1969, 3024)
_READ_ONLY = (ER.OPTION_PREVENTS_STATEMENT, 1792, 1836)
_UNAVAILABLE = (
    *(ER.CON_COUNT_ERROR, ER.TOO_MANY_USER_CONNECTIONS, ER.USER_LIMIT_REACHED),
    *(ER.DISK_FULL, ER.RECORD_FILE_FULL, ER.OUTOFMEMORY, ER.OUT_OF_RESOURCES),
    *(ER.HOST_IS_BLOCKED, ER.QUERY_INTERRUPTED, *_TIMED_OUT, *_READ_ONLY),
)


def _weight(item: Any) -> int:
    """About how many bytes a record, or the new one of a pair, adds to a statement."""
    record = item if isinstance(item, Record) else item[1]
    return sum(len(json.dumps(value)) for value in (record.metadata, record.result) if value)


class Mysql(Database):
    """One table. Rows are written in the order of their keys, so that no two writers deadlock.

    Neither server tells which rows an UPDATE wrote, only how many. Where that is not all of them,
    it is undone, and done again for those that are found and locked first.
    """

    clock = _EPOCH.format("SYSDATE(6)")
    position = "instr"

    def __init__(self, engine: Engine, table: Table) -> None:
        super().__init__(engine, table)
        # A batch has one of few shapes: which columns differ from row to row.
        self._insert_text = lru_cache(self._build_insert)
        self._swap_text = lru_cache(self._build_swap)
        self._removal_text = lru_cache(self._build_removal)
        self._find_text = lru_cache(self._build_find)
        self._load_text = lru_cache(self._build_load)

    def insert(
        self, connection: Connection, records: Sequence[Record], now: float | None
    ) -> set[Key]:
        if _written(connection, self._insert_text, inserted(records), now) == len(records):
            return {record.key for record in records}
        # No two inserts under one key have the same version: these are ours.
        return self._unchanged(connection, records)

    def swap(self, connection: Connection, pairs: Sequence[Pair], now: float | None) -> set[Key]:
        def write(pairs: Sequence[Pair]) -> int:
            return _written(connection, self._swap_text, swapped(pairs), now)

        return self._write(connection, pairs, lambda pair: pair[0], write)

    def remove(self, connection: Connection, records: Sequence[Record]) -> set[Key]:
        def write(records: Sequence[Record]) -> int:
            return _written(connection, self._removal_text, believed(records))

        return self._write(connection, records, lambda record: record, write)

    def rows_of(self, connection: Connection, keys: Sequence[Key]) -> Iterable[Sequence[Any]]:
        return _executed(connection, self._load_text, key_columns(keys)).fetchall()  # type: ignore[no-any-return]

    def purge(self, connection: Connection, condition: ColumnElement[bool], limit: int) -> int:
        removal = delete(self.table).where(condition)
        return connection.execute(removal.with_dialect_options(mysql_limit=limit)).rowcount

    @contextmanager
    def migrating(self, connection: Connection) -> Iterator[None]:
        # A schema is not changed in transactions here: nothing but the lock keeps others away.
        lock = f"oncely {self.name}"[:64]
        cursor = raw_cursor(connection)
        cursor.execute("SELECT GET_LOCK(%s, %s)", (lock, _MIGRATION_WAIT_S))
        if cursor.fetchone()[0] != 1:
            raise StoreUnavailable(f"somebody migrates {self.name} for {_MIGRATION_WAIT_S} s now")
        try:
            yield
        finally:
            cursor.execute("SELECT RELEASE_LOCK(%s)", (lock,))

    def size(self, connection: Connection) -> int | None:
        found = connection.exec_driver_sql(
            "SELECT data_length + index_length FROM information_schema.tables"
            " WHERE table_schema = COALESCE(%(schema)s, DATABASE()) AND table_name = %(table)s",
            {"schema": self.table.schema, "table": self.table.name},
        )
        size = found.scalar_one_or_none()
        return None if size is None else int(size)

    def fault(self, error: Exception) -> Fault:
        code = error.args[0] if error.args else 0
        if code in _ROLLED_BACK:
            return Fault.ROLLED_BACK
        if code in _NO_TABLE:
            return Fault.NO_TABLE
        if code in _LOST or code in _CLIENT_ERRORS or isinstance(error, InterfaceError):
            return Fault.LOST
        # PyMySQL calls nearly everything an OperationalError: its type tells nothing.
        return Fault.UNAVAILABLE if code in _UNAVAILABLE else Fault.OTHER

    def loaded_text(self, column: str, of: str = "") -> str:
        return _EPOCH.format(f"{of}{column}") if column in TIMES else f"{of}{column}"

    def batches(self, items: Sequence[T]) -> Iterable[Sequence[T]]:
        return batches(items, _weight)

    def prepare(self, connection: Any, record: Any) -> None:
        with connection.cursor() as cursor:
            # Gaps between keys stay unlocked, so that writers of neighbouring keys do not wait.
            cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
            cursor.execute("SET time_zone = '+00:00'")
            cursor.execute(f"SELECT @@{_MAX_PACKET}")
            record.info[_MAX_PACKET] = cursor.fetchone()[0]

    # ---- Writing exactly what is unchanged -----------------------------------------------------

    def _write(
        self,
        connection: Connection,
        items: Sequence[T],
        believed_in: Callable[[T], Record],
        write: Callable[[Sequence[T]], int],
    ) -> set[Key]:
        """Write the items whose record is as believed; return their keys."""
        keys = {believed_in(item).key for item in items}
        if len(items) == 1:
            return keys if write(items) else set()
        try:
            with in_transaction(connection):
                if write(items) < len(items):
                    raise _NotAll
            return keys
        except _NotAll:
            pass
        with in_transaction(connection):
            records = [believed_in(item) for item in items]
            unchanged = self._unchanged(connection, records, lock=True)
            if unchanged:
                write([item for item in items if believed_in(item).key in unchanged])
            return unchanged

    def _unchanged(
        self, connection: Connection, records: Sequence[Record], *, lock: bool = False
    ) -> set[Key]:
        """Those that the table has in the version that the records have."""
        suffix = " FOR UPDATE" if lock else ""
        cursor = _executed(connection, self._find_text, believed(records), lock=suffix)
        return {Key(*row) for row in cursor.fetchall()}

    # ---- Statements ----------------------------------------------------------------------------

    def _build_insert(self, varying: tuple[str, ...]) -> str:
        value = _values(varying)
        plain = ("message_id", "provider", "status", "attempts", "metadata", "fence", "version")
        written = (*plain, "fingerprint")
        rows = " CROSS JOIN ".join((f"(SELECT {_NOW} AS now) AS c", *_rows_of(varying)))
        return (
            f"INSERT IGNORE INTO {self.name} ({', '.join(written)},"
            " lease_until, first_processed_at, last_processed_at)"
            f" SELECT {', '.join(value[name] for name in written)},"
            f" c.now + INTERVAL {value['lease_s']} SECOND, c.now, c.now FROM {rows}"
        )

    def _build_swap(self, varying: tuple[str, ...]) -> str:
        value = _values(varying)
        plain = ("status", "attempts", "metadata", "fence", "version", "fingerprint", "result")
        written = (*plain, "exhausted", "duplicates")
        return (
            f"UPDATE {self._joined(varying)} SET"
            f" {', '.join(f't.{name} = {value[name]}' for name in written)},"
            f" t.lease_until = {_NOW} + INTERVAL {value['lease_s']} SECOND,"
            f" t.last_processed_at = {_NOW} {_where_unchanged(value)}"
        )

    def _build_removal(self, varying: tuple[str, ...]) -> str:
        return f"DELETE t FROM {self._joined(varying)} {_where_unchanged(_values(varying))}"

    def _build_find(self, varying: tuple[str, ...]) -> str:
        unchanged = _where_unchanged(_values(varying))
        return f"SELECT t.provider, t.message_id FROM {self._joined(varying)} {unchanged}"

    def _build_load(self, varying: tuple[str, ...]) -> str:
        columns = ", ".join(self.loaded_text(name, "t.") for name in LOADED)
        return f"SELECT {columns} FROM {self._joined(varying)} {_where_key(_values(varying))}"

    def _joined(self, varying: tuple[str, ...]) -> str:
        # The batch first, then the table by its key: what is not in the batch is not read.
        return " STRAIGHT_JOIN ".join((*_rows_of(varying), f"{self.name} AS t"))


def _values(varying: tuple[str, ...]) -> dict[str, str]:
    """Where the value of each column comes from."""
    return {name: f"k.{name}" if name in varying else f"%({name})s" for name in _TYPES}


def _rows_of(varying: tuple[str, ...]) -> list[str]:
    """The table `k` of what differs from row to row, where anything does."""
    columns = ", ".join(f"{name} {_TYPES[name]} PATH '$[{n}]'" for n, name in enumerate(varying))
    return [f"JSON_TABLE(%(rows)s, '$[*]' COLUMNS ({columns})) AS k"] if varying else []


def _where_key(value: dict[str, str]) -> str:
    return f"WHERE t.message_id = {value['message_id']} AND t.provider = {value['provider']}"


def _where_unchanged(value: dict[str, str]) -> str:
    return f"{_where_key(value)} AND t.version = {value['believed']}"


class _NotAll(Exception):
    """Fewer rows were written than were meant."""


def _written(
    connection: Connection,
    build: Callable[[tuple[str, ...]], str],
    columns: Columns,
    now: float | None = None,
) -> int:
    """Write these rows; how many were."""
    return int(_executed(connection, build, columns, now).rowcount)


def _check_length(connection: Connection, statement: str) -> None:
    """Raise StoreError for a statement that the server would hang up on."""
    length, most = len(statement.encode()), connection.info[_MAX_PACKET]
    if length >= most:
        raise StoreError(
            f"{length} bytes are to be written at once: raise max_allowed_packet, now {most}"
        )


def _executed(
    connection: Connection,
    build: Callable[[tuple[str, ...]], str],
    columns: Columns,
    now: float | None = None,
    lock: str = "",
) -> Any:
    """A cursor that has executed the statement for these rows."""
    varying, constant = split(columns)
    # As they are: every letter beyond ASCII would be two escapes for the server to undo.
    rows = json.dumps(list(zip(*varying.values(), strict=True)), ensure_ascii=False)
    cursor = raw_cursor(connection)
    statement, values = build(tuple(varying)) + lock, {**constant, "rows": rows, "now": now}
    if len(rows) + sum(len(constant.get(name) or "") for name in _LONG_COLUMNS) > _LONG:
        _check_length(connection, cursor.mogrify(statement, values))
    cursor.execute(statement, values)
    return cursor
