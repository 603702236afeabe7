"""MariaDB and MySQL through PyMySQL: each batch is one statement over a JSON document."""

import json
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from typing import Any, TypeVar

from pymysql.constants import CR, ER
from pymysql.err import InterfaceError
from sqlalchemy import ColumnElement, Connection, Engine, delete

from oncely.core.errors import StoreError, StoreUnavailable
from oncely.core.record import Key, Record
from oncely.stores.sql.batches import batches, split
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
    "name": "VARCHAR(32)",
    "position": "INT",
    "destination": "VARCHAR(255)",
    "deferred_id": "VARCHAR(255)",
    "type": "LONGTEXT",
    "body": "LONGTEXT",
    "headers": "LONGTEXT",
    "source": "LONGTEXT",
    "sent_at": "VARCHAR(64)",
    "content_type": "LONGTEXT",
    "ordering_key": "LONGTEXT",
    "delay_s": "DOUBLE",
    "lane": "VARCHAR(32)",
}
_INSERTED = (
    *("message_id", "provider", "status", "attempts", "metadata", "fence", "version"),
    "fingerprint",
)
_FEW = 100
"""Rows, up to which an insert is written row by row."""
_EPOCH = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', {}) / 1e6"
_NOW = "COALESCE(CAST('1970-01-01' AS DATETIME(6)) + INTERVAL %(now)s SECOND, {})"
_KEYS = (
    "JSON_TABLE(%(keys)s, '$[*]' COLUMNS"
    " (message_id VARCHAR(255) PATH '$[0]', provider VARCHAR(255) PATH '$[1]')) AS k"
)
_MIGRATION_WAIT_S = 100
"""For another program's migration; shorter than a connection waits for an answer."""
_MAX_PACKET = "max_allowed_packet"
_LONG_COLUMNS = ("metadata", "result", "body")
_LONG = 1 << 20
"""Characters from which on a statement is measured: the server hangs up on one too long for it."""

_NUMBERING_LOCKED = 1467
_ROLLED_BACK = (ER.LOCK_DEADLOCK, ER.LOCK_WAIT_TIMEOUT, ER.CHECKREAD, _NUMBERING_LOCKED)
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

    clock = _EPOCH.format("UTC_TIMESTAMP(6)")
    position = "instr"
    always = "'1970-01-01'"
    insert_absent = "INSERT IGNORE INTO {}"
    skip_locked = "FOR UPDATE SKIP LOCKED"

    def __init__(self, engine: Engine, tables: Tables, *, is_inside: bool = False) -> None:
        super().__init__(engine, tables, is_inside=is_inside)
        # A batch has one of few shapes: which columns differ from row to row.
        self._insert_text = lru_cache(self._build_insert)
        self._insertion_text = lru_cache(self._build_insertion)
        self._swap_text = lru_cache(self._build_swap)
        self._removal_text = lru_cache(self._build_removal)
        self._find_text = lru_cache(self._build_find)
        self._load_text = lru_cache(self._build_load)
        self._defer_text = lru_cache(self._build_defer)

    @property
    def moment(self) -> str:
        # UTC_TIMESTAMP is when the statement began, before it waited for others. SYSDATE is in
        # the session's time zone, which is ours only where the session is.
        return _NOW.format("UTC_TIMESTAMP(6)" if self.is_inside else "SYSDATE(6)")

    def insert(self, link: Link, records: Sequence[Record], now: float | None) -> set[Key]:
        rows = inserted(records)
        if self.is_inside or len(records) <= _FEW:
            cursor = self._insert_values(link, rows, now)
        else:
            cursor = _executed(link, self._insert_text, rows, now)
        if self._has_inserted_all(cursor, len(records)):
            return {record.key for record in records}
        # No two inserts under one key have the same version: these are ours.
        return self._unchanged(link, records)

    def _insert_values(self, link: Link, rows: Rows, now: float | None) -> Any:
        varying, constant = split(rows)
        values = {
            f"{name}_{n}": value for name, of in varying.items() for n, value in enumerate(of)
        }
        statement = self._insertion_text(tuple(varying), len(rows.values))
        return _execute(link, statement, {**constant, **values, "now": now})

    def _has_inserted_all(self, cursor: Any, count: int) -> bool:
        if self.is_inside:
            # Whether those that were there are counted too is up to the session.
            return count == 1 and bool(cursor.lastrowid)
        return bool(cursor.rowcount == count)

    def swap(self, link: Link, pairs: Sequence[Pair], now: float | None) -> set[Key]:
        def write(pairs: Sequence[Pair]) -> int:
            return _written(link, self._swap_text, swapped(pairs), now)

        return self._write(link, pairs, lambda pair: pair[0], write)

    def remove(self, link: Link, records: Sequence[Record]) -> set[Key]:
        def write(records: Sequence[Record]) -> int:
            return _written(link, self._removal_text, believed(records))

        return self._write(link, records, lambda record: record, write)

    def rows_of(
        self, link: Link, keys: Sequence[Key], now: float | None
    ) -> Iterable[Sequence[Any]]:
        return _executed(link, self._load_text, sought(keys), now).fetchall()  # type: ignore[no-any-return]

    def purge(
        self, connection: Connection, condition: ColumnElement[bool], limit: int, *, steps: bool
    ) -> int:
        if steps:
            return super().purge(connection, condition, limit, steps=True)
        # A third of the cost; but which rows are gone is not told.
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

    def defer(self, link: Link, rows: Sequence[Mapping[str, Any]], now: float | None) -> None:
        encoded = [{**row, "body": b64encode(row["body"]).decode()} for row in rows]
        _executed(link, self._defer_text, deferred(encoded), now)

    def later(self, seconds: str) -> str:
        return f"{self.moment} + INTERVAL {seconds} SECOND"

    def epoch_text(self, column: str) -> str:
        return _EPOCH.format(column)

    def of_keys(self, name: str) -> str:
        return (
            f"FROM {_KEYS} STRAIGHT_JOIN {name} AS d"
            " WHERE d.message_id = k.message_id AND d.provider = k.provider"
        )

    @property
    def steps_removal(self) -> str:
        return f"DELETE d {self.of_keys(self.steps_name)}"

    def key_values(self, keys: Sequence[Key]) -> Mapping[str, Any]:
        return {"keys": json.dumps([[key.message_id, key.consumer] for key in keys])}

    def loaded_text(self, column: str, of: str = "") -> str:
        return self.epoch_text(f"{of}{column}") if column in TIMES else f"{of}{column}"

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
        link: Link,
        items: Sequence[T],
        believed_in: Callable[[T], Record],
        write: Callable[[Sequence[T]], int],
    ) -> set[Key]:
        """Write the items whose record is as believed; return their keys."""
        keys = {believed_in(item).key for item in items}
        if len(items) == 1:
            return keys if write(items) else set()
        if not self.is_inside:
            try:
                with in_transaction(link):
                    if write(items) < len(items):
                        raise _NotAll
                return keys
            except _NotAll:
                pass
        with nullcontext() if self.is_inside else in_transaction(link):
            unchanged = self._unchanged(link, [believed_in(item) for item in items], lock=True)
            if unchanged:
                write([item for item in items if believed_in(item).key in unchanged])
            return unchanged

    def _unchanged(self, link: Link, records: Sequence[Record], *, lock: bool = False) -> set[Key]:
        """Those that the table has in the version that the records have."""
        suffix = " FOR UPDATE" if lock else ""
        cursor = _executed(link, self._find_text, believed(records), lock=suffix)
        return {Key(*row) for row in cursor.fetchall()}

    # ---- Statements ----------------------------------------------------------------------------

    def _build_insert(self, varying: tuple[str, ...]) -> str:
        value = _values(varying)
        return (
            f"INSERT IGNORE INTO {self.name} ({', '.join(_INSERTED)},"
            " lease_until, first_processed_at, last_processed_at)"
            f" SELECT {', '.join(value[name] for name in _INSERTED)},"
            f" c.now + INTERVAL {value['lease_s']} SECOND, c.now, c.now"
            f" FROM {self._at_one_time(varying)}"
        )

    def _build_insertion(self, varying: tuple[str, ...], count: int) -> str:
        """An insert that is slower for many rows, but keeps nobody from inserting others while it
        waits for a transaction: one from a table locks the numbering of rows as long as it runs.
        """

        def row(n: int) -> str:
            value = {name: f"{name}_{n}" if name in varying else name for name in _TYPES}
            given = ", ".join(f"%({value[name]})s" for name in _INSERTED)
            lease_until = f"first_processed_at + INTERVAL %({value['lease_s']})s SECOND"
            return f"({self.moment}, first_processed_at, {lease_until}, {given})"

        rows = ", ".join(map(row, range(count)))
        columns = ("first_processed_at", "last_processed_at", "lease_until", *_INSERTED)
        written = f"INTO {self.name} ({', '.join(columns)}) VALUES {rows}"
        if not self.is_inside:
            return f"INSERT IGNORE {written}"
        # To ignore what is there takes a shared lock on it. Two that lost would both keep theirs,
        # and deadlock once they want to write. This takes an exclusive one, changes nothing, and
        # tells so: no id was given.
        return f"INSERT {written} ON DUPLICATE KEY UPDATE fence = fence + LAST_INSERT_ID(0)"

    def _build_defer(self, varying: tuple[str, ...]) -> str:
        value = _values(varying)
        given = {name: value[name] for name in DEFERRED}
        # JSON has no bytes.
        given["body"] = f"FROM_BASE64({value['body']})"
        due_at = f"c.now + INTERVAL {value['delay_s']} SECOND"
        return (
            f"INSERT IGNORE INTO {self.deferred_name} ({', '.join(given)},"
            f" created_at, due_at, held_until) SELECT {', '.join(given.values())}, c.now, {due_at},"
            f" IF({value['delay_s']} > 0, {due_at}, {self.always})"
            f" FROM {self._at_one_time(varying)}"
        )

    def _build_swap(self, varying: tuple[str, ...]) -> str:
        value = _values(varying)
        plain = ("status", "attempts", "metadata", "fence", "version", "fingerprint", "result")
        written = (*plain, "exhausted", "duplicates")
        return (
            f"UPDATE {self._joined(varying)} SET"
            f" {', '.join(f't.{name} = {value[name]}' for name in written)},"
            f" t.lease_until = {self.moment} + INTERVAL {value['lease_s']} SECOND,"
            f" t.last_processed_at = {self.moment} {_where_unchanged(value)}"
        )

    def _build_removal(self, varying: tuple[str, ...]) -> str:
        return f"DELETE t FROM {self._joined(varying)} {_where_unchanged(_values(varying))}"

    def _build_find(self, varying: tuple[str, ...]) -> str:
        unchanged = _where_unchanged(_values(varying))
        return f"SELECT t.provider, t.message_id FROM {self._joined(varying)} {unchanged}"

    def _build_load(self, varying: tuple[str, ...]) -> str:
        columns = ", ".join(self.loaded_text(name, "t.") for name in LOADED)
        if self.is_inside:
            columns += f", {self.epoch_text(self.moment)}"
        lock = " FOR UPDATE" if self.is_inside else ""
        found = f"SELECT {columns} FROM {self._joined(varying)} {_where_key(_values(varying))}"
        return found + lock

    def _at_one_time(self, varying: tuple[str, ...]) -> str:
        """The batch, with the time as `c.now`."""
        return " CROSS JOIN ".join((f"(SELECT {self.moment} AS now) AS c", *_rows_of(varying)))

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
    link: Link,
    build: Callable[[tuple[str, ...]], str],
    rows: Rows,
    now: float | None = None,
) -> int:
    """Write these rows; how many were."""
    return int(_executed(link, build, rows, now).rowcount)


def _check_length(link: Link, statement: str) -> None:
    """Raise StoreError for a statement that the server would hang up on."""
    length, most = len(statement.encode()), link.info[_MAX_PACKET]
    if length >= most:
        raise StoreError(
            f"{length} bytes are to be written at once: raise max_allowed_packet, now {most}"
        )


def _executed(
    link: Link,
    build: Callable[[tuple[str, ...]], str],
    rows: Rows,
    now: float | None = None,
    lock: str = "",
) -> Any:
    """A cursor that has executed the statement for these rows."""
    varying, constant = split(rows)
    # As they are: every letter beyond ASCII would be two escapes for the server to undo.
    text = json.dumps(list(zip(*varying.values(), strict=True)), ensure_ascii=False)
    return _execute(link, build(tuple(varying)) + lock, {**constant, "rows": text, "now": now})


def _execute(link: Link, statement: str, values: Mapping[str, Any]) -> Any:
    """A cursor that has executed a statement."""
    cursor = raw_cursor(link)
    if sum(len(value) for value in values.values() if isinstance(value, str)) > _LONG:
        _check_length(link, cursor.mogrify(statement, values))
    cursor.execute(statement, values)
    return cursor
