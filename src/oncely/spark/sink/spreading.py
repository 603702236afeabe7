"""Spreading: distributes messages over tasks."""

from collections.abc import Sequence

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from oncely.core.errors import ConfigError
from oncely.spark.option_values import quoted
from oncely.spark.sink.message_rows import check_has_id

_ROWS_FOR_EVERY_PART = 100_000


def spread(
    messages: DataFrame,
    partitions: int | None = None,
    upsert: Sequence[str] = (),
    writers: int | None = None,
) -> DataFrame:
    """Put all copies of an id into one task, where they cost one claim; with the key of an
    `upsert`, all messages of a key, which one task then writes in order.

    Without `partitions` there are two for each task that can run at a time. With `writers` there
    are never more tasks than that, so no more write at a time. Raises ConfigError without a column
    `id`, and for numbers below 1.
    """
    for option, number in (("partitions", partitions), ("writers", writers)):
        if number is not None and number < 1:
            raise ConfigError(f"{option}: {number} is not a whole number of 1 or more")
    check_has_id(messages.columns)
    # If the DataFrame lacks the key, the sink reports it.
    is_keyed = bool(upsert) and set(upsert) <= set(messages.columns)
    names = list(map(quoted, upsert)) if is_keyed else ["id"]
    if partitions is None:
        partitions = 2 * slots(messages.sparkSession)
    return messages.repartition(min(partitions, writers or partitions), *names)


def slots(spark: SparkSession) -> int:
    """How many tasks can run at a time."""
    context = getattr(spark, "sparkContext", None)
    if context is not None:
        return int(context.defaultParallelism)
    # Spark Connect has no such call, but a range is split into as many partitions.
    parts = spark.range(_ROWS_FOR_EVERY_PART).select(f.spark_partition_id())
    return parts.distinct().count()
