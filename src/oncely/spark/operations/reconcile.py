"""Reconciling: compares the messages of a source with the ledger and its archive."""

import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f

from oncely.core.errors import ConfigError, MessageError
from oncely.core.ids import check_id, fingerprint_of
from oncely.locations import absolute
from oncely.spark.modes.tally import MISMATCH, REJECTED
from oncely.spark.operations.ledger_frames import check_archive, read_records
from oncely.spark.operations.reconcile_file import ReconcileConfig
from oncely.spark.pipeline.pipeline_source import read_messages
from oncely.spark.session import on_disk, session
from oncely.spark.sink.counts import MAX_REASONS, OTHER_REASONS
from oncely.spark.sink.message_rows import BROKEN_COLUMN, ROW_COLUMN

_MAX_REASON = 200
_OUTCOMES = {
    "completed": "handled",
    "handled": "handled",
    "held": "processing",
    "in_doubt": "in_doubt",
    "failed": "failed",
    "exhausted": "failed",
}
"""The outcome of a message by the standing of its record."""
_QUARANTINED = "quarantined"
_NOT_IN_SOURCE = "not_in_source"


@dataclass
class Reconciliation:
    """The outcomes of a source's rows, and the records without a row in the source.

    received = handled + duplicates + quarantined + processing + missing + failed + in doubt.
    """

    messages: Counter[str] = field(default_factory=Counter)
    """Messages by outcome (handled, processing, missing, failed, in_doubt); each is counted once,
    also if it is in the source more than once."""
    duplicates: int = 0
    """Further copies in the source."""
    quarantined: Counter[str] = field(default_factory=Counter)
    """Rows that are not messages, or were rejected, by reason."""
    not_in_source: Counter[str] = field(default_factory=Counter)
    """Records without a message in the source: handled, processing, failed, in_doubt."""
    seconds: float = 0.0

    @property
    def received(self) -> int:
        """The rows of the source."""
        return self.messages.total() + self.duplicates + self.quarantined.total()

    @property
    def has_failures(self) -> bool:
        """Whether messages are missing, have failed or are in doubt."""
        return any(self.messages[outcome] for outcome in ("missing", "failed", "in_doubt"))

    def as_dict(self) -> dict[str, Any]:
        """The counts under the names that `--json` prints."""
        outcomes = ("handled", "missing", "in_doubt", "failed", "processing")
        return {
            "received": self.received,
            **{outcome: self.messages[outcome] for outcome in outcomes},
            "duplicates": self.duplicates,
            "quarantined": dict(sorted(self.quarantined.items())),
            "not_in_source": {
                outcome: self.not_in_source[outcome] for outcome in outcomes if outcome != "missing"
            },
            "seconds": round(self.seconds, 3),
        }


def reconcile(
    config: ReconcileConfig, archive: str | None = None, to: str | None = None
) -> Reconciliation:
    """Compare a source with the ledger and its archive, and write the details below `to`.

    `messages/outcome=.../` there has one row for each message and body, and for each record without
    a message; `quarantined/` has the rows that are not messages. Raises ConfigError for a wrong
    file, and if `to` is not empty; OncelyError if Spark gives up.
    """
    check_archive(archive)
    _check_new(to)
    with session("oncely reconcile", config.spark) as spark:
        return _reconcile(spark, config, archive and absolute(archive), to and absolute(to))


def _check_new(folder: str | None) -> None:
    """Raises ConfigError if `folder` is not empty."""
    if folder is None or "://" in folder or not Path(folder).exists():
        return
    if not Path(folder).is_dir():
        raise ConfigError(f"--to: {folder!r} is a file; name a folder")
    if any(Path(folder).iterdir()):
        raise ConfigError(f"--to: {folder!r} is not empty; name a new folder")


def _reconcile(
    spark: SparkSession, config: ReconcileConfig, archive: str | None, to: str | None
) -> Reconciliation:
    began = time.monotonic()
    with on_disk(_deliveries(spark, config)) as deliveries:
        # The whole source is read before the first record: messages that a pipeline handles at the
        # same time do not count as missing.
        deliveries.count()
        records = read_records(spark, config.place, config.consumer, archive)
        with on_disk(_compared(config, deliveries, records)) as compared:
            found = _count(deliveries, compared)
            if to is not None:
                _write_details(deliveries, compared, to)
    found.seconds = time.monotonic() - began
    return found


def _write_details(deliveries: DataFrame, compared: DataFrame, to: str) -> None:
    compared.write.partitionBy("outcome").parquet(f"{to}/messages")
    # Parquet readers refuse Spark strings with bytes that are not text.
    whole = [f.make_valid_utf8(name).alias(name) for name in ("id", "row")]
    unusable = deliveries.where("reason IS NOT NULL").select("reason", *whole)
    unusable.write.parquet(f"{to}/quarantined")


def _deliveries(spark: SparkSession, config: ReconcileConfig) -> DataFrame:
    """The rows of the source: id, reason (why it is not a message), fingerprint, row."""
    messages = read_messages(spark, config, streaming=False)
    body = f.col("body") if "body" in messages.columns else f.lit(None)
    # Arrow's calling convention would need pandas.
    judge = f.udf(_judge, "reason STRING, fingerprint STRING", useArrow=False)
    # As bytes: not every string of Spark is valid text.
    judged = judge(f.col("id").cast("binary"), body.cast("binary"))
    deliveries = messages.withColumn("judged", judged).select(
        "id",
        f.coalesce(BROKEN_COLUMN, "judged.reason").alias("reason"),
        "judged.fingerprint",
        f.col(ROW_COLUMN).alias("row"),
    )
    row = f.when(f.col("reason").isNotNull(), f.col("row"))
    return deliveries.withColumn("row", row)


def _judge(id_: bytes | None, body: bytes | None) -> tuple[str | None, str | None]:
    """Why a row is not a message, or None and the fingerprint of its body."""
    try:
        check_id(None if id_ is None else bytes(id_).decode("utf-8", "surrogateescape"))
    except MessageError as error:
        return str(error), None
    return None, None if body is None else fingerprint_of(bytes(body))


def _compared(config: ReconcileConfig, deliveries: DataFrame, records: "DataFrame") -> DataFrame:
    """Each message with its record: a row for each body, and for each record without a message."""
    messages = (
        deliveries.where("reason IS NULL")
        .groupBy("id", "fingerprint")
        .agg(f.count("*").alias("deliveries"))
        .withColumnRenamed("fingerprint", "body_fingerprint")
    )
    # A join that reads each side once: a query for each row would read the ledger many times.
    both = messages.join(records, messages["id"] == records["message_id"], "full_outer")
    outcome = (
        f.when(f.col("id").isNull(), _NOT_IN_SOURCE)
        .when(f.col("message_id").isNull(), "missing")
        .when(f.col("reason").isNotNull(), _QUARANTINED)
        .otherwise(_by_standing())
    )
    return both.withColumn("reason", _why_quarantined(config)).select(
        outcome.alias("outcome"),
        f.coalesce("id", "message_id").alias("id"),
        f.coalesce("deliveries", f.lit(0)).alias("deliveries"),
        "reason",
        _by_standing().alias("record"),
        *("attempts", "fence", "first_seen", "last_seen", "error", "archived"),
    )


def _why_quarantined(config: ReconcileConfig) -> Column:
    """Why a message with a record was set aside, if it was, as a pipeline counts it."""
    differs = f.col("body_fingerprint") != f.col("fingerprint")
    is_rejected = (f.col("standing") == "exhausted") & f.col("error").rlike(REJECTED)
    return f.when(f.lit(config.compares_bodies) & differs, MISMATCH).when(
        is_rejected, f.substring(f.regexp_replace("error", REJECTED, ""), 1, _MAX_REASON)
    )


def _by_standing() -> Column:
    words = [f.lit(word) for pair in _OUTCOMES.items() for word in pair]
    return f.create_map(*words)[f.col("standing")]


# ---- Counting ----------------------------------------------------------------------------------


def _count(deliveries: DataFrame, compared: DataFrame) -> Reconciliation:
    found = Reconciliation()
    unusable = deliveries.where("reason IS NOT NULL").select("reason", f.lit(1).alias("deliveries"))
    set_aside = compared.where(f.col("outcome") == _QUARANTINED).select("reason", "deliveries")
    found.quarantined = _by_reason(unusable.unionAll(set_aside))
    outcomes = compared.groupBy("outcome", "record").agg(
        f.count_distinct("id").alias("messages"), f.sum("deliveries").alias("deliveries")
    )
    for outcome, record, messages, copies in outcomes.collect():
        if outcome == _NOT_IN_SOURCE:
            found.not_in_source[record] += messages
        elif outcome != _QUARANTINED:
            found.messages[outcome] += messages
            found.duplicates += copies - messages
    return found


def _by_reason(rows: DataFrame) -> Counter[str]:
    """The number of rows for each reason; if there are very many, the rarest are added up."""
    counted = rows.groupBy("reason").agg(f.sum("deliveries").alias("rows"))
    most = counted.orderBy(f.desc("rows"), "reason").limit(MAX_REASONS).collect()
    counts = Counter({row.reason: row.rows for row in most})
    total = counted.agg(f.sum("rows")).first()
    rest = (total[0] if total and total[0] else 0) - counts.total()
    if rest:
        counts[OTHER_REASONS] = rest
    return counts
