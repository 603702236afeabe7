"""What a stream comes to, while it runs, in the program that has started it."""

from types import TracebackType

from pyspark.sql import SparkSession

from oncely.core.errors import ConfigError
from oncely.spark.sink.channel import DriverChannel
from oncely.spark.sink.counts import Counts


def driver_channel(spark: SparkSession) -> DriverChannel:
    """A channel where tasks find Spark's own driver."""
    host = spark.conf.get("spark.driver.host", "127.0.0.1") or ""
    return DriverChannel(host, spark.conf.get("spark.driver.bindAddress", host))


class StreamCounts:
    """The counts of a stream that is written with `format("oncely")` and these `options`.

    Spark has no place for them in `StreamingQueryProgress`: a Python data source cannot report a
    sink's metrics. When a listener hears of the progress of a batch, that batch is in `committed`.
    One is for one query, in the program that is Spark's driver; close it after the query. Raises
    ConfigError in a client of Spark Connect, whom no task can reach.
    """

    def __init__(self, spark: SparkSession) -> None:
        if not hasattr(spark, "sparkContext"):
            raise ConfigError(
                "StreamCounts: tasks cannot reach a client of Spark Connect; write "
                ".foreachBatch(oncely.spark.foreach_batch(..., on_report=...))"
            )
        self._channel = driver_channel(spark)
        self.options = {"channel": self._channel.address, "channel_token": self._channel.token}

    def __enter__(self) -> "StreamCounts":
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def committed(self) -> Counts:
        """Of the batches that are committed."""
        return self._channel.committed()

    def progress(self) -> Counts:
        """The same, and what the open batch has come to so far."""
        return self._channel.progress()

    def close(self) -> None:
        """Hear no more. A query that still runs is stopped: its tasks take the driver for gone."""
        self._channel.close()
