"""MariaDB and MySQL through PyMySQL: each batch is one statement over a JSON document."""

import json
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from pymysql.constants import CR, ER
from pymysql.err import InterfaceError, MySQLError
from sqlalchemy import Connection, Table

from oncely.core.cases import Case, Row
from oncely.core.errors import KeysLocked, StoreError
from oncely.core.record import Key
from oncely.stores.sql.dialect import (
    Dialect,
    Fault,
    SqlConnection,
    granting,
    in_transaction,
)
from oncely.stores.sql.record_rows import (
    INSERTED,
    RENEWED,
    TIMES,
    UPDATED,
    WAITING,
    Columns,
    batches,
    believed,
    columns_of,
    kept,
    sought,
)
from oncely.stores.store import Believed

_Build = Callable[..., str]
"""Builds a statement from the columns that differ from row to row, and those that do not; and from
what else the statement depends on.
"""

# Else a column of a JSON document has only the letters of the database's default.
_TEXT = "LONGTEXT CHARACTER SET utf8mb4"
_ID, _DIGEST, _NAME, _STATUS = (
    f"VARCHAR({length}) CHARACTER SET utf8mb4" for length in (255, 64, 32, 50)
)
_TYPES = {
    **dict.fromkeys(("message_id", "provider", "destination", "own_id", "queue"), _ID),
    **dict.fromkeys(("fingerprint", "sent_at"), _DIGEST),
    **dict.fromkeys(("name", "lane"), _NAME),
    **dict.fromkeys(("metadata", "result", "type", "body", "headers", "source"), _TEXT),
    **dict.fromkeys(("content_type", "ordering_key", "error", "reason"), _TEXT),
    **dict.fromkeys(("attempts", "position"), "INT"),
    **dict.fromkeys(("fence", "version", "duplicates", "believed", "worker"), "BIGINT"),
    **dict.fromkeys(("lease_s", "delay_s"), "DOUBLE"),
    "status": _STATUS,
    **dict.fromkeys(("exhausted", "set_aside"), "TINYINT"),
}
_FEW = 100
"""The most rows for which an insert has a VALUES list."""
_EPOCH = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', {}) / 1e6"
_UTC = "SYSDATE(6) - INTERVAL TIMESTAMPDIFF(SECOND, UTC_TIMESTAMP(), NOW()) SECOND"
"""The time in UTC, whatever the session's time zone is. A session may have stopped the other clocks
(SET timestamp), and they tell when the statement began, before it waited for others.
"""
_NOW = "COALESCE(CAST('1970-01-01' AS DATETIME(6)) + INTERVAL %(now)s SECOND, {})"
_KEYS = (
    "JSON_TABLE(%(keys)s, '$[*]' COLUMNS"
    f" (message_id {_ID} PATH '$[0]', provider {_ID} PATH '$[1]')) AS k"
)
_SETTINGS = (
    # What a limit cuts off would seem not to be there.
    *("sql_select_limit = 18446744073709551615", "sql_safe_updates = 0", "sql_big_selects = 1"),
    # Else COMMIT begins a transaction, in which statements that commit by themselves do not.
    "completion_type = 'NO_CHAIN'",
    # Else SQLAlchemy cannot read how the tables are made.
    "sql_quote_show_create = 1",
)
_FLUSHED = (1, 3)
"""Where each commit is flushed to the disk before it is answered."""
_LOCK_WAIT_S = 1
_LOCK_WAIT = "SET innodb_lock_wait_timeout = {0}, lock_wait_timeout = {0}"
"""For rows, and for tables: the server's own limit for those is a day."""
_MAX_PACKET = "max_allowed_packet"
_LONG = 1 << 16
"""Characters from which on a statement may be too long for a server."""
_BYTES = 4
"""A character may take so many."""

_NUMBERING_LOCKED = 1467
_ROLLED_BACK = (ER.LOCK_DEADLOCK, ER.CHECKREAD, _NUMBERING_LOCKED)
_NO_TABLE = (ER.NO_SUCH_TABLE, ER.BAD_FIELD_ERROR)
_CONNECTION_KILLED = 1927
_MYSQL_KILLED, _MYSQL_IDLE = 3169, 4031
_LOST = (
    *(ER.SERVER_SHUTDOWN, ER.NORMAL_SHUTDOWN),
    *(_CONNECTION_KILLED, _MYSQL_KILLED, _MYSQL_IDLE),
)
_CLIENT_ERRORS = range(CR.CR_ERROR_FIRST, 3000)
"""Errors of the driver, about its connection."""
_TIMED_OUT = (1969, 3024)
_READ_ONLY = (ER.OPTION_PREVENTS_STATEMENT, 1792, 1836)
_DENIED = (
    *(ER.TABLEACCESS_DENIED_ERROR, ER.COLUMNACCESS_DENIED_ERROR, ER.DBACCESS_DENIED_ERROR),
    ER.SPECIFIC_ACCESS_DENIED_ERROR,
)
_EXPLAINED = {
    "SELECT": "SELECT * FROM {0}",
    "INSERT": "INSERT INTO {0} () VALUES ()",
    "UPDATE": "UPDATE {0} SET {1} = NULL",
    "DELETE": "DELETE FROM {0}",
}
_UNAVAILABLE = (
    *(ER.CON_COUNT_ERROR, ER.TOO_MANY_USER_CONNECTIONS, ER.USER_LIMIT_REACHED),
    *(ER.DISK_FULL, ER.RECORD_FILE_FULL, ER.OUTOFMEMORY, ER.OUT_OF_RESOURCES),
    *(ER.HOST_IS_BLOCKED, ER.QUERY_INTERRUPTED, *_TIMED_OUT),
)


def _weight(row: Row) -> int:
    """About how many bytes of metadata and results a row adds to a statement."""
    return sum(len(json.dumps(value)) for value in row[3:] if isinstance(value, dict | list | str))


class Mysql(Dialect):
    """One table. Rows are written in the order of their keys, so that no two writers deadlock.

    Neither server says which rows an UPDATE wrote, only how many. Where that is not all of them,
    it is rolled back. Then unchanged rows are found and locked first, and only these are written.
    """

    clock = _EPOCH.format(_UTC)
    # It has no index of some rows, and one of all states would cost each write a fifth more.
    samples = False
    position = "instr"
    always = "'1970-01-01'"
    to_migrate = (
        "to migrate, a role needs CREATE, ALTER, INDEX, SELECT, INSERT and UPDATE on the database"
    )
    insert_absent = "INSERT IGNORE INTO {}"
    skip_locked = "FOR UPDATE SKIP LOCKED"
    locked = "FOR UPDATE"
    # The server does not compare rows by an index.
    after_in_order = "(d.held_until > {0} OR d.held_until = {0} AND d.id > {1})"

    @property
    def moment(self) -> str:
        return _NOW.format(_UTC if self.is_inside else "SYSDATE(6)")

    def insert(self, link: SqlConnection, case: Case) -> set[Key]:
        rows, count = columns_of(case), len(case.rows)
        if self.is_inside or count <= _FEW:
            varying = {
                f"{name}_{n}": value
                for name, of in rows.varying.items()
                for n, value in enumerate(of)
            }
            statement = self._text(self._build_insertion, tuple(rows.varying), count)
            cursor = _execute(link, statement, {**rows.constant, **varying, "now": self.now()})
        else:
            cursor = self._executed(link, self._build_insert, rows)
        if self.is_inside:
            # Whether the row count includes existing rows depends on the session.
            has_inserted_all = count == 1 and bool(cursor.lastrowid)
        else:
            has_inserted_all = cursor.rowcount == count
        if has_inserted_all:
            return {row[0] for row in case.rows}
        # No two inserts under one key have the same version: these are ours.
        return self._unchanged(link, [(key, version) for key, _, version, *_ in case.rows])

    def update(self, link: SqlConnection, case: Case) -> set[Key]:
        return self._write(link, case, self._build_update, columns_of)

    def delete(self, link: SqlConnection, case: Case) -> set[Key]:
        return self._write(link, case, self._build_removal, lambda part: believed(part.rows))

    def rows_of(
        self, link: SqlConnection, keys: Sequence[Key], *, locks: bool
    ) -> Iterable[Sequence[Any]]:
        build = self._build_locking if locks else self._build_load
        return self._executed(link, build, sought(keys)).fetchall()  # type: ignore[no-any-return]

    def horizons(
        self, link: SqlConnection, consumers: Sequence[str], *, reads_anew: bool = False
    ) -> Mapping[str, float]:
        # A locking read sees the row as it is now. A purge waits for that lock.
        lock = " LOCK IN SHARE MODE" if self.is_inside and not reads_anew else ""
        return self._horizons_of(link, consumers, lock)

    def has_read_nothing(self, link: SqlConnection) -> bool:
        # Drivers do not know: they notice only writes.
        if not getattr(self._engine.dialect, "is_mariadb", False):
            return False
        return not self.run(link, "SELECT @@in_transaction").fetchone()[0]

    def consumer_written(self, column: str, *, only_later: bool = False) -> str:
        later = f"GREATEST(COALESCE({column}, %(value)s), %(value)s)"
        return (
            f"INSERT INTO {self.consumers_name} (provider, {column})"
            " VALUES (%(consumer)s, %(value)s)"
            f" ON DUPLICATE KEY UPDATE {column} = {later if only_later else '%(value)s'}"
        )

    @contextmanager
    def migrating(self, connection: Connection) -> Iterator[None]:
        # These servers do not change schemas in transactions: only the lock keeps others away.
        lock = f"oncely {self.name}"[:64]
        cursor: Any = connection.connection.cursor()
        cursor.execute("SELECT GET_LOCK(%s, 0)", (lock,))
        if cursor.fetchone()[0] != 1:
            raise KeysLocked(f"another program is migrating {self.name}")
        try:
            yield
        finally:
            cursor.execute("SELECT RELEASE_LOCK(%s)", (lock,))

    def unsafe_settings(self, link: SqlConnection) -> Sequence[str]:
        name = "innodb_flush_log_at_trx_commit"
        [value] = self.run(link, f"SELECT @@{name}").fetchone()
        if value in _FLUSHED:
            return []
        why = f"The server answers before a commit is on the disk ({name} {value}): a crash loses"
        return [f"{why} the newest, and messages completed then run again; write {name} = 1."]

    def grants(self, link: SqlConnection, needed: Sequence[tuple[str, Table]]) -> list[str]:
        def role() -> str:
            user, _, host = self.run(link, "SELECT CURRENT_USER()").fetchone()[0].rpartition("@")
            return f"'{user}'@'{host}'"

        return granting(self._lacking(link, needed), role)

    def _lacking(
        self, link: SqlConnection, needed: Sequence[tuple[str, Table]]
    ) -> Iterator[tuple[str, str]]:
        preparer, database = self._engine.dialect.identifier_preparer, self._engine.url.database
        for privilege, table in needed:
            name = self.name_of(table)
            if table.schema is None and database is not None:
                name = f"{preparer.quote_identifier(database)}.{name}"
            [column, *_] = map(preparer.format_column, table.c)
            try:
                # It needs the same as the statement, which is not run.
                self.run(link, f"EXPLAIN {_EXPLAINED[privilege].format(name, column)}")
            except MySQLError as error:
                if (fault := self.fault(error)) is Fault.DENIED:
                    yield privilege, name
                elif fault is not Fault.NO_TABLE:
                    raise

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
        if code == ER.LOCK_WAIT_TIMEOUT:
            return Fault.LOCKED
        if code in _NO_TABLE:
            return Fault.NO_TABLE
        if code in _LOST or code in _CLIENT_ERRORS or isinstance(error, InterfaceError):
            return Fault.LOST
        # The server's last words to a session that it ends may stand in the midst of an answer.
        if str(code).startswith("Packet sequence number wrong"):
            return Fault.LOST
        if code in _READ_ONLY:
            return Fault.READ_ONLY
        if code in _DENIED:
            return Fault.DENIED
        # PyMySQL raises OperationalError for nearly everything: only the code tells.
        return Fault.UNAVAILABLE if code in _UNAVAILABLE else Fault.OTHER

    def keep(self, link: SqlConnection, rows: Sequence[Mapping[str, Any]], *, renews: bool) -> None:
        # JSON has no type for bytes.
        encoded = [{**row, "body": b64encode(row["body"]).decode()} for row in rows]
        self._executed(link, self._build_keep, kept(encoded), renews)

    def later(self, seconds: str) -> str:
        return f"{self.moment} + INTERVAL {seconds} SECOND"

    def epoch_text(self, column: str) -> str:
        return _EPOCH.format(column)

    def heads(self, limit: int) -> str:
        # No range that begins at the value of another row is read from an index: some rows of each
        # lane are read.
        return (
            f"SELECT h.lane, h.id FROM {self.waiting_name} AS h WHERE h.queue = %(queue)s"
            f" AND h.set_aside = false AND h.lane > %(after)s ORDER BY h.lane, h.id LIMIT {limit:d}"
        )

    def of_keys(self, name: str) -> str:
        return (
            f"FROM {_KEYS} STRAIGHT_JOIN {name} AS d"
            " WHERE d.message_id = k.message_id AND d.provider = k.provider"
        )

    def removal(self, name: str) -> str:
        return f"DELETE d {self.of_keys(name)}"

    def loaded_text(self, column: str, of: str = "") -> str:
        return self.epoch_text(f"{of}{column}") if column in TIMES else f"{of}{column}"

    def batches(self, rows: Sequence[Row]) -> Iterable[Sequence[Row]]:
        return batches(rows, _weight)

    def prepare(self, connection: Any, record: Any) -> None:
        with connection.cursor() as cursor:
            # Gaps between keys stay unlocked, so that writers of neighbouring keys do not wait.
            cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
            cursor.execute("SET time_zone = '+00:00'")
            # A server, or the program for every connection of SQLAlchemy, may have set these.
            cursor.execute(f"SET {', '.join(_SETTINGS)}")
            # SQLAlchemy may have ended a transaction while that still began another.
            cursor.execute("ROLLBACK")
            cursor.execute(_LOCK_WAIT.format(_LOCK_WAIT_S))
            cursor.execute(f"SELECT @@{_MAX_PACKET}")
            record.info[_MAX_PACKET] = cursor.fetchone()[0]

    def lock_wait(self, link: SqlConnection, *, is_hurried: bool) -> str:  # noqa: ARG002
        # The unit is whole seconds; MySQL turns 0 into 1.
        return _LOCK_WAIT.format(0 if is_hurried else _LOCK_WAIT_S)

    # ---- Writing exactly what is unchanged -----------------------------------------------------

    def _write(
        self, link: SqlConnection, case: Case, build: _Build, columns: Callable[[Case], Columns]
    ) -> set[Key]:
        """Write the rows whose record is as believed; return their keys."""

        def write(part: Case) -> int:
            return int(self._executed(link, build, columns(part)).rowcount)

        rows = case.rows
        keys = {row[0] for row in rows}
        if len(rows) == 1:
            return keys if write(case) else set()
        if not self.is_inside:
            try:
                with in_transaction(link):
                    if write(case) < len(rows):
                        raise _NotAll
                return keys
            except _NotAll:
                pass
        with nullcontext() if self.is_inside else in_transaction(link):
            unchanged = self._unchanged(link, [row[:2] for row in rows], lock=True)
            if unchanged:
                write(case._replace(rows=[row for row in rows if row[0] in unchanged]))
            return unchanged

    def _unchanged(
        self, link: SqlConnection, rows: Sequence[Believed], *, lock: bool = False
    ) -> set[Key]:
        """The keys of records that the table has in the same version."""
        cursor = self._executed(link, self._build_find, believed(rows), lock)
        return {Key(*row) for row in cursor.fetchall()}

    def _executed(self, link: SqlConnection, build: _Build, rows: Columns, *more: bool) -> Any:
        """A cursor that has executed the statement for these rows."""
        varying, constant = rows
        # Not ASCII only: the server would have to decode an escape for every other character.
        text = json.dumps(list(zip(*varying.values(), strict=True)), ensure_ascii=False)
        statement = self._text(build, tuple(varying), tuple(constant), *more)
        return _execute(link, statement, {**constant, "rows": text, "now": self.now()})

    # ---- Statements ----------------------------------------------------------------------------

    def _build_insert(self, varying: tuple[str, ...], _: tuple[str, ...]) -> str:
        value = _values(varying)
        return (
            f"INSERT IGNORE INTO {self.name} ({', '.join(INSERTED)},"
            " lease_until, first_processed_at, last_processed_at)"
            f" SELECT {', '.join(value[name] for name in INSERTED)},"
            f" c.now + INTERVAL {value['lease_s']} SECOND, c.now, c.now"
            f" FROM {self._at_one_time(varying)}"
        )

    def _build_insertion(self, varying: tuple[str, ...], count: int) -> str:
        """An insert that is slower for many rows, but does not block other inserts while it waits
        for a transaction. An INSERT ... SELECT locks the AUTO_INCREMENT counter while it runs.
        """

        def row(n: int) -> str:
            value = {name: f"{name}_{n}" if name in varying else name for name in _TYPES}
            given = ", ".join(f"%({value[name]})s" for name in INSERTED)
            lease_until = f"first_processed_at + INTERVAL %({value['lease_s']})s SECOND"
            return f"({self.moment}, first_processed_at, {lease_until}, {given})"

        rows = ", ".join(map(row, range(count)))
        columns = ("first_processed_at", "last_processed_at", "lease_until", *INSERTED)
        written = f"INTO {self.name} ({', '.join(columns)}) VALUES {rows}"
        if not self.is_inside:
            return f"INSERT IGNORE {written}"
        # INSERT IGNORE takes a shared lock on an existing row. Two that lost would both keep
        # theirs, and deadlock as soon as they write. This takes an exclusive lock and changes
        # nothing; LAST_INSERT_ID then says that no id was given.
        return f"INSERT {written} ON DUPLICATE KEY UPDATE fence = fence + LAST_INSERT_ID(0)"

    def _build_keep(self, varying: tuple[str, ...], _: tuple[str, ...], renews: bool) -> str:
        if not renews:
            return f"INSERT IGNORE {self._kept(varying)}"
        names = (*RENEWED, "updated_at", "due_at", "held_until")
        renewed = ", ".join(f"{name} = VALUES({name})" for name in names)
        # After a joined table, ON would begin the condition of the join: WHERE separates the two.
        return f"INSERT {self._kept(varying)} WHERE true ON DUPLICATE KEY UPDATE {renewed}"

    def _kept(self, varying: tuple[str, ...]) -> str:
        value = _values(varying)
        given = {name: value[name] for name in WAITING}
        given["body"] = f"FROM_BASE64({value['body']})"
        due_at = f"c.now + INTERVAL {value['delay_s']} SECOND"
        return (
            f"INTO {self.waiting_name} ({', '.join(given)}, created_at, updated_at, due_at,"
            f" held_until) SELECT {', '.join(given.values())}, c.now, c.now, {due_at},"
            f" IF({value['delay_s']} > 0, {due_at}, {self.always})"
            f" FROM {self._at_one_time(varying)}"
        )

    def _build_update(self, varying: tuple[str, ...], constant: tuple[str, ...]) -> str:
        value, given = _values(varying), {*varying, *constant}
        written = "".join(f"t.{name} = {value[name]}, " for name in UPDATED if name in given)
        if "lease_s" in given:
            written += f"t.lease_until = {self.moment} + INTERVAL {value['lease_s']} SECOND, "
        return (
            f"UPDATE {self._joined(varying)} SET {written}"
            f"t.last_processed_at = {self.moment} {_where_unchanged(value)}"
        )

    def _build_removal(self, varying: tuple[str, ...], _: tuple[str, ...]) -> str:
        return f"DELETE t FROM {self._joined(varying)} {_where_unchanged(_values(varying))}"

    def _build_find(self, varying: tuple[str, ...], _: tuple[str, ...], lock: bool) -> str:
        which = f"{_where_unchanged(_values(varying))}{' FOR UPDATE' if lock else ''}"
        return f"SELECT t.provider, t.message_id FROM {self._joined(varying)} {which}"

    def _build_load(self, varying: tuple[str, ...], _: tuple[str, ...]) -> str:
        where = _where_key(_values(varying))
        return f"SELECT {self._loaded} FROM {self._joined(varying)} {where}"

    def _build_locking(self, varying: tuple[str, ...], _: tuple[str, ...]) -> str:
        where, locked_at = _where_key(_values(varying)), self.epoch_text(self.moment)
        return f"SELECT {self._loaded}, {locked_at} FROM {self._joined(varying)} {where} FOR UPDATE"

    def _at_one_time(self, varying: tuple[str, ...]) -> str:
        """The batch, with one time for all rows as `c.now`."""
        return " CROSS JOIN ".join((f"(SELECT {self.moment} AS now) AS c", *_rows_of(varying)))

    def _joined(self, varying: tuple[str, ...]) -> str:
        # The batch first, then the table by its key, so that no other rows are read.
        return " STRAIGHT_JOIN ".join((*_rows_of(varying), f"{self.name} AS t"))


def _values(varying: tuple[str, ...]) -> dict[str, str]:
    """Where the value of each column comes from."""
    return {name: f"k.{name}" if name in varying else f"%({name})s" for name in _TYPES}


def _rows_of(varying: tuple[str, ...]) -> list[str]:
    """The table `k` of the columns that differ from row to row, where any do."""
    columns = ", ".join(f"{name} {_TYPES[name]} PATH '$[{n}]'" for n, name in enumerate(varying))
    return [f"JSON_TABLE(%(rows)s, '$[*]' COLUMNS ({columns})) AS k"] if varying else []


def _where_key(value: dict[str, str]) -> str:
    return f"WHERE t.message_id = {value['message_id']} AND t.provider = {value['provider']}"


def _where_unchanged(value: dict[str, str]) -> str:
    return f"{_where_key(value)} AND t.version = {value['believed']}"


class _NotAll(Exception):
    """Fewer rows were written than were given."""


def _execute(link: SqlConnection, statement: str, values: Mapping[str, Any]) -> Any:
    """A cursor that has executed a statement."""
    cursor = link.connection.cursor()
    # The server disconnects at a statement that is too long.
    length = len(statement) + sum(len(v) for v in values.values() if isinstance(v, str))
    if length > _LONG and length * _BYTES >= link.info[_MAX_PACKET]:
        written, most = len(cursor.mogrify(statement, values).encode()), link.info[_MAX_PACKET]
        if written >= most:
            raise StoreError(
                f"a statement of {written} bytes is too long for the server: raise "
                f"max_allowed_packet, now {most}"
            )
    cursor.execute(statement, values)
    return cursor
