"""The pipeline: a source, a mapping and the sink, run to the end or until it is told to stop."""

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from oncely.core.errors import OncelyError
from oncely.locations import open_named_ledger
from oncely.spark.channel import DriverChannel
from oncely.spark.config import PipelineConfig
from oncely.spark.counts import Counts
from oncely.spark.session import open_session
from oncely.spark.source import first_line, read_messages
from oncely.stopping import told_to_stop

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

_LOOK_S = 0.2
_GRACE_S = 60.0

OnProgress = Callable[[Counts], None]


@dataclass
class Report:
    """What a run came to."""

    counts: Counts
    seconds: float
    stopped: bool
    """Told to stop before its input was through; what was not committed is taken up again."""

    @property
    def has_failures(self) -> bool:
        """Whether messages failed for good or are in doubt."""
        return bool(self.counts.failed or self.counts.in_doubt)

    def as_dict(self) -> dict[str, Any]:
        """The report under the names that `--json` prints."""
        return {**self.counts.as_dict(), "seconds": round(self.seconds, 3)}


def run_pipeline(config: PipelineConfig, on_progress: OnProgress = lambda _: None) -> Report:
    """Run the pipeline until its trigger ends it, or SIGINT or SIGTERM.

    `on_progress` is called a few times a second. Raises ConfigError for what is wrong with the
    file, StoreError when the ledger cannot be opened, OncelyError when Spark gives up.
    """
    ledger = open_named_ledger(config.ledger)
    ledger.migrate()
    since = ledger.now()
    ledger.close()
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    with told_to_stop() as stop:
        spark = open_session(config.pipeline.name, config.spark)
        try:
            # Spark has set a SIGINT handler of its own meanwhile.
            with told_to_stop(stop):
                return _run(spark, config, since, stop, on_progress)
        except (PySparkException, Py4JError, OSError) as error:
            raise OncelyError(f"Spark gave up: {_cause(error)}") from error
        finally:
            with contextlib.suppress(Py4JError, OSError):
                spark.stop()


def _run(
    spark: "SparkSession",
    config: PipelineConfig,
    since: float,
    stop: threading.Event,
    on_progress: OnProgress,
) -> Report:
    began = time.monotonic()
    channel = DriverChannel(spark.conf.get("spark.driver.host") or "127.0.0.1")
    try:
        query = _start(spark, config, since, channel)
        _follow(query, channel, stop, on_progress)
    finally:
        channel.close()
    committed = channel.committed()
    on_progress(committed)
    return Report(committed, time.monotonic() - began, stop.is_set())


def _start(
    spark: "SparkSession", config: PipelineConfig, since: float, channel: DriverChannel
) -> "StreamingQuery":
    messages = _spread(spark, read_messages(spark, config))
    return (
        messages.writeStream.format("oncely")
        .queryName(config.pipeline.name)
        .trigger(**config.trigger)
        .options(
            checkpointLocation=config.checkpoint,
            consumer=config.pipeline.consumer,
            ledger=config.ledger,
            handler=config.pipeline.handler,
            handler_path=str(config.folder),
            mode=config.pipeline.mode,
            chunk=config.pipeline.chunk,
            quarantine=config.quarantine,
            since=repr(since),
            channel=channel.address,
            channel_token=channel.token,
            **config.policy_options,
        )
        .start()
    )


def _spread(spark: "SparkSession", messages: "DataFrame") -> "DataFrame":
    """Let the copies of an id meet in one task, where they cost one claim."""
    return messages.repartition(2 * spark.sparkContext.defaultParallelism, "id")


def _follow(
    query: "StreamingQuery", channel: DriverChannel, stop: threading.Event, on_progress: OnProgress
) -> None:
    """Wait for the query's end, or bring it about."""
    while query.isActive and not stop.wait(_LOOK_S):
        on_progress(channel.progress())
    error = query.exception()
    if error is None and query.isActive:
        channel.stop(_GRACE_S)
        query.stop()
    if error is not None:
        raise OncelyError(f"Spark gave up: {_cause(error)}") from error


def _cause(error: Exception) -> str:
    """The innermost line of a Spark error that says what happened."""
    lines = [line.strip() for line in str(error).splitlines()]
    told = [line for line in lines if line.startswith("oncely.") or "Error: " in line]
    return told[-1] if told else first_line(error)
