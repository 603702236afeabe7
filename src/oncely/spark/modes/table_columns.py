"""The columns of a DataFrame for a table, checked before anything is written; and their values, in
the form that is written.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa
from pyarrow import Array, Buffer, RecordBatch, csv
from pyspark.sql.types import StructType

from oncely.core.errors import ConfigError, StoreUnavailable, describe
from oncely.ledger.ledger import Ledger
from oncely.spark.ledgers import url_here
from oncely.spark.modes.target_table import Kind, TargetTable, open_target, shared_engine
from oncely.spark.option_values import unknown
from oncely.spark.sink.message_rows import (
    BROKEN_COLUMN,
    COLUMN_TYPES,
    ROW_COLUMN,
    check_has_id,
    in_utc,
)
from oncely.spark.sink.sink_options import SinkOptions

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


def written_columns(table: TargetTable, names: Sequence[str]) -> list[str]:
    """The DataFrame's columns that are written to the table.

    The message id is written if the table has a column `id` that the database does not fill itself.
    """
    id_ = table.columns.get(_ID)
    is_stored = id_ is not None and not id_.is_filled
    own = () if is_stored else (_ID,)
    return [name for name in names if name not in (*own, ROW_COLUMN, BROKEN_COLUMN)]


def check_table(table: TargetTable, schema: StructType) -> None:
    """Raise ConfigError for a DataFrame whose rows do not fit into the table."""
    check_has_id(schema.names)
    types = {field.name: field.dataType.simpleString() for field in schema.fields}
    for name in (_ID, ROW_COLUMN, BROKEN_COLUMN):
        if types.get(name, "string") not in COLUMN_TYPES[name]:
            raise ConfigError(f'column {name!r} is {types[name]}; write "cast({name} AS STRING)"')
    names = written_columns(table, list(types))
    for name in names:
        if name not in table.columns:
            raise ConfigError(
                f"column {unknown(name, table.columns, f'column in the table {table.name}')}"
            )
        if name != _ID:
            _check_type(name, types[name], table)
    for name, column in table.columns.items():
        if column.is_required and name not in names:
            raise ConfigError(
                f"the DataFrame has no column {name!r}, which the table {table.name} requires"
                f" ({column.type} NOT NULL)"
            )
    if not names:
        raise ConfigError(
            f"the DataFrame has no column but 'id', which does not go into the table {table.name};"
            f" add one of {', '.join(name for name in table.columns if name != _ID)}"
        )
    table.check(names)


def _check_type(name: str, type_: str, table: TargetTable) -> None:
    column = table.columns[name]
    kind = type_.partition("(")[0].partition("<")[0]
    if kind in _NESTED:
        raise ConfigError(f'column {name!r} is {kind}; write "to_json({name}) AS {name}"')
    # MariaDB's BOOLEAN is an integer; PostgreSQL does not accept a boolean for an integer.
    is_no_integer = kind == "boolean" and column.kind == "integer" and table.is_copied_to
    cast, taken = _TYPES[column.kind]
    if is_no_integer or kind not in taken:
        raise ConfigError(
            f"column {name!r} is {type_}, and {column.type} in the table;"
            f' write "cast({name} AS {cast})"'
        )


def as_csv(rows: RecordBatch) -> Buffer:
    """CSV as PostgreSQL reads it: null is empty, text is quoted, times are in UTC."""
    plain = pa.RecordBatch.from_arrays([_plain(each) for each in rows.columns], rows.schema.names)
    out = pa.BufferOutputStream()
    csv.write_csv(plain, out, csv.WriteOptions(include_header=False))
    return out.getvalue()


def as_values(rows: RecordBatch) -> list[dict[str, Any]]:
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


def _sorted(batches: Sequence[RecordBatch]) -> list[RecordBatch]:
    rows = pa.Table.from_batches(batches).sort_by("id").combine_chunks()
    ordered: list[RecordBatch] = rows.to_batches()
    return ordered


def _plain(column: Array) -> Array:
    if pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type):
        texts = [None if value is None else f"\\x{value.hex()}" for value in column.to_pylist()]
        return pa.array(texts, pa.string())
    # A column without time zone would take the local time and drop the zone.
    return in_utc(column)
