"""Modes: what a task of the sink does with its rows, by the option `mode`."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from oncely.ledger import Ledger
from oncely.spark.channel import TaskChannel
from oncely.spark.counts import Counts
from oncely.spark.options import SinkOptions, import_function
from oncely.spark.quarantine import Quarantine
from oncely.spark.rows import check_schema

if TYPE_CHECKING:
    from pyarrow import RecordBatch
    from pyspark.sql.types import StructType


class Task(Protocol):
    """One run over the rows of one partition."""

    counts: Counts

    def run(self, batches: Iterable["RecordBatch"]) -> None:
        """Settle every row: none is left uncounted. Raises Stopped where it is told to stop."""


def check_columns(options: SinkOptions, schema: "StructType") -> None:
    """Raise ConfigError for a DataFrame that the mode cannot take."""
    match options.mode:
        case "leased":
            check_schema(schema)


def open_task(
    ledger: Ledger, options: SinkOptions, quarantine: Quarantine, channel: TaskChannel
) -> Task:
    """The task of the mode. Raises ConfigError where its handler cannot be imported."""
    match options.mode:
        case "leased":
            from oncely.spark.task import LeasedTask

            handler = import_function(options.handler, "handler", options.handler_path)
            return LeasedTask(ledger, options, handler, quarantine, channel)
