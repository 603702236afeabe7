"""The ways into the sink from a program: a batch, a function for foreachBatch, its format."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from oncely.core.errors import ConfigError
from oncely.lifecycle.wrapping import name_of
from oncely.spark.failures import as_own
from oncely.spark.ledgers import check_master
from oncely.spark.session import make_active
from oncely.spark.settings import as_names, as_text, sink_options
from oncely.spark.sink.driver_checks import check_on_driver, check_reachable
from oncely.spark.sink.handover import fetch
from oncely.spark.sink.places import absolute_places
from oncely.spark.sink.sink_options import Mode, import_function, read_options
from oncely.spark.sink.spreading import spread
from oncely.spark.spark_report import Report

if TYPE_CHECKING:
    from oncely.spark.batches.batches import BatchHandler

Handler = str | Callable[..., Any]
"""A function that workers can import, or its name, "module:function"."""


def register(spark: SparkSession) -> None:
    """Make `format("oncely")` known to a session.

    Only where oncely is not installed in the Python that Spark's driver runs, but came with
    `--py-files` or `addArtifacts`: elsewhere it is known by itself.
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
    """Process every message of a batch DataFrame once, and return what became of them.

    What is None is taken from the session's `spark.oncely.*`; `options` are further options of
    the sink, as `sink_options` takes them. `partitions`: how many tasks, two for each that can
    run at a time by default; `writers`: how many write at a time, at most. A `handler_batch`, a
    function or its name, is called here, with a DataFrame of the messages that are new and the key
    of the batch.

    Raises ConfigError for wrong options and columns, StoreUnavailable where the ledger does not
    answer, OncelyError where Spark gives up. A message that fails raises nothing: it is counted.
    """
    given = {
        "consumer": consumer,
        "ledger": ledger,
        "handler": handler,
        "handler_batch": handler_batch,
        "mode": mode,
        **options,
    }
    return _process(messages, given, partitions, writers, is_alone=True)


def _process(
    messages: DataFrame,
    given_options: dict[str, Any],
    partitions: int | None = None,
    writers: int | None = None,
    *,
    is_alone: bool,
) -> Report:
    """`is_alone`: it is not part of a stream, which waits for a ledger that is away."""
    began = time.monotonic()
    handler_batch = given_options.pop("handler_batch", None)
    given = as_text(given_options)
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
    run = uuid4().hex
    settings = sink_options(spark, **given)
    # Of the session's, what the program has said otherwise does not hold.
    for said, other in (("handler", "handler_batch"), ("handler_batch", "handler")):
        if said in given and other not in given:
            settings.pop(other, None)
    settings = _checked(spark, settings)
    if is_alone and _is_driver(spark):
        check_reachable(read_options(settings))
    make_active(spark)
    try:
        if "handler_batch" in settings:
            from oncely.spark.batches.batches import Batches

            batches = Batches(settings, function, partitions)
            return Report(batches.process(messages), time.monotonic() - began)
        settings["report"] = run
        dealt = spread(messages, partitions, as_names(settings.get("upsert", "")), writers)
        dealt.write.format("oncely").options(**settings).mode("append").save()
        counts = fetch(spark, run)
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

    Takes what `process` takes. `on_report` is called with the report of each batch, and its
    number. Raises ConfigError for a function that no worker can import.
    """
    # Told here what is wrong with a function, and not by the first batch.
    given = as_text({"handler": handler, **options})
    if "handler" in given and _is_driver(SparkSession.getActiveSession()):
        import_function(given["handler"], "handler", given.get("handler_path"))

    def take(messages: DataFrame, batch_id: int) -> None:
        given = {
            "consumer": consumer,
            "ledger": ledger,
            "handler": handler,
            "handler_batch": handler_batch,
            **options,
        }
        dealt = {name: given.pop(name, None) for name in ("partitions", "writers")}
        report = _process(messages, given, **dealt, is_alone=False)
        if on_report is not None:
            on_report(report, batch_id)

    return take


def _checked(spark: SparkSession, settings: dict[str, str]) -> dict[str, str]:
    """The options of a write, checked before any job runs, with the paths that this program means.

    A client of Spark Connect leaves that to its server, which has files and modules of its own.
    """
    if not _is_driver(spark):
        check_master(spark, settings)
        return settings
    located = absolute_places(settings)
    check_master(spark, located)
    check_on_driver(read_options(located))
    return located


def _is_driver(spark: SparkSession | None) -> bool:
    """Whether this program is the driver of that session."""
    return spark is not None and hasattr(spark, "sparkContext")
