"""How messages are dealt out to tasks."""

from collections.abc import Sequence

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from oncely.core.errors import ConfigError
from oncely.spark.settings import quoted

_ROWS_FOR_EVERY_PART = 100_000


def spread(
    messages: DataFrame,
    partitions: int | None = None,
    upsert: Sequence[str] = (),
    writers: int | None = None,
) -> DataFrame:
    """Let the copies of an id meet in one task, where they cost one claim; with the key of an
    `upsert`, the messages of one key, which one task writes in order.

    Without `partitions`: two for each task that can run at a time. With `writers`, no more tasks
    than that in any case: so no more can write at a time. Raises ConfigError where there is no id,
    and for numbers below 1.
    """
    for option, number in (("partitions", partitions), ("writers", writers)):
        if number is not None and number < 1:
            raise ConfigError(f"{option}: {number} is not a whole number of 1 or more")
    if "id" not in messages.columns:
        raise ConfigError(
            f"the DataFrame has no column 'id', only {', '.join(sorted(messages.columns))}"
        )
    # Where the key is not in the DataFrame, the sink tells.
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
    # Under Spark Connect nobody tells; but a range is cut into as many parts.
    parts = spark.range(_ROWS_FOR_EVERY_PART).select(f.spark_partition_id())
    return parts.distinct().count()
