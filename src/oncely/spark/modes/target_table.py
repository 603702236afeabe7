"""A user's table in the ledger's database: its description, writing rows to it, and refusals; and
the columns of a DataFrame for it, checked before anything is written, with values in the form that
is written.
"""

import warnings
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from difflib import get_close_matches
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import pyarrow as pa
from pyarrow import Array, Buffer, RecordBatch, csv
from pyspark.sql.types import StructType
from sqlalchemy import Column, Connection, Engine, MetaData, Table, event, inspect, types
from sqlalchemy.exc import NoSuchTableError, SAWarning
from sqlalchemy.sql.sqltypes import NullType

from oncely.core.errors import ConfigError, StoreUnavailable, describe
from oncely.ledger.ledger import Ledger
from oncely.spark.ledgers import url_here
from oncely.spark.option_values import unknown
from oncely.spark.sink.message_rows import (
    BROKEN_COLUMN,
    COLUMNS_OF_ROWS,
    ROW_COLUMN,
    check_types,
    in_utc,
)
from oncely.spark.sink.sink_options import SinkOptions
from oncely.stores.names import TABLE_NAME
from oncely.stores.open_store import check_transactions, sqlite_file
from oncely.stores.sql.engines import session_engine, sqlite_engine
from oncely.upsert import check_columns, upsert

Kind = Literal["text", "integer", "number", "truth", "date", "moment", "bytes", "other"]
"""The kind of a column's values; "other" is a type that only the database knows."""

_KINDS: Sequence[tuple[Kind, tuple[type[Any], ...]]] = (
    ("truth", (types.Boolean,)),
    ("integer", (types.Integer,)),
    ("number", (types.Numeric, types.Float)),
    ("moment", (types.DateTime,)),
    ("date", (types.Date,)),
    ("bytes", (types.LargeBinary, types.BINARY, types.VARBINARY)),
    ("text", (types.String,)),
)

_SERVERS_CLASSES = frozenset(
    ("08", "0A", "0B", "0L", "0P", "25", "26", "28", "2B", "2D", "34", "3B", "3D", "3F", "40")
).union(("42", "53", "55", "57", "58", "72", "F0", "HV", "XX"))
"""The classes of PostgreSQL's states for faults of a server, a session or a statement, which affect
every row. All others are a row's: its values, their length or depth, constraints, and errors of
triggers, also with states of their own."""
_ROWS_CLASSES = frozenset(("22", "23", "44", "45"))
"""MariaDB and MySQL put most errors into a general class. These codes are a row's."""
_ROWS_NUMBERS = frozenset((1118, 1153, 1301, 1366, 1526, 1644, 1713, 1748, 3819, 4025))
"""So are these of their errors: a row, a value or what comes of it is too large; a value of the
wrong kind; no partition for it; a trigger's own word; and constraints that are not held."""
_ROWS_KINDS = frozenset(("DataError", "IntegrityError"))
_MALFORMED = "malformed JSON"
"""SQLite's message if an index or a check reads JSON; its code is the general one."""
_WHOLE = ("tinyint", "smallint", "int", "bigint")
_TYPES: dict[Kind, tuple[str, Sequence[str]]] = {
    "text": ("STRING", ("string", "char", "varchar")),
    "integer": ("BIGINT", (*_WHOLE, "boolean")),
    "number": ("DECIMAL(38, 9)", (*_WHOLE, "float", "double", "decimal")),
    "truth": ("BOOLEAN", ("boolean",)),
    "date": ("DATE", ("date",)),
    "moment": ("TIMESTAMP", ("timestamp", "timestamp_ntz", "date")),
    "bytes": ("BINARY", ("binary",)),
    "other": ("STRING", ("string",)),
}
"""The Spark type to cast to for a column, and all that it accepts. A column of an unknown kind gets
text."""
_NESTED = ("array", "map", "struct", "variant")
_ID = "id"
_MOST_ROWS = 200_000
_MOST_BYTES = 64_000_000


class TargetColumn(NamedTuple):
    """A column of the table."""

    kind: Kind
    type: str
    """The type, in the database's words."""
    is_filled: bool
    """Whether the database fills in a value if a row has none."""
    is_required: bool
    """Whether a row without a value for it is refused."""


class TargetTable:
    """An existing table. Rows are written in transactions of `begin`."""

    def __init__(
        self, engine: Engine, table: Table, key: Sequence[str], sequence_by: str | None
    ) -> None:
        self._engine = engine
        self._table = table
        self._key = key
        self._sequence_by = sequence_by
        self.columns = {column.name: _described(column, engine) for column in table.columns}
        self._is_copied_to = engine.dialect.name == "postgresql"
        """Whether rows are written as CSV, by COPY; else as values."""
        self.name = engine.dialect.identifier_preparer.format_table(table)
        """The quoted name for statements."""
        for column in table.columns if not self._is_copied_to else ():
            # SQLAlchemy would encode text that is JSON already, and requires objects for times.
            if self.columns[column.name].kind == "other":
                column.type = types.String()

    def begin(self) -> AbstractContextManager[Connection]:
        """A connection in a transaction, which is committed at the end."""
        return self._engine.begin()

    def written(self, names: Sequence[str]) -> list[str]:
        """Those of a DataFrame's columns that are written.

        The message id is written if the table has a column `id` that the database does not fill
        itself.
        """
        id_ = self.columns.get(_ID)
        is_stored = id_ is not None and not id_.is_filled
        own = () if is_stored else (_ID,)
        return [name for name in names if name not in (*own, ROW_COLUMN, BROKEN_COLUMN)]

    def check(self, schema: StructType) -> None:
        """Raise ConfigError for a DataFrame whose rows do not fit into the table."""
        check_types(schema, COLUMNS_OF_ROWS)
        types = {field.name: field.dataType.simpleString() for field in schema.fields}
        names = self.written(list(types))
        for name in names:
            if name not in self.columns:
                raise ConfigError(
                    f"column {unknown(name, self.columns, f'column in the table {self.name}')}"
                )
            if name != _ID:
                self._check_type(name, types[name])
        for name, column in self.columns.items():
            if column.is_required and name not in names:
                raise ConfigError(
                    f"the DataFrame has no column {name!r}, which the table {self.name} requires"
                    f" ({column.type} NOT NULL)"
                )
        if not names:
            others = ", ".join(name for name in self.columns if name != _ID)
            raise ConfigError(
                "the DataFrame has no column but 'id', which does not go into the table"
                f" {self.name}; add one of {others}"
            )
        if self._key:
            renewed = [name for name in names if name not in self._key]
            check_columns(self._table, names, self._key, renewed, self._sequence_by)

    def write(self, connection: Connection, rows: RecordBatch) -> None:
        """Write rows. Their keys have no nulls."""
        names = self.written(rows.schema.names)
        rows = rows.select(names)
        if self._is_copied_to:
            self._copy(connection, names, as_csv(rows))
        elif self._key:
            values = _as_values(rows)
            upsert(connection, self._table, values, self._key, sequence_by=self._sequence_by)
        else:
            connection.execute(self._table.insert(), _as_values(rows))

    def _check_type(self, name: str, type_: str) -> None:
        column = self.columns[name]
        kind = type_.partition("(")[0].partition("<")[0]
        if kind in _NESTED:
            raise ConfigError(f'column {name!r} is {kind}; write "to_json({name}) AS {name}"')
        # MariaDB's BOOLEAN is an integer; PostgreSQL does not accept a boolean for an integer.
        is_no_integer = kind == "boolean" and column.kind == "integer" and self._is_copied_to
        cast, taken = _TYPES[column.kind]
        if is_no_integer or kind not in taken:
            raise ConfigError(
                f"column {name!r} is {type_}, and {column.type} in the table;"
                f' write "cast({name} AS {cast})"'
            )

    def _copy(self, connection: Connection, columns: Sequence[str], csv: Any) -> None:
        """Write CSV rows by COPY; an empty value without quotes is null. Keys have no nulls."""
        names = ", ".join(map(_quoted, columns))
        cursor = connection.connection.cursor()
        into = self._heap(cursor, names) if self._key else self.name
        with cursor.copy(f"COPY {into} ({names}) FROM STDIN (FORMAT csv)") as copy:
            copy.write(csv)
        if self._key:
            cursor.execute(self._renewal(into, columns, names))

    def _heap(self, cursor: Any, names: str) -> str:
        """A temporary table of the connection, which holds rows until the transaction ends."""
        heap = f"oncely_{zlib.crc32(f'{self.name} {names}'.encode()):08x}"
        cursor.execute(
            f"CREATE TEMPORARY TABLE IF NOT EXISTS {heap} ON COMMIT DELETE ROWS"  # noqa: S608 - quoted.
            f" AS SELECT {names} FROM {self.name} WITH NO DATA"
        )
        return f"pg_temp.{heap}"

    def _renewal(self, heap: str, columns: Sequence[str], names: str) -> str:
        """The statement that copies rows from the heap: of several with one key, the newest."""
        key = ", ".join(map(_quoted, self._key))
        newest, condition = "", ""
        if self._sequence_by is not None:
            sequence = _quoted(self._sequence_by)
            newest = f" {sequence} DESC,"
            condition = f" WHERE t.{sequence} IS NULL OR t.{sequence} <= excluded.{sequence}"
        renewed = [_quoted(name) for name in columns if name not in self._key]
        values = ", ".join(f"{name} = excluded.{name}" for name in renewed)
        # In the order of the keys: two writers cannot deadlock.
        return (
            f"INSERT INTO {self.name} AS t ({names})"  # noqa: S608 - names are quoted.
            f" SELECT DISTINCT ON ({key}) {names} FROM {heap}"
            f" ORDER BY {key},{newest} {heap.partition('.')[2]}.ctid DESC"
            f" ON CONFLICT ({key}) DO"
            f" {f'UPDATE SET {values}{condition}' if values else 'NOTHING'}"
        )


def open_target(
    engine: Engine, name: str, key: Sequence[str] = (), sequence_by: str | None = None
) -> TargetTable:
    """The table `name`; with a `key`, written rows replace existing rows with the same key, unless
    an existing row is newer by the column `sequence_by`.

    `engine` is one of `work_engine`. Raises ConfigError if there is no such table.
    """
    schema, _, table = name.rpartition(".")
    if schema and engine.dialect.name == "sqlite":
        raise ConfigError(f"table: {name!r}: SQLite has no schemas; write {table!r}")
    if table.startswith(TABLE_NAME):
        raise ConfigError(f"table: {name!r} is the ledger's own; name one of yours")
    try:
        with warnings.catch_warnings():
            # A type that SQLAlchemy does not know is accepted: the database knows it.
            warnings.simplefilter("ignore", SAWarning)
            found = Table(
                table, MetaData(), schema=schema or None, autoload_with=engine, resolve_fks=False
            )
    except NoSuchTableError:
        near = get_close_matches(table, inspect(engine).get_table_names(schema or None), n=1)
        hint = f"did you mean {near[0]!r}?" if near else "create it first"
        raise ConfigError(f"table: the ledger's database has no table {name!r}; {hint}") from None
    return TargetTable(engine, found, key, sequence_by)


def work_engine(url: str) -> Engine:
    """An engine for transactions in the ledger's database at `url`, in UTC.

    Raises ConfigError if it has no transactions, and for a URL that cannot be read.
    """
    check_transactions(url)
    if url.startswith("sqlite:"):
        return sqlite_engine(sqlite_file(url))
    engine = session_engine(url)
    statements = [
        # Else a value that does not fit would be truncated silently.
        "SET sql_mode = CONCAT(@@sql_mode, ',STRICT_ALL_TABLES')",
        "SET time_zone = '+00:00'",
    ]
    if engine.dialect.name == "postgresql":
        # Else a time without a zone would be taken as the server's local time.
        statements = ["SET TIME ZONE 'UTC'"]

    def prepare(connection: Any, _: object) -> None:
        with connection.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)
        # Committed, as a rollback would undo the setting.
        connection.commit()

    event.listen(engine, "connect", prepare)
    return engine


shared_engine = lru_cache(maxsize=8)(work_engine)
"""As `work_engine`, one for each process, which is never closed."""


def refusal(error: BaseException) -> str | None:
    """The database's reason to refuse a row; None for any other error."""
    cause = getattr(error, "orig", None) or error
    if not _is_of_a_row(cause):
        # MariaDB closes the connection if a packet is too large: the error here is that of the
        # rollback, and the first error is its context.
        return None if error.__context__ is None else refusal(error.__context__)
    is_numbered = cause.args and isinstance(cause.args[0], int)
    text = str(cause.args[-1] if is_numbered else cause)
    return next(iter(text.strip().splitlines()), type(cause).__name__)


def _is_of_a_row(cause: Any) -> bool:
    if any(kind.__name__ in _ROWS_KINDS for kind in type(cause).__mro__):
        return True
    state = getattr(cause, "sqlstate", None)
    if hasattr(cause, "pgconn"):
        # An error without a state is the driver's, about its connection.
        return state is not None and state[:2] not in _SERVERS_CLASSES
    is_numbered = cause.args and cause.args[0] in _ROWS_NUMBERS
    return is_numbered or (state or "")[:2] in _ROWS_CLASSES or str(cause) == _MALFORMED


def _quoted(name: str) -> str:
    # For statements without parameters: SQLAlchemy's own quoting doubles each "%".
    return '"{}"'.format(name.replace('"', '""'))


def _described(column: Column[Any], engine: Engine) -> TargetColumn:
    # SQLite fills an integer primary key itself, but does not report it.
    is_its_key = engine.dialect.name == "sqlite" and column is column.table.autoincrement_column
    is_filled = (
        column.server_default is not None
        or column.identity is not None
        or column.computed is not None
        or column.autoincrement is True
        or is_its_key
    )
    type_ = "unknown" if isinstance(column.type, NullType) else column.type.compile(engine.dialect)
    is_required = not column.nullable and not is_filled
    kinds = (kind for kind, known in _KINDS if isinstance(column.type, known))
    return TargetColumn(next(kinds, "other"), type_, is_filled, is_required)


# ---- The columns of a DataFrame ------------------------------------------------------------------


def open_table(options: SinkOptions, ledger: Ledger) -> TargetTable:
    """The table that the options name, in the database of `ledger`. Raises ConfigError if there is
    none, and StoreUnavailable.
    """
    name, key = options.table or "", options.upsert
    try:
        with url_here(options.address.location) as url:
            return open_target(shared_engine(url), name, key, options.sequence_by)
    except Exception as error:
        if ledger.is_outage(error):
            raise StoreUnavailable(describe(error)) from error
        raise


def as_csv(rows: RecordBatch) -> Buffer:
    """CSV as PostgreSQL reads it: null is empty, text is quoted, times are in UTC."""
    plain = pa.RecordBatch.from_arrays([_plain(each) for each in rows.columns], rows.schema.names)
    out = pa.BufferOutputStream()
    csv.write_csv(plain, out, csv.WriteOptions(include_header=False))
    return out.getvalue()


def _as_values(rows: RecordBatch) -> list[dict[str, Any]]:
    """Python values, times in UTC: most databases store no time zone with them.

    Raises ValueError or OverflowError for values that Python cannot hold.
    """
    columns = []
    for column in map(in_utc, rows.columns):
        has_zone = getattr(column.type, "tz", None) is not None
        columns.append(column.cast(pa.timestamp("us")) if has_zone else column)
    plain = pa.RecordBatch.from_arrays(columns, rows.schema.names)
    values: list[dict[str, Any]] = plain.to_pylist()
    return values


def sorted_by_id(batches: Iterable[RecordBatch]) -> Iterator[RecordBatch]:
    """The rows in larger batches, each in the order of ids; copies keep their order.

    Neighbouring ids are on one page of the ledger's index: in another order each chunk would read
    and write pages all over a large index.
    """
    gathered: list[RecordBatch] = []
    for batch in batches:
        gathered.append(batch)
        is_full = sum(each.nbytes for each in gathered) >= _MOST_BYTES
        if is_full or sum(each.num_rows for each in gathered) >= _MOST_ROWS:
            yield from _sorted(gathered)
            gathered = []
    if gathered:
        yield from _sorted(gathered)


def _sorted(batches: Sequence[RecordBatch]) -> Iterable[RecordBatch]:
    rows = pa.Table.from_batches(batches).sort_by("id")
    return rows.combine_chunks().to_batches()  # type: ignore[no-any-return]


def _plain(column: Array) -> Array:
    if pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type):
        texts = [None if value is None else f"\\x{value.hex()}" for value in column.to_pylist()]
        return pa.array(texts, pa.string())
    # A column without time zone would take the local time and drop the zone.
    return in_utc(column)
