"""The ways into the sink from a program: a batch, a function for foreachBatch, its format."""

import time
from collections.abc import Callable
from typing import Any
from uuid import uuid4

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from oncely.core.errors import ConfigError
from oncely.spark.failures import as_own
from oncely.spark.session import make_active
from oncely.spark.settings import as_names, as_text, sink_options
from oncely.spark.sink.handover import fetch
from oncely.spark.sink.sink_options import Mode
from oncely.spark.sink.spreading import spread
from oncely.spark.spark_report import Report

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
    mode: Mode | None = None,
    partitions: int | None = None,
    **options: Any,
) -> Report:
    """Process every message of a batch DataFrame once, and return what became of them.

    What is None is taken from the session's `spark.oncely.*`; `options` are further options of
    the sink, as `sink_options` takes them. `partitions`: how many tasks, two for each that can
    run at a time by default.

    Raises ConfigError for wrong options and columns, OncelyError where Spark gives up. A message
    that fails raises nothing: it is counted.
    """
    began = time.monotonic()
    given = as_text(
        {"consumer": consumer, "ledger": ledger, "handler": handler, "mode": mode, **options}
    )
    if messages.isStreaming:
        raise ConfigError(
            "process takes a batch; for a stream write "
            ".writeStream.foreachBatch(oncely.spark.foreach_batch(...))"
        )
    spark = messages.sparkSession
    make_active(spark)
    run = uuid4().hex
    settings = sink_options(spark, **given, report=run)
    try:
        dealt = spread(messages, partitions, as_names(settings.get("upsert", "")))
        dealt.write.format("oncely").options(**settings).mode("append").save()
        counts = fetch(spark, run)
    except (PySparkException, Py4JError) as error:
        raise as_own(error) from error
    return Report(counts, time.monotonic() - began)


def foreach_batch(
    *,
    consumer: str | None = None,
    ledger: str | None = None,
    handler: Handler | None = None,
    on_report: Callable[[Report, int], None] | None = None,
    **options: Any,
) -> Callable[[DataFrame, int], None]:
    """A function for `writeStream.foreachBatch` that processes every message once.

    Takes what `process` takes. `on_report` is called with the report of each batch, and its
    number. Raises ConfigError for a function that no worker can import.
    """
    # Told here what is wrong with a function, and not by the first batch.
    as_text({"handler": handler, **options})

    def take(messages: DataFrame, batch_id: int) -> None:
        report = process(messages, consumer=consumer, ledger=ledger, handler=handler, **options)
        if on_report is not None:
            on_report(report, batch_id)

    return take
