"""Modes: what a task of the sink does with its rows, by the option `mode`."""

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, Protocol

from pyarrow import RecordBatch
from pyspark.sql.types import StructType

from oncely.core.errors import ConfigError
from oncely.ledger import Ledger
from oncely.lifecycle.wrapping import check_function, check_takes, is_async
from oncely.spark.ledgers import url_here
from oncely.spark.sink.channel import TaskChannel
from oncely.spark.sink.counts import Counts
from oncely.spark.sink.message_rows import check_schema
from oncely.spark.sink.quarantine import Quarantine
from oncely.spark.sink.sink_options import SinkOptions, import_function
from oncely.stores.open_store import open_sessions

_sessions_at = lru_cache(maxsize=8)(open_sessions)
"""One engine for a Python worker, however many tasks it runs."""


class Task(Protocol):
    """One run over the rows of one partition."""

    counts: Counts

    def run(self, batches: Iterable[RecordBatch]) -> None:
        """Settle every row: none is left uncounted. Raises Stopped where it is told to stop."""


def check_columns(options: SinkOptions, schema: StructType) -> None:
    """Raise ConfigError for a DataFrame that the mode cannot take."""
    match options.mode:
        case "leased" | "transactional":
            check_schema(schema)
        case "rows":
            from oncely.spark.modes.table_columns import check_table, open_table

            check_table(open_table(options), schema)


def open_task(
    ledger: Ledger, options: SinkOptions, quarantine: Quarantine, channel: TaskChannel
) -> Task:
    """The task of the mode. Raises ConfigError where its handler cannot be imported."""
    match options.mode:
        case "leased":
            from oncely.spark.modes.leased import LeasedTask

            handler = _handler(options, "message")
            return LeasedTask(ledger, options, handler, quarantine, channel)
        case "transactional":
            from oncely.spark.modes.transactional import TransactionalTask

            handler = _handler(options, "message", "session")
            with url_here(options.ledger) as url:
                begins = _sessions_at(url)
            return TransactionalTask(ledger, options, handler, quarantine, channel, begins)
        case "rows":
            from oncely.spark.modes.table_columns import open_table
            from oncely.spark.modes.table_rows import TableRowsTask

            return TableRowsTask(ledger, options, quarantine, channel, open_table(options))


def _handler(options: SinkOptions, *takes: str) -> Callable[..., Any]:
    """Raises ConfigError for what cannot be imported, called with these, or is never done."""
    handler = import_function(options.handler, "handler", options.handler_path)
    if is_async(handler):
        raise ConfigError("handler: it is called, and not awaited; write it without async")
    check_function(handler, "handler")
    check_takes(handler, "handler", takes)
    return handler
