"""Rows of Arrow as a database takes them: CSV for COPY without a Python value, or Python's own."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa
from pyarrow import Array, Buffer, RecordBatch, csv

from oncely.spark.sink.message_rows import in_utc

_MOST_ROWS = 200_000
_MOST_BYTES = 64_000_000


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
    columns = [_without_zone(column) for column in rows.columns]
    values: list[dict[str, Any]] = pa.RecordBatch.from_arrays(
        columns, rows.schema.names
    ).to_pylist()
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


def _without_zone(column: Array) -> Array:
    column = in_utc(column)
    has_zone = getattr(column.type, "tz", None) is not None
    return column.cast(pa.timestamp("us")) if has_zone else column
