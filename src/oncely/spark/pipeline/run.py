"""The pipeline: a source, a mapping and the sink; runs to its end, or until stopped."""

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from uuid import uuid4

from py4j.protocol import Py4JError
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from oncely._util.signals import told_to_stop
from oncely.core.errors import ConfigError, OncelyError, mask_passwords
from oncely.core.waiting import retries_of
from oncely.ledger.ledger import Ledger
from oncely.lifecycle.heartbeat import AWAY
from oncely.locations import open_named_ledger
from oncely.spark.failures import as_own, cause_of
from oncely.spark.ledgers import check_master
from oncely.spark.pipeline.config import PipelineConfig
from oncely.spark.pipeline.pipeline_source import read_messages
from oncely.spark.recorded_run import RecordedRun
from oncely.spark.session import make_active, session
from oncely.spark.sink.channel import DriverChannel, TaskChannel, driver_channel, report_batch
from oncely.spark.sink.counts import Counts, Report, fetch, hand_over
from oncely.spark.sink.sink_options import runs_batches
from oncely.spark.sink.spreading import slots, spread

_LOOK_S = 0.2
_GRACE_S = 60.0

WHOLE_ERRORS = {"spark.sql.pyspark.jvmStacktrace.enabled": "true"}
"""A Spark setting: errors get Java's stack trace, and our errors have all of it as a note."""

OnProgress = Callable[[Counts], None]


def run_pipeline(
    config: PipelineConfig, on_progress: OnProgress = lambda _: None, *, drains: bool = False
) -> Report:
    """Run the pipeline until its trigger ends it, or SIGINT or SIGTERM.

    `on_progress` is called a few times a second. With `drains` it goes on until no message waits
    for a retry. Raises ConfigError for a wrong file, StoreError if the ledger cannot be opened,
    OncelyError if Spark gives up.
    """
    pipeline, recorded = config.pipeline, RecordedRun()
    with closing(open_named_ledger(*config.address)) as ledger:
        ledger.migrate()
        with config.checking("[pipeline] ledger", "ledger: "):
            ledger.check_privileges("spark")
        with (
            told_to_stop() as stop,
            # Outside of the session, which puts Spark's errors into the words that are kept.
            recorded.going_on(lambda: ledger, pipeline.name, pipeline.consumer),
            session(pipeline.name, config.spark, lambda each: _told(each, config)) as spark,
            # Spark has set a SIGINT handler of its own by now.
            told_to_stop(stop),
        ):
            began = time.monotonic()

            def count(counts: Counts) -> None:
                on_progress(counts)
                recorded.count(counts.so_far())

            run = _PipelineRun(config, spark, ledger, stop, count, drains=drains)
            total = run.on_driver() if hasattr(spark, "sparkContext") else run.on_server()
            count(total)
            return Report(total, time.monotonic() - began, stop.is_set())


@dataclass
class _PipelineRun:
    """One run of a pipeline."""

    config: PipelineConfig
    spark: SparkSession
    ledger: Ledger
    stop: threading.Event
    on_progress: OnProgress
    drains: bool

    def __post_init__(self) -> None:
        self._since = self.ledger.now()
        pipeline = self.config.pipeline
        self._stops_early = pipeline.handler is not None and pipeline.max_failures is None
        """Whether it ends when nearly all messages fail for one reason."""
        self._pool = ThreadPoolExecutor(1, "oncely-due")
        self._due_run: Future[None] | None = None
        """Runs the messages that are due, while there is no batch that would take them."""

    def on_driver(self) -> Counts:
        """Run in the driver, which tasks can reach."""
        channel = driver_channel(self.spark)
        settings = self._settings({"channel": channel.address, "channel_token": channel.token})
        try:
            query = _start(self.spark, self.config, settings)
            self._follow(query, channel, settings)
            if not self.stop.is_set():
                return channel.committed()
        finally:
            # After any end of the query, a due run must not go on.
            channel.stop(0)
            self._pool.shutdown()
            # What tasks have settled of a batch that was not committed is in the ledger, too.
            total = channel.progress().so_far()
            self.on_progress(total)
            channel.close()
        return total

    def on_server(self) -> Counts:
        """Run in a Spark Connect client, which tasks cannot reach."""
        if self.drains:
            raise ConfigError("--drain: does not work with a Spark Connect server; drop it")
        run = uuid4().hex
        query = _start(self.spark, self.config, self._settings({"report": run}))
        try:
            while query.isActive and not self.stop.wait(_LOOK_S):
                pass
            error = query.exception()
        finally:
            query.stop()
        if error is not None:
            raise error
        return fetch(self.spark, run) or Counts()

    def _follow(
        self, query: StreamingQuery, channel: DriverChannel, settings: Mapping[str, str]
    ) -> None:
        """Wait for the end of the query, or stop it."""
        try:
            while query.isActive and self._may_go_on(channel):
                # Idle: no batch is running or will run soon, which would take the due messages.
                has_interval = "processingTime" in self.config.trigger
                if has_interval and self._waits and not query.status["isTriggerActive"]:
                    self._look(settings)
            error = query.exception()
            goes_on, received = error is None and self._waits, -1
            while goes_on and self._may_go_on(channel) and self._look(settings):
                if self._due_run is None and not self.drains:
                    # As long as there were messages of earlier runs: each of them is tried once.
                    before, received = received, channel.committed().received
                    goes_on = received > before
            if channel.refusal is not None:
                channel.stop(_GRACE_S)
                raise OncelyError(channel.refusal)
            if error is None and self.stop.is_set():
                channel.stop(_GRACE_S)
        finally:
            # The session may be the user's, who goes on with it.
            query.stop()
        if error is not None:
            raise error

    def _may_go_on(self, channel: DriverChannel) -> bool:
        """Tell how far it is, and wait a moment; return whether nothing ends the run."""
        counts = channel.progress()
        self.on_progress(counts)
        if self._stops_early:
            channel.refusal = channel.refusal or counts.hopeless
        return channel.refusal is None and not self.stop.wait(_LOOK_S)

    def _look(self, settings: Mapping[str, str]) -> bool:
        """Return whether messages wait. Starts a run if some are due and no run is active. Raises
        the error of a run that failed.
        """
        if self._due_run is not None:
            if self._due_run.done():
                run, self._due_run = self._due_run, None
                run.result()
            return True
        with suppress(*AWAY):
            queue = retries_of(self.config.pipeline.consumer)
            free_in_s = self.ledger.mailbox.free_in_s(queue)
            if free_in_s == 0:
                self._due_run = self._pool.submit(_run_due, self.spark, settings)
            return free_in_s is not None
        return True

    @property
    def _waits(self) -> bool:
        """Whether failed messages wait in the ledger for tasks."""
        pipeline = self.config.pipeline
        return pipeline.handler is not None and self.ledger.can_defer

    def _settings(self, told: Mapping[str, str]) -> dict[str, str]:
        """The sink's settings, with which tasks report to this run."""
        early = {"stops_early": "true"} if self._stops_early else {}
        return {**self.config.sink_options, "since": str(self._since), **early, **told}


def _run_due(spark: SparkSession, settings: Mapping[str, str]) -> None:
    """Write zero rows to the sink: its tasks take the messages that are due."""
    make_active(spark)
    tasks = slots(spark)
    # Filtered only in the tasks: an empty DataFrame would have no tasks to take messages.
    rows = (
        spark.range(0, tasks, 1, tasks).where("rand() < 0").selectExpr("cast(id AS STRING) AS id")
    )
    rows.write.format("oncely").options(**settings).mode("append").save()


def _start(
    spark: SparkSession, config: PipelineConfig, settings: Mapping[str, str]
) -> StreamingQuery:
    pipeline = config.pipeline
    for name, address in (("ledger", config.address.location), ("transport", config.transport)):
        with config.checking(f"[pipeline] {name}", f"{name}: "):
            check_master(spark, {name: address})
    messages = read_messages(spark, config)
    if not runs_batches(settings):
        dealt = spread(messages, pipeline.partitions, pipeline.upsert, pipeline.writers)
        sink = dealt.writeStream.format("oncely").options(**settings)
    else:
        from oncely.spark.batches.batches import Batches

        try:
            (batches := Batches(settings)).fitted(messages)
        except ConfigError as error:
            raise _told(error, config) from error
        # Finish the batches of an earlier run, also if there is no new batch.
        _report(settings, batches.take_up(spark))
        sink = messages.writeStream.foreachBatch(partial(_take_batch, settings))
    writer = (
        sink.queryName(pipeline.name)
        .trigger(**config.trigger)
        .option("checkpointLocation", config.checkpoint)
    )
    try:
        return writer.start()
    except Py4JError as error:
        # PySpark reports an error of the query itself.
        if "://" not in config.checkpoint:
            raise
        shown = mask_passwords(config.checkpoint)
        text = f"{shown!r} cannot be used: {cause_of(error)}"
        raise config.wrong("[pipeline] checkpoint", text) from error


def _take_batch(settings: Mapping[str, str], messages: DataFrame, _: int) -> None:
    """Hand a batch of the stream to its batch handler, and report its counts to the pipeline."""
    from oncely.spark.batches.batches import Batches

    # Like a task's channel, so that stopping the pipeline waits for it.
    own = TaskChannel(settings.get("channel"), settings.get("channel_token", ""))
    try:
        own.raise_if_stopping()
        _report(settings, Batches(settings).process(messages))
    finally:
        own.close()


def _report(settings: Mapping[str, str], counts: Counts) -> None:
    if "channel" in settings:
        report_batch(settings["channel"], settings["channel_token"], counts)
    if "report" in settings:
        hand_over(settings["report"], counts)


def _told(error: Exception, config: PipelineConfig) -> OncelyError:
    """A Spark error as ours; it names the file if only Spark could find the file's error."""
    own = error if isinstance(error, OncelyError) else as_own(error)
    if isinstance(own, ConfigError):
        own = ConfigError(f"{config.file}: {str(own).removeprefix('option ')}")
    if config.spark.items() >= WHOLE_ERRORS.items():
        # Now: after it is stopped, Spark does not return the stack trace any more.
        own.add_note(str(error))
    return own
