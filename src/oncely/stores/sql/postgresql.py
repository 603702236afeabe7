"""PostgreSQL through psycopg: each batch is one statement over arrays, and commits by itself."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from typing import Any, cast

import psycopg
from sqlalchemy import ColumnElement, Connection, Select, Table, literal_column, select
from sqlalchemy.schema import CreateIndex

from oncely._util.clock import monotonic
from oncely.core.cases import Case, Row
from oncely.core.errors import KeysLocked
from oncely.core.record import Key, State
from oncely.core.waiting import digest
from oncely.stores.sql.dialect import (
    HURRIED,
    Dialect,
    Fault,
    Sample,
    SqlConnection,
    granting,
    in_transaction,
)
from oncely.stores.sql.postgresql_listener import PostgresqlListener
from oncely.stores.sql.record_rows import (
    INSERTED,
    MOST_ROWS,
    TIMES,
    UPDATED,
    WAITING,
    Columns,
    believed,
    columns_of,
    kept,
    sought,
)

_Build = Callable[[tuple[str, ...], tuple[str, ...]], str]
"""Builds a statement from the columns that differ from row to row, and those that do not."""

_TYPES = {
    **dict.fromkeys(("attempts", "position"), "int4"),
    **dict.fromkeys(("fence", "version", "duplicates", "believed", "worker"), "int8"),
    **dict.fromkeys(("lease_s", "delay_s"), "float8"),
    "exhausted": "bool",
    "set_aside": "bool",
    "body": "bytea",
}
"""The types of columns that are not sent as text."""
_NOW = "coalesce(to_timestamp(%(now)s::float8), clock_timestamp())"
_FEW = f"LIMIT (SELECT {MOST_ROWS})"
"""The end of a subquery. It keeps the planner from flattening the subquery. Its value is unknown to
the planner, which then expects few rows: so it looks up joined rows by their key in a table of any
size, analysed or not, and also in a kept plan that was made while the table was small.
"""
_LOCK_WAIT_MS = 1500
"""Longer than the server waits before it looks for a deadlock, so that a victim gets that error."""
_HURRIED_WAIT_MS = 20
_MIGRATION_WAIT_MS = 300
"""Whoever comes while a migration waits for the lock of a table waits behind it."""
_LIMITED = "lock_timeout"
"""The note that a session of ours has the limit by itself."""
_ROWS_IN_A_PAGE = 10
"""At least: some 40 of the smallest fit, but pages hold dead rows as well. More pages make a better
estimate, since each is in the sample or not by chance.
"""
_TELL_S = 0.05
"""One process notifies others that messages have come at most this often."""
_KEYS = (
    "(SELECT * FROM unnest((SELECT %(message_ids)s::text[]), (SELECT %(providers)s::text[]))"
    f" AS u (message_id, provider) {_FEW}) AS k"
)
_OF_KEY = "WHERE d.message_id = k.message_id AND d.provider = k.provider"
_THIS = "WHERE t.message_id = k.message_id AND t.provider = k.provider"

_READS_ANEW = "current_setting('transaction_isolation') LIKE 'read%%'"
"""Whether each statement sees what was committed before it, and not only before the first."""

_ROLLED_BACK = ("40001", "40P01")
_LOCKED = "55P03"
_NO_TABLE = ("42P01", "42703", "3F000")
_READ_ONLY = "25006"
"""The error of a server before or after a failover."""
_DENIED = "42501"
_SHUT_DOWN = ("57P01", "57P02", "57P03", "57P05")


class Postgresql(Dialect):
    """One table. Rows are written in the order of their keys, so that no two writers deadlock."""

    clock = "extract(epoch FROM clock_timestamp())::float8"
    position = "strpos"
    always = "to_timestamp(0)"
    to_migrate = "to migrate, a role needs CREATE and USAGE on the schema, and to own its tables"
    puts = True
    _told_at = -math.inf
    skip_locked = "FOR UPDATE OF d SKIP LOCKED"
    locked = "FOR UPDATE OF d"
    moment = _NOW
    # Not a number: where the planner expects fewer rows, as in a table that was never analysed, it
    # reads all that fit, and sorts them for each page.
    limit = "LIMIT (SELECT {0:d})"
    # No equality: as `is_free` says.
    in_lane = "h.lane BETWEEN {0} AND {0} ORDER BY h.lane, h.id"

    def prepare(self, connection: Any, record: Any) -> None:
        # A session that is a pooler's, and not the one that was connected to, goes to other
        # programs as it is.
        limit = (
            "SELECT CASE WHEN pg_backend_pid() = %s THEN"
            f" set_config('lock_timeout', '{_LOCK_WAIT_MS}', false) END"
        )
        [limited] = connection.execute(limit, [connection.info.backend_pid]).fetchone()
        record.info[_LIMITED] = limited is not None

    def lock_wait(self, link: SqlConnection, *, is_hurried: bool) -> str | None:
        wait_ms = _HURRIED_WAIT_MS if is_hurried else _LOCK_WAIT_MS
        return f"SET lock_timeout = {wait_ms}" if link.info[_LIMITED] else None

    def transaction(self, connection: Connection) -> AbstractContextManager[None]:
        # Set for each transaction, whatever the session has: behind a pooler, the session is
        # shared.
        limit = f"SET LOCAL lock_timeout = {_wait_ms(connection)}"
        return in_transaction(connection, f"BEGIN ISOLATION LEVEL READ COMMITTED; {limit}")

    def insert(self, link: SqlConnection, case: Case) -> set[Key]:
        return _written(self._executed(link, self._build_insert, columns_of(case)), case.rows)

    def completed(
        self, link: SqlConnection, consumer: str, message_ids: Sequence[str], seen_within_s: float
    ) -> Mapping[str, float]:
        values = {"message_ids": message_ids, "provider": consumer, "within_s": seen_within_s}
        statement = self._text(self._build_completed, (), ())
        found = self._execute(link, statement, {**values, "now": self.now()}, prepare=True)
        return dict(found.fetchall())

    def update(self, link: SqlConnection, case: Case) -> set[Key]:
        return _written(self._executed(link, self._build_update, columns_of(case)), case.rows)

    def delete(self, link: SqlConnection, case: Case) -> set[Key]:
        return _written(self._executed(link, self._build_removal, believed(case.rows)), case.rows)

    def run(
        self, link: SqlConnection, statement: str, values: Mapping[str, Any] | None = None
    ) -> Any:
        return self._execute(link, statement, values or {})

    def selected(self, link: Connection, chosen: Select[Any]) -> Sequence[Sequence[Any]]:
        compiled = chosen.compile(link, compile_kwargs={"render_postcompile": True})
        return self.run(link, str(compiled), compiled.params).fetchall()  # type: ignore[no-any-return]

    def rows_of(
        self, link: SqlConnection, keys: Sequence[Key], *, locks: bool
    ) -> Iterable[Sequence[Any]]:
        build = self._build_locking if locks else self._build_load
        return self._executed(link, build, sought(keys)).fetchall()

    def sample_ids(self, link: SqlConnection, number: int) -> Sequence[str]:
        # By pages, since the table has no index of row numbers. A page has dozens of rows, which
        # may have come one after another; a few times as many ids are enough.
        statement = (
            f"SELECT message_id FROM {self.name} TABLESAMPLE SYSTEM"
            f" ({self._share_of_pages(link, number)}) ORDER BY message_id"
        )
        return [row[0] for row in self.run(link, statement).fetchall()]

    def sample(self, link: SqlConnection, number: int) -> Sample:
        share = self._share_of_pages(link, max(1, number // _ROWS_IN_A_PAGE))
        rows = self.run(
            link,
            f"SELECT provider, status, duplicates FROM {self.name} TABLESAMPLE SYSTEM ({share})",
        ).fetchall()
        return Sample(rows, 100 * len(rows) / share)

    def _share_of_pages(self, link: SqlConnection, pages: int) -> float:
        """So many pages of the table, in per cent."""
        size = f"pg_relation_size('{self.name}') / current_setting('block_size')::int"
        all_pages: int = self.run(link, f"SELECT greatest(1, {size})").fetchone()[0]
        return min(100.0, 100.0 * pages / all_pages)

    def purge(
        self,
        connection: Connection,
        condition: ColumnElement[bool],
        limit: int,
        horizon: float,
        *,
        steps: bool,
        after: str,
    ) -> tuple[int, str]:
        # PostgreSQL 14 and later read the table from that place on; older versions skip the rows
        # before it. Rows that another cleaner or a worker has locked are left to it.
        chosen: Select[Any] = (
            select(literal_column("tableoid, ctid"))
            .select_from(self.table)
            .where(condition, literal_column(f"ctid > '{after or '(0,0)'}'::tid"))
            .limit(limit)
            .with_for_update(skip_locked=True)
        )
        compiled = chosen.compile(connection, compile_kwargs={"render_postcompile": True})
        # In a table with partitions, rows of several have the same place.
        removal = (
            f"DELETE FROM {self.name} AS d USING chosen AS c"
            " WHERE d.ctid = ANY (ARRAY (SELECT ctid FROM chosen))"
            " AND d.ctid = c.ctid AND d.tableoid = c.tableoid"
            " RETURNING d.ctid AS place, d.message_id, d.provider"
        )
        of_steps = f"DELETE FROM {self.steps_name} AS d USING gone AS k {_OF_KEY}"
        # Always in the same order, so that no two purges deadlock.
        raised = (
            f"INSERT INTO {self.consumers_name} AS c (provider, forgotten_until)"
            " SELECT DISTINCT provider, %(horizon)s::float8 FROM gone ORDER BY provider"
            " ON CONFLICT (provider) DO UPDATE SET forgotten_until ="
            " greatest(c.forgotten_until, excluded.forgotten_until)"
        )
        statement = (
            f"WITH chosen AS MATERIALIZED ({compiled}), gone AS ({removal}),"
            f" raised AS ({raised}){f', steps AS ({of_steps})' if steps else ''}"
            " SELECT count(*) OVER (), place::text FROM gone ORDER BY place DESC LIMIT 1"
        )
        parameters = {**compiled.params, "horizon": horizon}
        # In a transaction with a lock timeout: the row of a consumer may be locked by another.
        with self.transaction(connection):
            last = connection.exec_driver_sql(statement, parameters).one_or_none()
        return (last[0], last[1]) if last else (0, after)

    def horizons(
        self,
        link: SqlConnection,
        consumers: Sequence[str],
        *,
        reads_anew: bool = False,  # noqa: ARG002 - the same statement asks the server.
    ) -> Mapping[str, float]:
        asked = (
            f"SELECT k.provider, c.forgotten_until, {_READS_ANEW}"
            " FROM unnest(%(providers)s::text[]) AS k (provider)"
            f" LEFT JOIN {self.consumers_name} AS c ON c.provider = k.provider"
        )
        rows = self.run(link, asked, {"providers": list(consumers)}).fetchall()
        if all(reads_anew for _, _, reads_anew in rows):
            return {consumer: at for consumer, at, _ in rows if at is not None}
        # Both statements fail with a serialization failure where the row is newer than the
        # transaction's snapshot. A purge does not wait for this kind of lock, once the row exists.
        for consumer in consumers:
            self.run(
                link,
                f"INSERT INTO {self.consumers_name} (provider) VALUES (%(consumer)s)"
                " ON CONFLICT DO NOTHING",
                {"consumer": consumer},
            )
        return self._horizons_of(link, consumers, " FOR KEY SHARE")

    @contextmanager
    def migrating(self, connection: Connection) -> Iterator[None]:  # noqa: ARG002 - see below.
        # On a session of its own, which holds no snapshot: an index that is built beside writers
        # waits for all that do.
        lock = f"SELECT pg_try_advisory_xact_lock(hashtext('oncely'), hashtext('{self.name}'))"
        with self._connected() as alone:
            alone.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
            with alone.transaction():
                if alone.execute(lock.encode()).fetchone() != (True,):
                    raise KeysLocked(f"another program is migrating {self.name}")
                yield

    def altering(self, connection: Connection) -> AbstractContextManager[None]:
        begin = "BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL lock_timeout ="
        return in_transaction(connection, f"{begin} {_MIGRATION_WAIT_MS}")

    def index_beside(self, connection: Connection) -> None:
        [index] = self.table.indexes
        name = connection.dialect.identifier_preparer.format_index(index)
        path = f"{self.name.rpartition('.')[0]}.{name}".removeprefix(".")
        cursor = connection.connection.cursor()
        cursor.execute(f"SELECT indisvalid FROM pg_index WHERE indexrelid = to_regclass('{path}')")
        found = cursor.fetchone()
        if found == (True,):
            return
        # It waits for transactions, but nobody waits for it.
        if connection.info[_LIMITED]:
            cursor.execute("SET lock_timeout = 0")
        try:
            if found is not None:
                # What is left of one that was broken off.
                cursor.execute(f"DROP INDEX CONCURRENTLY {path}")
            create = str(CreateIndex(index).compile(connection))
            cursor.execute(create.replace(" INDEX ", " INDEX CONCURRENTLY ", 1))
        finally:
            if (limit := self.lock_wait(connection, is_hurried=False)) is not None:
                cursor.execute(limit)

    def unsafe_settings(self, link: SqlConnection) -> Sequence[str]:
        asked = (
            "SELECT current_setting('fsync'), current_setting('synchronous_commit'),"
            " current_setting('server_encoding'), (SELECT c.relpersistence::text FROM pg_class AS c"
            " WHERE c.oid = to_regclass(%(table)s))"
        )
        fsync, commit, encoding, persistence = self.run(
            link, asked, {"table": self.name}
        ).fetchone()
        found = []
        if "off" in (fsync, commit):
            name = "fsync" if fsync == "off" else "synchronous_commit"
            found.append(
                f"PostgreSQL answers before a commit is on the disk ({name} off): a crash loses the"
                f" newest, and messages completed then run again; write {name} = on."
            )
        if persistence == "u":
            found.append(
                f"{self.name} is UNLOGGED: a crash of the server empties it, and all messages run"
                f" again; type: ALTER TABLE {self.name} SET LOGGED"
            )
        if encoding != "UTF8":
            found.append(
                f"The database of {self.name} has the encoding {encoding}: a message with letters"
                " that it lacks cannot be stored; make a database with ENCODING 'UTF8'."
            )
        return found

    def grants(self, link: SqlConnection, needed: Sequence[tuple[str, Table]]) -> list[str]:
        # Without the schema, its tables seem not to be there. What numbers rows, unless it is an
        # identity, is a sequence, which has privileges of its own.
        asked = (
            "WITH k AS (SELECT privilege, name, to_regclass(name) AS oid FROM"
            " unnest(%(privileges)s::text[], %(names)s::text[]) AS u (privilege, name))"
            " SELECT privilege, name FROM k WHERE NOT has_table_privilege(oid, privilege)"
            " UNION ALL SELECT 'USAGE', 'SEQUENCE ' || s.oid::regclass::text FROM k"
            " JOIN pg_depend AS d ON d.refobjid = k.oid AND d.deptype = 'a'"
            " JOIN pg_class AS s ON s.oid = d.objid WHERE k.privilege = 'INSERT' AND CASE"
            " WHEN s.relkind = 'S' THEN NOT has_sequence_privilege(s.oid, 'USAGE, UPDATE') END"
        )
        schema = (
            "SELECT 'USAGE', 'SCHEMA ' || quote_ident(nspname) FROM pg_namespace"
            " WHERE nspname = coalesce(%(schema)s::text, current_schema(), 'public')"
            " AND NOT has_schema_privilege(oid, 'USAGE')"
        )
        values = {
            "privileges": [privilege for privilege, _ in needed],
            "names": [self.name_of(table) for _, table in needed],
        }
        lacking = (
            self.run(link, schema, {"schema": self.table.schema}).fetchall()
            or self.run(link, asked, values).fetchall()
        )
        role = "SELECT quote_ident(current_user)"
        return granting(lacking, lambda: str(self.run(link, role).fetchone()[0]))

    def size(self, connection: Connection) -> int | None:
        found = self.run(connection, f"SELECT pg_total_relation_size('{self.name}')")
        return int(found.fetchone()[0])

    def fault(self, error: Exception) -> Fault:
        # psycopg2 has another name for it. Types are compared by name, since a caller's driver may
        # be another one.
        state = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None) or ""
        kinds = {kind.__name__ for kind in type(error).__mro__}
        if state in _ROLLED_BACK:
            return Fault.ROLLED_BACK
        if state == _LOCKED:
            return Fault.LOCKED
        if state in _NO_TABLE:
            return Fault.NO_TABLE
        if state in _SHUT_DOWN or state.startswith("08"):
            return Fault.LOST
        if not state and kinds & {"OperationalError", "InterfaceError"}:
            return Fault.LOST
        if state == _READ_ONLY:
            return Fault.READ_ONLY
        if state == _DENIED:
            return Fault.DENIED
        return Fault.UNAVAILABLE if "OperationalError" in kinds else Fault.OTHER

    def keep(self, link: SqlConnection, rows: Sequence[Mapping[str, Any]], *, renews: bool) -> None:
        varying, constant = kept(rows)
        statement = self._text(self._build_keep, tuple(varying), tuple(constant), renews)
        values = {**varying, **constant, "now": self.now(), "tells": self._is_to_tell()}
        self._execute(link, statement, values, prepare=True)

    def put(self, link: SqlConnection, rows: Columns) -> None:
        varying, constant = rows
        statement = self._text(self._build_put, tuple(varying), tuple(constant))
        values = {**varying, **constant, "now": self.now(), "tells": self._is_to_tell()}
        # ON CONFLICT, which would skip existing rows, would cost a third of the time.
        with suppress(psycopg.errors.UniqueViolation):
            self._execute(link, statement, values, prepare=True)

    def tell(self, link: SqlConnection) -> None:
        if self._is_to_tell():
            self.run(link, f"SELECT {self._told}", {"tells": True})

    def _is_to_tell(self) -> bool:
        """Whether the last notification is long enough ago: transactions that notify commit one
        after another.
        """
        now = monotonic()
        if now - self._told_at < _TELL_S:
            return False
        self._told_at = now
        return True

    def listener(self, notify: Callable[[], None]) -> PostgresqlListener:
        return PostgresqlListener(self._connected, self._channel, notify)

    @contextmanager
    def _connected(self) -> "Iterator[psycopg.Connection[tuple[Any, ...]]]":
        """A separate connection: those of the pool may all be taken."""
        pool = self._engine.pool.recreate()
        try:
            with closing(pool.connect()) as proxied:
                connection = cast("psycopg.Connection[tuple[Any, ...]]", proxied.driver_connection)
                connection.autocommit = True
                yield connection
        finally:
            pool.dispose()

    @property
    def _channel(self) -> str:
        return f"oncely_{digest(self.tables.waiting.schema or '', self.tables.waiting.name)}"

    @property
    def _told(self) -> str:
        return f"CASE WHEN %(tells)s::bool THEN pg_notify('{self._channel}', '') END"

    def later(self, seconds: str) -> str:
        return f"{_NOW} + {seconds}::float8 * interval '1 second'"

    def epoch_text(self, column: str) -> str:
        return f"extract(epoch FROM {column})::float8"

    def of_keys(self, name: str) -> str:
        return f"FROM {_KEYS}, {name} AS d {_OF_KEY}"

    def removal(self, name: str) -> str:
        return f"DELETE FROM {name} AS d USING {_KEYS} {_OF_KEY}"

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

    def _executed(
        self, link: SqlConnection, build: _Build, rows: Columns
    ) -> "psycopg.Cursor[tuple[Any, ...]]":
        """A cursor that has executed the statement for these rows."""
        varying, constant = rows
        statement = self._text(build, tuple(varying), tuple(constant))
        values = {**varying, **constant, "now": self.now()}
        return self._execute(link, statement, values, prepare=True)

    def _execute(
        self, link: SqlConnection, statement: str, values: Mapping[str, Any], **how: Any
    ) -> "psycopg.Cursor[tuple[Any, ...]]":
        cursor: psycopg.Cursor[tuple[Any, ...]] = link.connection.cursor()
        is_limited = self.is_inside or link.info[_LIMITED]
        with nullcontext() if is_limited else _limited(cursor.connection, _wait_ms(link)):
            # As text, a session's `extra_float_digits` may cut times off.
            cursor.execute(statement, values, binary=True, **how)
        return cursor

    def _rows(self, varying: tuple[str, ...], constant: tuple[str, ...]) -> str:
        """The table `k` of the batch: a row for each record, with its values and the time."""
        # The planner does not know the length of an array that comes from a subquery.
        arrays = ", ".join(f"(SELECT %({name})b::{_type(name)}[])" for name in varying)
        singles = [f"{_parameter(name)} AS {name}" for name in (*constant, "now")]
        columns = ", ".join((*varying, *singles))
        source = f" FROM unnest({arrays}) AS u ({', '.join(varying)}) {_FEW}" if varying else ""
        return f"(SELECT {columns}{source}) AS k"

    def _build_insert(self, varying: tuple[str, ...], constant: tuple[str, ...]) -> str:
        value = "k.".__add__
        return (
            f"INSERT INTO {self.name} ({', '.join(INSERTED)}, lease_until,"
            " first_processed_at, last_processed_at)"
            f" SELECT {', '.join(_given(name, value) for name in INSERTED)},"
            f" {_lease_end(value)}, now, now"
            f" FROM {self._rows(varying, constant)}"
            f" ON CONFLICT DO NOTHING{_returning(varying)}"
        )

    def _build_update(self, varying: tuple[str, ...], constant: tuple[str, ...]) -> str:
        given, value = {*varying, *constant}, _values(varying)
        written = "".join(f"{name} = {_given(name, value)}, " for name in UPDATED if name in given)
        if "lease_s" in given:
            written += f"lease_until = {_lease_end(value)}, "
        source = f" FROM {self._rows(varying, constant)}" if varying else ""
        return (
            f"UPDATE {self.name} AS t SET {written}last_processed_at = {value('now')}"
            f"{source} {_unchanged(value)}{_returning(varying, 't.')}"
        )

    def _build_removal(self, varying: tuple[str, ...], constant: tuple[str, ...]) -> str:
        source = f" USING {self._rows(varying, constant)}" if varying else ""
        where = _unchanged(_values(varying))
        return f"DELETE FROM {self.name} AS t{source} {where}{_returning(varying, 't.')}"

    def _build_load(self, varying: tuple[str, ...], constant: tuple[str, ...]) -> str:
        rows = self._rows(varying, constant)
        return f"SELECT {self._loaded} FROM {rows}, {self.name} AS t {_THIS}"

    def _build_completed(self, _: tuple[str, ...], __: tuple[str, ...]) -> str:
        # The server filters the rows: to filter them here would take longer.
        return (
            f"SELECT t.message_id, {self.epoch_text('t.first_processed_at')} FROM (SELECT * FROM"
            f" unnest((SELECT %(message_ids)s::text[])) AS u (message_id) {_FEW}) AS k,"
            f" {self.name} AS t WHERE t.message_id = k.message_id AND t.provider = %(provider)s"
            f" AND t.status = '{State.COMPLETED.value}'"
            f" AND t.last_processed_at > {_NOW} - %(within_s)s * interval '1 second'"
        )

    def _build_locking(self, varying: tuple[str, ...], constant: tuple[str, ...]) -> str:
        rows, at = self._rows(varying, constant), self.epoch_text("k.now")
        found = f"FROM {rows}, {self.name} AS t {_THIS}"
        return f"SELECT {self._loaded}, {at} {found} FOR UPDATE OF t"

    def _build_put(self, varying: tuple[str, ...], constant: tuple[str, ...]) -> str:
        columns = (*varying, *constant)
        arrays = ", ".join(f"%({name})b::{_type(name)}[]" for name in varying)
        source = f", unnest({arrays}) AS u ({', '.join(varying)})" if varying else ""
        singles = "".join(f", %({name})b::{_type(name)}" for name in constant)
        given = "".join(f"{name}, " for name in varying)[:-2] + singles
        return (
            f"WITH c AS MATERIALIZED (SELECT {_NOW} AS now, {self._told})"
            f" INSERT INTO {self.waiting_name}"
            f" ({', '.join(columns)}, created_at, updated_at, due_at, held_until)"
            f" SELECT {given.removeprefix(', ')}, c.now, c.now, c.now, {self.always} FROM c{source}"
        )

    def _build_keep(self, varying: tuple[str, ...], constant: tuple[str, ...], renews: bool) -> str:
        due_at = "now + delay_s * interval '1 second'"
        columns = ", ".join(WAITING)
        # Notified in the same statement: a separate one would cost another exchange.
        return (
            f"WITH kept AS (INSERT INTO {self.waiting_name}"
            f" ({columns}, created_at, updated_at, due_at, held_until)"
            f" SELECT {columns}, now, now, {due_at}, CASE WHEN delay_s > 0 THEN {due_at}"
            f" ELSE {self.always} END FROM {self._rows(varying, constant)}"
            f" {self.on_conflict(renews=renews)} RETURNING id)"
            f" SELECT {self._told} FROM kept LIMIT 1"
        )


def _wait_ms(link: SqlConnection) -> int:
    """How long statements on a connection of ours wait for locks."""
    return _HURRIED_WAIT_MS if link.info.get(HURRIED) else _LOCK_WAIT_MS


@contextmanager
def _limited(connection: "psycopg.Connection[Any]", wait_ms: int) -> Iterator[None]:
    """Let a statement on a pooler's session wait for locks no longer than ours do. The limit is
    sent before it, in the same message: the lock of a table is waited for before the statement
    itself begins.
    """
    with connection.pipeline():
        connection.execute(f"SELECT set_config('lock_timeout', '{wait_ms}', true)".encode())
        yield


def _values(varying: tuple[str, ...]) -> Callable[[str], str]:
    """The value of a column: of the batch `k` or, where it is a single row, which needs no
    subquery, of the parameters.
    """
    return "k.".__add__ if varying else _parameter


def _parameter(name: str) -> str:
    return _NOW if name == "now" else f"%({name})b::{_type(name)}"


def _lease_end(value: Callable[[str], str]) -> str:
    return f"{value('now')} + {value('lease_s')} * interval '1 second'"


def _unchanged(value: Callable[[str], str]) -> str:
    key = " AND ".join(f"t.{name} = {value(name)}" for name in ("message_id", "provider"))
    return f"WHERE {key} AND t.version = {value('believed')}"


def _given(name: str, value: Callable[[str], str]) -> str:
    """The value of a column as the table takes it."""
    return f"{value(name)}::jsonb" if name == "metadata" else value(name)


def _type(name: str) -> str:
    return _TYPES.get(name, "text")


def _returning(varying: tuple[str, ...], of: str = "") -> str:
    """RETURNING the keys that were written; for a single row, the row count says enough."""
    return f" RETURNING {of}provider, {of}message_id" if varying else ""


def _written(cursor: "psycopg.Cursor[tuple[Any, ...]]", rows: Sequence[Row]) -> set[Key]:
    """The keys that a statement has written, of those that it was given."""
    if cursor.rowcount == len(rows):
        # The usual case: the returned rows need not be read.
        return {row[0] for row in rows}
    return {Key(*row) for row in cursor.fetchall()} if len(rows) > 1 else set()
