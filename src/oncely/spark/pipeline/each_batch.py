"""Hands each batch of a pipeline's stream to its batch handler."""

from collections.abc import Callable, Mapping

from pyspark.sql import DataFrame, SparkSession

from oncely.spark.batches.batches import Batches
from oncely.spark.sink.channel import TaskChannel, report_batch
from oncely.spark.sink.counts import Counts
from oncely.spark.sink.handover import hand_over


def each_batch(settings: Mapping[str, str]) -> Callable[[DataFrame, int], None]:
    """A function for `foreachBatch` that reports the counts of each batch to the pipeline.
    `settings` are the sink's.
    """

    def take(messages: DataFrame, _: int) -> None:
        # Like a task's channel, so that stopping the pipeline waits for it.
        own = TaskChannel(settings.get("channel"), settings.get("channel_token", ""))
        try:
            own.raise_if_stopping()
            _tell(settings, Batches(settings).process(messages))
        finally:
            own.close()

    return take


def take_up(spark: SparkSession, settings: Mapping[str, str]) -> None:
    """Finish the batches of an earlier run, also if there is no new batch."""
    _tell(settings, Batches(settings).take_up(spark))


def _tell(settings: Mapping[str, str], counts: Counts) -> None:
    if "channel" in settings:
        report_batch(settings["channel"], settings["channel_token"], counts)
    if "report" in settings:
        hand_over(settings["report"], counts)
