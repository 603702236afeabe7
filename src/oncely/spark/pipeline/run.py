"""The pipeline: a source, a mapping and the sink, run to the end or until it is told to stop."""

import threading
import time
from collections.abc import Callable
from contextlib import closing

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from oncely._util.signals import told_to_stop
from oncely.core.errors import ConfigError, OncelyError
from oncely.locations import open_named_ledger
from oncely.spark.failures import as_own
from oncely.spark.pipeline.config import PipelineConfig
from oncely.spark.pipeline.pipeline_source import read_messages
from oncely.spark.session import session
from oncely.spark.settings import as_text
from oncely.spark.sink.channel import DriverChannel
from oncely.spark.sink.counts import Counts
from oncely.spark.sink.spreading import spread
from oncely.spark.spark_report import Report

_LOOK_S = 0.2
_GRACE_S = 60.0

OnProgress = Callable[[Counts], None]


def run_pipeline(config: PipelineConfig, on_progress: OnProgress = lambda _: None) -> Report:
    """Run the pipeline until its trigger ends it, or SIGINT or SIGTERM.

    `on_progress` is called a few times a second. Raises ConfigError for what is wrong with the
    file, StoreError when the ledger cannot be opened, OncelyError when Spark gives up.
    """
    with closing(open_named_ledger(*config.place)) as ledger:
        ledger.migrate()
        since = ledger.now()
    with (
        told_to_stop() as stop,
        session(config.pipeline.name, config.spark, lambda error: _told(error, config)) as spark,
        # Spark has set a SIGINT handler of its own meanwhile.
        told_to_stop(stop),
    ):
        return _run(spark, config, since, stop, on_progress)


def _run(
    spark: SparkSession,
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
    spark: SparkSession, config: PipelineConfig, since: float, channel: DriverChannel
) -> StreamingQuery:
    pipeline = config.pipeline
    messages = read_messages(spark, config, columns=config.columns)
    options = {
        "consumer": pipeline.consumer,
        "ledger": config.place.location,
        "ledger_table": config.place.table,
        "ledger_schema": config.place.schema,
        "handler": pipeline.handler,
        "handler_path": config.folder,
        "mode": pipeline.mode,
        "table": pipeline.table,
        "upsert": pipeline.upsert or None,
        "chunk": pipeline.chunk,
        "transport": config.transport,
        "quarantine": config.quarantine,
        "archive": config.archive,
        "since": since,
        "channel": channel.address,
        "channel_token": channel.token,
    }
    return (
        spread(messages, upsert=pipeline.upsert)
        .writeStream.format("oncely")
        .queryName(pipeline.name)
        .trigger(**config.trigger)
        .option("checkpointLocation", config.checkpoint)
        .options(**as_text(options), **config.policy_options)
        .start()
    )


def _follow(
    query: StreamingQuery, channel: DriverChannel, stop: threading.Event, on_progress: OnProgress
) -> None:
    """Wait for the query's end, or bring it about."""
    try:
        while query.isActive and not stop.wait(_LOOK_S):
            on_progress(channel.progress())
        error = query.exception()
        if error is None and query.isActive:
            channel.stop(_GRACE_S)
    finally:
        # The session may be somebody's, who goes on with it.
        query.stop()
    if error is not None:
        raise error


def _told(error: Exception, config: PipelineConfig) -> OncelyError:
    """An error of Spark's as ours; what only Spark has found wrong with the file names it."""
    own = as_own(error)
    if isinstance(own, ConfigError):
        return ConfigError(f"{config.file}: {str(own).removeprefix('option ')}")
    return own
