"""How messages are dealt out to tasks."""

from collections.abc import Sequence

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from oncely.core.errors import ConfigError

_ROWS_FOR_EVERY_PART = 100_000


def spread(
    messages: DataFrame, partitions: int | None = None, upsert: Sequence[str] = ()
) -> DataFrame:
    """Let the copies of an id meet in one task, where they cost one claim; with the key of an
    `upsert`, the messages of one key, which one task writes in order.

    Without `partitions`: two for each task that can run at a time. Raises ConfigError where there
    is no id.
    """
    if "id" not in messages.columns:
        raise ConfigError(
            f"the DataFrame has no column 'id', only {', '.join(sorted(messages.columns))}"
        )
    # Where the key is not in the DataFrame, the sink tells.
    is_keyed = bool(upsert) and set(upsert) <= set(messages.columns)
    names = [f"`{name.replace('`', '``')}`" for name in upsert] if is_keyed else ["id"]
    return messages.repartition(partitions or 2 * _slots(messages.sparkSession), *names)


def _slots(spark: SparkSession) -> int:
    """How many tasks can run at a time."""
    context = getattr(spark, "sparkContext", None)
    if context is not None:
        return int(context.defaultParallelism)
    # Under Spark Connect nobody tells; but a range is cut into as many parts.
    parts = spark.range(_ROWS_FOR_EVERY_PART).select(f.spark_partition_id())
    return parts.distinct().count()
