"""The sink for programs: process a batch, a function for foreachBatch, register the format, and the
counts of a running stream.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from oncely.core.errors import ConfigError, OncelyError
from oncely.lifecycle.wrapping import name_of
from oncely.spark.failures import as_own
from oncely.spark.ledgers import check_master, migrated_ledger
from oncely.spark.option_values import as_names, as_text, sink_options
from oncely.spark.recorded_run import RecordedRun
from oncely.spark.session import make_active
from oncely.spark.sink.channel import driver_channel
from oncely.spark.sink.counts import Counts, Report, fetch
from oncely.spark.sink.paths import absolute_paths
from oncely.spark.sink.sink_options import (
    Mode,
    check_on_driver,
    import_function,
    read_options,
    runs_batches,
)
from oncely.spark.sink.spreading import spread

if TYPE_CHECKING:
    from oncely.spark.batches.batches import BatchHandler

Handler = str | Callable[..., Any]
"""A function that workers can import, or its name, "module:function"."""


def register(spark: SparkSession) -> None:
    """Make `format("oncely")` known to a session.

    Needed only if oncely is not installed in the Python of Spark's driver, but was added by
    `--py-files` or `addArtifacts`: otherwise Spark finds it by itself.
    """
    from oncely.spark.format import OncelyDataSource

    spark.dataSource.register(OncelyDataSource)


def process(
    messages: DataFrame,
    *,
    consumer: str | None = None,
    ledger: str | None = None,
    handler: Handler | None = None,
    handler_batch: "str | BatchHandler | None" = None,
    mode: Mode | None = None,
    partitions: int | None = None,
    writers: int | None = None,
    **options: Any,
) -> Report:
    """Process every message of a batch DataFrame once, and return a report.

    An argument that is None is taken from the session's `spark.oncely.*`; `options` are further
    options of the sink, as for `sink_options`. `partitions` is the number of tasks, by default
    two for each task that can run at a time; `writers` is the most tasks that write at a time. A
    `handler_batch`, a function or its name, is called in this program, with a DataFrame of the new
    messages and the batch key.

    Raises ConfigError for wrong options and columns, StoreUnavailable if the ledger does not
    answer, OncelyError if Spark gives up. A failed message raises no error: it is counted. A ledger
    in SQL keeps what it came to as a run, for operators.
    """
    own = {"consumer": consumer, "ledger": ledger, "handler": handler, "mode": mode, **options}
    return _process(messages, own, handler_batch, RecordedRun(), partitions, writers, is_alone=True)


def _process(
    messages: DataFrame,
    options: dict[str, Any],
    handler_batch: "str | BatchHandler | None",
    recorded: RecordedRun,
    partitions: int | None = None,
    writers: int | None = None,
    *,
    is_alone: bool,
) -> Report:
    """`is_alone`: not part of a stream, which waits for a ledger that is unavailable."""
    given = as_text(options)
    function = None
    if handler_batch is not None:
        function = handler_batch if callable(handler_batch) else None
        given["handler_batch"] = name_of(function) if function else str(handler_batch)
    if messages.isStreaming:
        raise ConfigError(
            "process takes a batch; for a stream write "
            ".writeStream.foreachBatch(oncely.spark.foreach_batch(...))"
        )
    spark = messages.sparkSession
    settings = sink_options(spark, **given)
    # The program's options win over the session's.
    for said, other in (("handler", "handler_batch"), ("handler_batch", "handler")):
        if said in given and other not in given:
            settings.pop(other, None)
    if not _is_driver(spark):
        # The other checks are the server's, whose files and modules differ.
        check_master(spark, settings)
        return _settled(messages, settings, function, partitions, writers)
    settings = absolute_paths(settings)
    check_master(spark, settings)
    read = read_options(settings)
    check_on_driver(read)
    if is_alone:
        # Tasks would wait for a ledger that does not answer.
        with suppress(ConfigError):
            migrated_ledger(read.address).now()
    name = spark.sparkContext.appName or read.consumer
    with recorded.going_on(partial(migrated_ledger, read.address), name, read.consumer):
        report = _settled(messages, settings, function, partitions, writers)
        recorded.count(recorded.total + report.counts)
    return report


def _settled(
    messages: DataFrame,
    settings: dict[str, str],
    function: "BatchHandler | None",
    partitions: int | None,
    writers: int | None,
) -> Report:
    """What became of the messages."""
    make_active(messages.sparkSession)
    began = time.monotonic()
    try:
        if runs_batches(settings):
            from oncely.spark.batches.batches import Batches

            batches = Batches(settings, function, partitions)
            return Report(batches.process(messages), time.monotonic() - began)
        run = uuid4().hex
        dealt = spread(messages, partitions, as_names(settings.get("upsert", "")), writers)
        told = {**settings, "report": run}
        dealt.write.format("oncely").options(**told).mode("append").save()
        counts = fetch(messages.sparkSession, run)
        if counts is None:
            raise OncelyError("the counts of the run are not where it was committed")
    except (PySparkException, Py4JError, ConnectionError) as error:
        raise as_own(error) from error
    return Report(counts, time.monotonic() - began)


def foreach_batch(
    *,
    consumer: str | None = None,
    ledger: str | None = None,
    handler: Handler | None = None,
    handler_batch: "str | BatchHandler | None" = None,
    on_report: Callable[[Report, int], None] | None = None,
    **options: Any,
) -> Callable[[DataFrame, int], None]:
    """A function for `writeStream.foreachBatch` that processes every message once.

    Takes the arguments of `process`. `on_report` is called with the report of each batch, and the
    batch's number. A ledger in SQL keeps all batches together as one run, for operators. Raises
    ConfigError for a function that workers cannot import.
    """
    # A wrong function is reported here, not by the first batch.
    checked = as_text({"handler": handler, **options})
    if "handler" in checked and _is_driver(SparkSession.getActiveSession()):
        import_function(checked["handler"], "handler", checked.get("handler_path"))

    dealt = {name: options.pop(name, None) for name in ("partitions", "writers")}
    own = {"consumer": consumer, "ledger": ledger, "handler": handler, **options}
    recorded = RecordedRun()

    def take(messages: DataFrame, batch_id: int) -> None:
        report = _process(messages, own, handler_batch, recorded, **dealt, is_alone=False)
        if on_report is not None:
            on_report(report, batch_id)

    return take


def _is_driver(spark: SparkSession | None) -> bool:
    """Whether this program is the driver of that session, and not a client of Spark Connect."""
    return spark is not None and hasattr(spark, "sparkContext")


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
