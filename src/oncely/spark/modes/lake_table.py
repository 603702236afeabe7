"""A table of Delta Lake or Apache Iceberg, which mode `rows` writes: each batch in one commit. The
columns of a DataFrame are checked before anything is written, and rows that do not fit are marked.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import (
    DataType,
    DecimalType,
    IntegralType,
    StringType,
    StructField,
    StructType,
)

from oncely import lake
from oncely.core.errors import ConfigError, OncelyError, describe
from oncely.core.message import Message
from oncely.core.policy import Finding
from oncely.spark.option_values import quoted, unknown
from oncely.spark.sink.message_rows import (
    BROKEN_COLUMN,
    COLUMNS_OF_ROWS,
    ROW_COLUMN,
    check_types,
)

_ID = "id"
_INNER = (ROW_COLUMN, BROKEN_COLUMN)


class LakeTable:
    """The table of a location, "delta:PATH" or "iceberg:CATALOG.NAMESPACE.TABLE"; with the columns
    `upsert`, rows replace those with the same values there. Raises ConfigError for an Iceberg table
    that does not exist, and OncelyError if the table cannot be opened.
    """

    def __init__(self, location: str, upsert: Sequence[str] = ()) -> None:
        self._location, self._upsert = location, upsert
        self._kind, _, name = location.partition(":")
        self._table: Any = name
        if self._kind == "iceberg":
            from oncely.lake.iceberg import named_table

            self._table = named_table(name)

    def fitted(self, messages: DataFrame) -> DataFrame:
        """The rows in the types of the table, and why a row does not fit. Raises ConfigError for
        columns that do not. Creates a Delta table that does not exist.
        """
        check_types(messages.schema, COLUMNS_OF_ROWS)
        given = {field.name: field.dataType for field in messages.schema.fields}
        own = {name: f.col(name) for name in COLUMNS_OF_ROWS if name in given}
        new = [StructField(name, given[name]) for name in given if name not in _INNER]
        schema = self._schema(to_arrow_schema(StructType(new), timezone="UTC"))
        target = from_arrow_schema(schema, prefer_timestamp_ntz=True)
        for name in self._upsert:
            if name not in target.names:
                told = unknown(name, target.names, f"column in the table {self._location}")
                raise ConfigError(f"option upsert: {told}")
        columns, reasons = [], [own.get(BROKEN_COLUMN, f.lit(None).cast("string"))]
        for name in _written(self._location, [*given], target.names):
            field, column = target[name], f.col(quoted(name))
            if not _fits(name, given[name], field.dataType):
                type_ = field.dataType.simpleString()
                raise ConfigError(
                    f"column {name!r} is {given[name].simpleString()}, and {type_} in the table"
                    f' {self._location}; write "cast({name} AS {type_.upper()})"'
                )
            reasons += self._unfit(column, field, given[name])
            if name != _ID:
                columns.append(column.try_cast(field.dataType).alias(name))
        for field in target.fields:
            if field.name not in given and (self._upsert or not field.nullable):
                raise ConfigError(
                    f"the DataFrame has no column {field.name!r}, which the table"
                    f" {self._location} requires{' for an upsert' if field.nullable else ''}"
                )
        whole = f.to_json(f.struct(*[f.col(quoted(name)) for name in given]))
        return messages.select(
            _ID,
            *columns,
            own.get(ROW_COLUMN, whole).alias(ROW_COLUMN),
            f.coalesce(*reasons).alias(BROKEN_COLUMN),
        )

    def write(self, rows: pa.Table, key: str) -> None:
        """Write the rows in one commit, unless a commit with this key is there. Raises OncelyError,
        also after a commit whose answer was lost.
        """
        schema, mode = self._schema(), "append"
        if self._upsert:
            rows, mode = _newest(rows, self._upsert), "merge"
        names = _written(self._location, rows.column_names, schema.names)
        told: Any = {"key": key, "mode": mode, "on": self._upsert}
        if self._kind == "delta" and mode == "append":
            # A column that the rows do not have is null, as it is in Iceberg.
            told["schema_mode"] = "merge"
        write: Any = lake.write_delta if self._kind == "delta" else lake.write_iceberg
        with self._failing("written"):
            fitting = rows.select(names).cast(pa.schema([schema.field(name) for name in names]))
            write(self._table, fitting, **told)

    def finding(self, message: Message) -> Finding:
        """Whether the batch with this id was written: a probe for `on_in_doubt`."""
        return lake.probe(self._table, message.id, sent_at=message.time)

    def _schema(self, of_new: pa.Schema | None = None) -> pa.Schema:
        """The columns of the table; a Delta table that does not exist is created with `of_new`."""
        with self._failing("read"):
            if self._kind == "iceberg":
                return self._table.refresh().schema().as_arrow()
            from oncely.lake.delta import columns_of

            return columns_of(self._table, of_new)

    def _unfit(self, column: Column, field: StructField, given: DataType) -> list[Column]:
        """Why a value does not fit, for each thing that may be wrong with it."""
        reasons = []
        if not field.nullable or field.name in self._upsert:
            reasons.append(f.when(column.isNull(), f.lit(f"missing {field.name}")))
        if given.simpleString() != field.dataType.simpleString():
            there = column.try_cast(field.dataType).try_cast(given)
            told = f"{field.name} does not fit into {field.dataType.simpleString()}"
            reasons.append(f.when(~there.eqNullSafe(column), f.lit(told)))
        return reasons

    @contextmanager
    def _failing(self, done: str) -> Iterator[None]:
        """Tell errors of storages and catalogs in one line."""
        try:
            yield
        except OncelyError:
            raise
        except Exception as error:
            told = f"table: {self._location} cannot be {done}: {describe(error)}"
            raise OncelyError(told) from error


def _written(location: str, names: Sequence[str], there: Sequence[str]) -> list[str]:
    """Those of the columns that are written: the message id only if the table has a column `id`.
    Raises ConfigError for a column that the table has not.
    """
    for name in names:
        if name not in there and name not in COLUMNS_OF_ROWS:
            told = unknown(name, there, f"column in the table {location}")
            raise ConfigError(f"column {told}")
    return [name for name in names if name in there]


def _fits(name: str, given: DataType, wanted: DataType) -> bool:
    """Whether values of a type may fit into a column; the id of a message is always text."""
    exact = (IntegralType, DecimalType)
    is_number = isinstance(given, exact) or (name == _ID and isinstance(given, StringType))
    same = given.simpleString() == wanted.simpleString()
    return same or (is_number and isinstance(wanted, exact))


def _newest(rows: pa.Table, key: Sequence[str]) -> pa.Table:
    """Of rows with the same key the last one by id."""
    rows = rows.sort_by(_ID)
    numbers = rows.select([*key]).append_column("oncely_number", pa.array(range(rows.num_rows)))
    last = numbers.group_by([*key]).aggregate([("oncely_number", "max")])
    return rows.take(last["oncely_number_max"].sort())
