"""From a pipeline file's source to a DataFrame of messages, by Spark SQL expressions."""

import re
from pathlib import Path

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.types import StringType, StructField, StructType, VariantType

from oncely.core.ids import ID_IS_NO_STRING
from oncely.spark.failures import cause_of, first_line
from oncely.spark.option_values import quoted, unquoted
from oncely.spark.pipeline.config import INNER, PipelineConfig
from oncely.spark.pipeline.kafka_records import message_of_record
from oncely.spark.sink.message_rows import BROKEN_COLUMN, COLUMN_TYPES, ROW_COLUMN

_CORRUPT = "_corrupt_record"
_RAW_ID = "oncely_raw_id"
_LINE = "oncely_line"
_STAR = re.compile(
    r"""('(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|`[^`]*`)|([(,]\s*)\*(\s*EXCEPT\s*\()?""", re.IGNORECASE
)
"""A name or text in quotes; or all columns, as in `struct(*)`."""
_FOR_EVER = "36500d"
_CAN_BE_CORRUPT = frozenset({"json", "csv", "xml"})
_OF_WHOLE_FILES = frozenset({"multiline", "mode", "encoding", "charset", "singlevariantcolumn"})
"""Options of JSON files that are not read line by line, or not as `from_json` reads them."""
_SCHEMA_FROM_FILES = frozenset({"json", "csv", "xml", "parquet", "orc", "avro"})


def read_messages(spark: SparkSession, config: PipelineConfig) -> DataFrame:
    """A stream of messages, with each original row and the reason if it is broken, and with the
    further columns of the file.

    Raises ConfigError, which names the file and the key, for an expression or a source that Spark
    does not understand.
    """
    rows = _read_rows(spark, config)
    parts = [
        _column(rows, config, name, expression)
        for name, expression in config.message.model_dump(exclude_none=True).items()
    ]
    parts += [_typed(rows, config, "columns", *column)[0] for column in config.columns.items()]
    told = [f.col(f"{INNER}.{name}").alias(name) for name in (ROW_COLUMN, BROKEN_COLUMN)]
    return rows.select(*parts, *told)


def _read_rows(spark: SparkSession, config: PipelineConfig) -> DataFrame:
    source = config.source
    options = dict(config.source_options)
    if source.path is not None:
        # A file stream skips files that are a week older than the newest one that it has seen.
        options.setdefault("maxFileAge", _FOR_EVER)
    try:
        schema = _schema(spark, config, options)
        rows = None
        if source.format == "json" and schema is not None:
            rows = _read_lines(spark, schema, options, config)
        if rows is None:
            reader = spark.readStream.format(source.format).options(**options)
            if schema is not None:
                reader = reader.schema(schema)
            rows = reader.load(_streamable(config.source_path))
        id_ = unquoted(config.message.id)
        if id_ in rows.columns and rows.schema[id_].dataType.simpleString() == "variant":
            # The id as the declared string, and the raw value next to it.
            rows = rows.withColumn(_RAW_ID, f.col(quoted(id_)))
            rows = rows.withColumn(id_, f.variant_get(_RAW_ID, "$", "string"))
        # The columns that the file's expressions may name, and the inner one.
        inner = {_LINE, _RAW_ID}
        if _CORRUPT not in (source.schema_ or ""):
            inner.add(_CORRUPT)
        names = [quoted(name) for name in rows.columns if name not in inner]
        told = _diagnosis(rows, config)
        if config.has_records:
            message = message_of_record()
            told = [told[0], message["problem"].alias(BROKEN_COLUMN), message.alias("message")]
        return rows.select(*names, f.struct(*told).alias(INNER))
    except PySparkException as error:
        raise config.wrong("[source]", first_line(error)) from error
    except Py4JJavaError as error:
        # A class that is not there is not an error of PySpark's.
        raise config.wrong("[source] format", cause_of(error)) from error


def _read_lines(
    spark: SparkSession, schema: StructType, options: dict[str, str], config: PipelineConfig
) -> DataFrame | None:
    """The rows of JSON files as Spark's own reader has them, each with its line, which may have
    fields that the schema has not. None where Spark reads not lines, or folders for columns.
    """
    if _OF_WHOLE_FILES & {name.lower() for name in options}:
        return None
    files = spark.readStream.format("text").options(**options)
    lines = files.load(_streamable(config.source_path))
    if lines.columns != ["value"]:
        return None
    # A line may be a list of rows.
    several = f.expr("transform(from_json(value, 'array<variant>'), each -> to_json(each))")
    each = f.coalesce(f.when(f.col("value").rlike(r"^\s*\["), several), f.array("value"))
    lines = lines.where(f.col("value").rlike(r"\S")).select(f.explode(each).alias(_LINE))
    fields = f.from_json(_LINE, schema, options).alias("fields")
    return lines.select(_LINE, fields).select(_LINE, "fields.*")


def _streamable(path: str | None) -> str | None:
    """A path for a file stream, which needs a folder or a pattern: one file becomes a pattern."""
    if path is None or not Path(path).is_file():
        return path
    plain = re.sub(r"([\\*?\[\]{}])", r"\\\1", path[:-1])
    return f"{plain}{{{path[-1]}}}"


def _schema(
    spark: SparkSession, config: PipelineConfig, options: dict[str, str]
) -> StructType | None:
    """The schema to read with: the given one, else inferred from the present files."""
    source = config.source
    if source.schema_ is not None:
        schema = StructType.fromDDL(source.schema_)
        if not isinstance(schema, StructType):
            raise config.wrong(
                "[source] schema", 'is not a list of columns; write "id STRING, body STRING"'
            )
    elif source.format in _SCHEMA_FROM_FILES:
        schema = spark.read.format(source.format).options(**options).load(config.source_path).schema
    else:
        return None
    if source.format in _CAN_BE_CORRUPT and _CORRUPT not in schema.fieldNames():
        schema = schema.add(_CORRUPT, StringType())
    if source.format == "json":
        # The raw id: for a string column, Spark would read 17 as "17".
        id_, text = unquoted(config.message.id), StringType()
        raw = {each.name for each in schema if each.name == id_ and each.dataType == text}
        fields = (StructField(n.name, VariantType()) if n.name in raw else n for n in schema)
        schema = StructType([*fields])
    return schema


def _column(rows: DataFrame, config: PipelineConfig, name: str, expression: str) -> Column:
    """A column of the message, of a type that the sink accepts."""
    column, type_ = _typed(rows, config, "message", name, expression)
    if name == "time" and type_ == "string":
        return column.try_cast("timestamp").alias(name)
    if type_ not in COLUMN_TYPES[name]:
        fitting = f"to_json({expression})" if name == "body" else f"cast({expression} AS STRING)"
        hint = f'; write "{fitting}"' if "string" in COLUMN_TYPES[name] else ""
        raise config.wrong(f"[message] {name}", f"is {type_}, not {COLUMN_TYPES[name][0]}{hint}")
    return column


def _typed(
    rows: DataFrame, config: PipelineConfig, table: str, name: str, expression: str
) -> tuple[Column, str]:
    """A column from a table of the file, and its type."""
    try:
        column = f.expr(_STAR.sub(_without_inner, expression)).alias(name)
        return column, rows.select(column).schema[0].dataType.simpleString()
    except PySparkException as error:
        raise config.wrong(f"[{table}] {name}", first_line(error)) from error


def _without_inner(found: re.Match[str]) -> str:
    quotes, before, excepted = found.groups()
    return quotes or f"{before}* EXCEPT ({INNER}{', ' if excepted else ')'}"


def _diagnosis(rows: DataFrame, config: PipelineConfig) -> list[Column]:
    """The original row as text, and why it is not a message if the source reports it."""
    raw = {unquoted(config.message.id): _RAW_ID} if _RAW_ID in rows.columns else {}
    columns = [
        f.col(quoted(raw.get(name, name))).alias(name)
        for name in rows.columns
        if name not in (_CORRUPT, _RAW_ID)
    ]
    original = f.col(_LINE) if _LINE in rows.columns else f.to_json(f.struct(*columns))
    broken = f.lit(None).cast("string")
    if raw:
        is_text = f.schema_of_variant(_RAW_ID).isin("STRING", "VOID")
        broken = f.when(~is_text, f.lit(ID_IS_NO_STRING))
    if _CORRUPT in rows.columns:
        original = f.coalesce(f.col(_CORRUPT), original)
        why = f.lit(f"not {config.source.format}")
        if config.source.format == "json":
            unfit = f.lit("row does not fit the schema")
            why = f.when(f.try_parse_json(_CORRUPT).isNull(), why).otherwise(unfit)
        broken = f.when(f.col(_CORRUPT).isNotNull(), why).otherwise(broken)
    return [original.alias(ROW_COLUMN), broken.alias(BROKEN_COLUMN)]
