"""What a ledger and its archive add up to: figures for plots, aggregated on Spark.

A record has the times at which its message was first and last seen, and how often it was turned
away after it was completed. So duplicates count at the time of the last one, and how long handling
took is known only where none came.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f

from oncely.locations import LedgerPlace, absolute
from oncely.spark.operations.ledger_frames import check_archive, clock_of, read_records
from oncely.spark.session import on_disk, session

EDGES_S = (0.01, 0.1, 1, 10, 60, 600, 3_600, 21_600, 86_400, 604_800, 2_592_000)
"""Between these are the classes of lengths of time, with one below them and one above."""
MOST_ATTEMPTS = 10
"""As many attempts, or more, are one class."""

_STEPS_S = (60, 300, 900, 3_600, 21_600, 86_400, 604_800, 2_592_000)
_MOST_STEPS = 60
_MOST_IN_DOUBT = 20
_ACCURACY = 1_000


class Moment(NamedTuple):
    """What happened in one step of time."""

    at: float
    """When it began, seconds since 1970."""
    messages: int
    """Seen for the first time."""
    duplicates: int


class Spread(NamedTuple):
    """How lengths of time are distributed."""

    counts: Sequence[int]
    """For each class of `EDGES_S`, the one below them first."""
    median_s: float
    p95_s: float
    longest_s: float


class Doubtful(NamedTuple):
    """A record in doubt."""

    consumer: str
    message_id: str
    attempts: int
    age_s: float
    """Since it was last seen."""


class Oldest(NamedTuple):
    """What one consumer has in doubt."""

    consumer: str
    records: int
    age_s: float
    """Of the one that was not seen for longest."""


@dataclass(frozen=True, slots=True)
class Measures:
    """What is known, by the ledger's clock at `at`, seconds since 1970."""

    at: float
    records: int
    archived: int
    """Of the records: how many are in the archive alone."""
    duplicates: int
    step_s: float
    over_time: Sequence[Moment]
    """Without the steps in which nothing happened."""
    distance: Spread | None
    """From the first delivery to the last duplicate; None where there were none."""
    attempts: Sequence[int]
    """How many records had no attempt, one, and so on to `MOST_ATTEMPTS`."""
    handling: Spread | None
    """From the first claim to completion."""
    standings: dict[str, dict[str, int]]
    """For each consumer, how many records stand where, in the words of `core/rules.py`."""
    oldest_in_doubt: Sequence[Oldest]
    in_doubt: Sequence[Doubtful]
    """Some, the one that was not seen for longest first."""


def measure(
    place: LedgerPlace, consumer: str | None = None, archive: str | None = None
) -> Measures:
    """Read a ledger and its archive once, and add up.

    Raises ConfigError where there is no such archive, OncelyError when Spark gives up.
    """
    check_archive(archive)
    with (
        session("oncely report", {}) as spark,
        # Once: the records may be many, and may change while they are read again.
        on_disk(_records(spark, place, consumer, archive and absolute(archive))) as records,
    ):
        return _measure(records, clock_of(place))


def _records(
    spark: SparkSession, place: LedgerPlace, consumer: str | None, archive: str | None
) -> DataFrame:
    return (
        read_records(spark, place, consumer, archive)
        .withColumn("first_s", f.col("first_seen").cast("double"))
        .withColumn("last_s", f.col("last_seen").cast("double"))
        .withColumn("took_s", f.col("last_s") - f.col("first_s"))
        .select(
            *("consumer", "message_id", "standing", "attempts", "duplicates", "archived"),
            *("first_s", "last_s", "took_s"),
        )
    )


def _measure(records: DataFrame, now: float) -> Measures:
    [total] = records.agg(
        f.count("*").alias("records"),
        f.count_if("archived").alias("archived"),
        f.coalesce(f.sum("duplicates"), f.lit(0)).alias("duplicates"),
        (f.coalesce(f.max("last_s") - f.min("first_s"), f.lit(0.0))).alias("span_s"),
    ).collect()
    step_s = _step(total.span_s)
    came_again = f.col("duplicates") > 0
    return Measures(
        at=now,
        records=total.records,
        archived=total.archived,
        duplicates=total.duplicates,
        step_s=step_s,
        over_time=_over_time(records, step_s),
        distance=_spread(records.where(came_again)),
        attempts=_attempts(records),
        handling=_spread(records.where((f.col("standing") == "completed") & ~came_again)),
        standings=_standings(records),
        oldest_in_doubt=_oldest(records, now),
        in_doubt=_in_doubt(records, now),
    )


def _step(span_s: float) -> float:
    """A step of time that parts `span_s` into not too many."""
    longest = span_s / _MOST_STEPS
    return next((step for step in _STEPS_S if step >= longest), longest)


def _over_time(records: DataFrame, step_s: float) -> list[Moment]:
    def begin(at: str) -> Column:
        return (f.floor(f.col(at) / step_s) * step_s).cast("double").alias("at")

    first = records.select(begin("first_s"), f.lit(1).alias("messages"), f.lit(0).alias("copies"))
    again = records.where("duplicates > 0").select(
        begin("last_s"), f.lit(0).alias("messages"), f.col("duplicates").alias("copies")
    )
    summed = first.unionAll(again).groupBy("at").agg(f.sum("messages"), f.sum("copies"))
    return [Moment(*row) for row in summed.orderBy("at").collect()]


def _spread(records: DataFrame) -> Spread | None:
    took = f.greatest("took_s", f.lit(0.0))
    bounds = [float("-inf"), *EDGES_S, float("inf")]
    [row] = records.agg(
        *(f.count_if((took >= low) & (took < high)) for low, high in pairwise(bounds)),
        f.percentile_approx(took, [0.5, 0.95, 1.0], _ACCURACY).alias("percentiles"),
    ).collect()
    *counts, percentiles = row
    return Spread(counts, *percentiles) if percentiles else None


def _attempts(records: DataFrame) -> list[int]:
    most = f.least("attempts", f.lit(MOST_ATTEMPTS))
    counts = {row.attempts: row["count"] for row in _counted(records, most.alias("attempts"))}
    return [counts.get(number, 0) for number in range(MOST_ATTEMPTS + 1)]


def _counted(records: DataFrame, *columns: Column | str) -> list[Any]:
    return records.groupBy(*columns).count().collect()


def _standings(records: DataFrame) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for consumer, standing, count in _counted(records, "consumer", "standing"):
        found.setdefault(consumer, {})[standing] = count
    return dict(sorted(found.items(), key=lambda item: (-sum(item[1].values()), item[0])))


def _oldest(records: DataFrame, now: float) -> list[Oldest]:
    doubtful = records.where("standing = 'in_doubt'")
    found = doubtful.groupBy("consumer").agg(f.count("*"), (now - f.min("last_s")).alias("age_s"))
    return [Oldest(*row) for row in found.orderBy(f.desc("age_s"), "consumer").collect()]


def _in_doubt(records: DataFrame, now: float) -> list[Doubtful]:
    found = records.where("standing = 'in_doubt'").orderBy("last_s", "message_id")
    columns = ("consumer", "message_id", "attempts", (now - f.col("last_s")).alias("age_s"))
    return [Doubtful(*row) for row in found.limit(_MOST_IN_DOUBT).select(*columns).collect()]
