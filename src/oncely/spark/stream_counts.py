"""The counts of a running stream, in the program that has started it."""

from pyspark.sql import SparkSession

from oncely.core.errors import ConfigError
from oncely.spark.sink.channel import DriverChannel
from oncely.spark.sink.counts import Counts


def driver_channel(spark: SparkSession) -> DriverChannel:
    """A channel at the address by which tasks reach Spark's driver."""
    host = spark.conf.get("spark.driver.host", "127.0.0.1") or ""
    return DriverChannel(host, spark.conf.get("spark.driver.bindAddress", host))


class StreamCounts:
    """The counts of a stream that is written with `format("oncely")` and these `options`.

    `StreamingQueryProgress` does not have them: a Python data source cannot report a sink's
    metrics. When a listener gets the progress of a batch, `committed` includes that batch. Use one
    object for one query, in the program that is Spark's driver, and close it after the query.
    Raises ConfigError in a client of Spark Connect, which tasks cannot reach.
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

    def __exit__(self, *_: object) -> None:
        self.close()

    def committed(self) -> Counts:
        """The counts of committed batches."""
        return self._channel.committed()

    def progress(self) -> Counts:
        """The counts of committed batches, and of the open batch so far."""
        return self._channel.progress()

    def close(self) -> None:
        """Stop listening. A running query is stopped, as its tasks take the driver for gone."""
        self._channel.close()
