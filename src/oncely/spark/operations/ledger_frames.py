"""The records of a ledger and of its archive, as one DataFrame."""

from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from oncely.core.errors import ConfigError
from oncely.core.record import Key, Record, State
from oncely.core.rules import standing
from oncely.locations import LedgerPlace

_KEY = ("consumer", "message_id")
_REST = (
    *("standing", "attempts", "fence", "first_seen", "last_seen", "duplicates"),
    *("fingerprint", "error"),
)


def read_records(
    spark: SparkSession,
    place: LedgerPlace,
    consumer: str | None = None,
    archive: str | None = None,
) -> DataFrame:
    """One row for each key in the ledger or its archive; the ledger's row if both have the key.

    Columns: consumer, message_id, standing (in the words of `core/rules.py`), attempts, fence,
    first_seen, last_seen, duplicates, fingerprint, error, archived.
    """
    reader = spark.read.format("oncely").option("ledger", place.location)
    reader = reader.option("table", place.table)
    if place.schema is not None:
        reader = reader.option("schema", place.schema)
    if consumer is not None:
        reader = reader.option("consumer", consumer)
    records = reader.load().select(*_KEY, *_REST, f.lit(False).alias("archived"))  # noqa: FBT003
    if archive is not None:
        records = records.unionByName(_archived(spark, archive, consumer))
    # Some stores may return a record twice, and an archived message may have run again since.
    rank = f.struct(~f.col("archived"), "last_seen")
    newest = f.max_by(f.struct(*_REST, "archived"), rank).alias("newest")
    return records.groupBy(*_KEY).agg(newest).select(*_KEY, "newest.*")


def check_archive(folder: str | None) -> None:
    """Raises ConfigError if there is no such archive."""
    if folder is not None and "://" not in folder and not Path(folder).is_dir():
        raise ConfigError(f"--archive: there is no folder {folder!r}")


def _archived(spark: SparkSession, folder: str, consumer: str | None) -> DataFrame:
    from oncely.archive.layout import SPARK_SCHEMA

    # Arrow's calling convention would need pandas.
    standing_of = f.udf(_standing, "string", useArrow=False)
    found = spark.read.schema(SPARK_SCHEMA).parquet(folder)
    if consumer is not None:
        found = found.where(f.col("consumer") == consumer)
    return (
        found.withColumn("standing", standing_of("status", "exhausted"))
        .withColumn("error", f.get_json_object("metadata", "$.error"))
        .select(*_KEY, *_REST, f.lit(True).alias("archived"))  # noqa: FBT003
    )


def _standing(state: str, exhausted: bool) -> str:
    """The standing of an archived record. No worker processes it, so the time does not matter."""
    record = Record(Key("", ""), State(state), 0, 0, 0.0, 0.0, exhausted=exhausted)
    return standing(record, now=0.0).name.lower()
