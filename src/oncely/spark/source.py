"""From a pipeline file's source to a DataFrame of messages, by Spark SQL expressions."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, cast

from oncely.spark.config import PipelineConfig, as_option
from oncely.spark.rows import BROKEN_COLUMN, COLUMN_TYPES, ROW_COLUMN

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import StructType

_CORRUPT = "_corrupt_record"
_CAN_BE_CORRUPT = frozenset({"json", "csv", "xml"})
_SCHEMA_FROM_FILES = frozenset({"json", "csv", "xml", "parquet", "orc", "avro"})


def read_messages(spark: "SparkSession", config: PipelineConfig) -> "DataFrame":
    """A streaming DataFrame of messages, with each row's original and why it is broken, if it is.

    Raises ConfigError, which names the file and the key, for what Spark does not understand.
    """
    rows = _read_rows(spark, config)
    columns = [
        _column(rows, config, name, expression)
        for name, expression in config.message.model_dump(exclude_none=True).items()
    ]
    return rows.select(*columns, *_diagnosis(rows, config.source.format))


def _read_rows(spark: "SparkSession", config: PipelineConfig) -> "DataFrame":
    from pyspark.errors import PySparkException

    source = config.source
    options = {name: as_option(value) for name, value in source.options.items()}
    reader = spark.readStream.format(source.format).options(**options)
    try:
        schema = _schema(spark, config, options)
        if schema is not None:
            reader = reader.schema(schema)
        return reader.load(_streamable(config.source_path))
    except PySparkException as error:
        raise config.wrong("[source]", first_line(error)) from error


def _streamable(path: str | None) -> str | None:
    """A stream of files wants a folder or a pattern: for one file, the pattern of just it."""
    if path is None or not Path(path).is_file():
        return path
    plain = re.sub(r"([\\*?\[\]{}])", r"\\\1", path[:-1])
    return f"{plain}{{{path[-1]}}}"


def _schema(
    spark: "SparkSession", config: PipelineConfig, options: dict[str, str]
) -> "StructType | None":
    """The schema to read with: as given, else as the files at hand show it."""
    from pyspark.sql.types import StringType, StructType

    source = config.source
    if source.schema_ is not None:
        schema = cast(StructType, StructType.fromDDL(source.schema_))
    elif source.format in _SCHEMA_FROM_FILES:
        schema = spark.read.format(source.format).options(**options).load(config.source_path).schema
    else:
        return None
    if source.format in _CAN_BE_CORRUPT and _CORRUPT not in schema.fieldNames():
        schema = schema.add(_CORRUPT, StringType())
    return schema


def _column(rows: "DataFrame", config: PipelineConfig, name: str, expression: str) -> "Column":
    """One column of the message, of a type that the sink takes."""
    from pyspark.errors import PySparkException
    from pyspark.sql import functions as f

    key = f"[message] {name}"
    try:
        column = f.expr(expression).alias(name)
        type_ = rows.select(column).schema[0].dataType.simpleString()
    except PySparkException as error:
        raise config.wrong(key, first_line(error)) from error
    if name == "time" and type_ == "string":
        return f.expr(f"try_cast(({expression}) AS TIMESTAMP)").alias(name)
    if type_ not in COLUMN_TYPES[name]:
        fitting = f"to_json({expression})" if name == "body" else f"cast({expression} AS STRING)"
        hint = f'; write "{fitting}"' if "string" in COLUMN_TYPES[name] else ""
        raise config.wrong(key, f"is {type_}, not {COLUMN_TYPES[name][0]}{hint}")
    return column


def _diagnosis(rows: "DataFrame", format_: str) -> "list[Column]":
    """The original row as text, and why it is no message where the source's format tells."""
    from pyspark.sql import functions as f

    whole = f.to_json(f.struct(*(f.col(f"`{name}`") for name in rows.columns if name != _CORRUPT)))
    if _CORRUPT not in rows.columns:
        return [whole.alias(ROW_COLUMN), f.lit(None).cast("string").alias(BROKEN_COLUMN)]
    reason = f.lit(f"not {format_}")
    if format_ == "json":
        unfit = f.lit("row does not fit the schema")
        reason = f.when(f.try_parse_json(_CORRUPT).isNull(), reason).otherwise(unfit)
    broken = f.when(f.col(_CORRUPT).isNotNull(), reason)
    return [
        f.coalesce(f.col(_CORRUPT), whole).alias(ROW_COLUMN),
        broken.alias(BROKEN_COLUMN),
    ]


def first_line(error: Exception) -> str:
    """What a Spark error says, without its plan and its stack."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
