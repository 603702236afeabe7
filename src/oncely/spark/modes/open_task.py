"""Modes: opens the task of the sink's option `mode`."""

import time
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, TypeVar

from pyarrow import RecordBatch
from pyspark.sql.types import StructType

from oncely._util.garbage import rarely_collecting
from oncely.core.errors import StoreError
from oncely.ledger.ledger import Ledger
from oncely.lifecycle.heartbeat import AWAY, store_outage
from oncely.spark.ledgers import migrated_ledger, url_here
from oncely.spark.modes.start import Start
from oncely.spark.modes.steady import steadily
from oncely.spark.modes.tally import Aside
from oncely.spark.sink.channel import TaskChannel
from oncely.spark.sink.counts import Counts
from oncely.spark.sink.message_rows import check_schema
from oncely.spark.sink.sink_options import SinkOptions, import_handler
from oncely.stores.open_store import open_sessions

if TYPE_CHECKING:
    from oncely.spark.modes.chunks import ChunkTask
    from oncely.spark.modes.table_rows import TableRowsTask

T = TypeVar("T")

_sessions_at = lru_cache(maxsize=8)(open_sessions)
"""One engine for each Python worker, over all its tasks."""


def check_columns(options: SinkOptions, schema: StructType) -> None:
    """Raise ConfigError for a DataFrame that the mode cannot take."""
    match options.mode:
        case "leased" | "transactional":
            check_schema(schema)
        case "rows":
            from oncely.spark.modes.target_table import check_table, open_table

            # As soon as the database answers: a stream may start a batch without it.
            channel, address = TaskChannel(None, ""), options.address
            table = _awaited(
                lambda: open_table(options, migrated_ledger(address)), options, channel
            )
            check_table(table, schema)


def _awaited(ask: Callable[[], T], options: SinkOptions, channel: TaskChannel) -> T:
    until = time.monotonic() + (options.policy.lease_s or 0.0)
    outage = store_outage(consumer=options.consumer)
    return steadily(ask, channel, outage, Counts(), until=until)


def run_task(
    options: SinkOptions,
    aside: Aside,
    channel: TaskChannel,
    batches: Iterable[tuple[Sequence[int], RecordBatch]],
    start: Start | None = None,
) -> Counts:
    """Open the task as soon as the ledger answers, and settle these rows, which come with their
    numbers in the task; close the channel. It waits for the length of a lease, as there may be no
    ledger at all. Raises as `open_task` does, and Stopped.
    """
    counts = refusal = None
    try:
        task = _awaited(lambda: open_task(options, aside, channel, start), options, channel)
        with rarely_collecting():
            task.run(batches)
        counts = task.counts
        return counts
    except StoreError as error:
        refusal = None if isinstance(error, AWAY) else str(error)
        raise
    finally:
        channel.close(counts, refusal)


def open_task(
    options: SinkOptions, aside: Aside, channel: TaskChannel, start: Start | None = None
) -> "ChunkTask | TableRowsTask":
    """The task of the mode. Raises ConfigError if the handler cannot be imported, and
    StoreUnavailable.
    """
    match options.mode:
        case "leased":
            from oncely.spark.modes.leased import LeasedTask

            handler = import_handler(options)
            return LeasedTask(_ledger(options), options, handler, aside, channel, start)
        case "transactional":
            from oncely.spark.modes.transactional import TransactionalTask

            handler = import_handler(options)
            with url_here(options.address.location) as url:
                begins = _sessions_at(url)
            ledger = _ledger(options)
            return TransactionalTask(ledger, options, handler, aside, channel, begins, start)
        case "rows":
            from oncely.spark.modes.table_rows import TableRowsTask
            from oncely.spark.modes.target_table import open_table

            ledger = _ledger(options)
            return TableRowsTask(ledger, options, aside, channel, open_table(options, ledger))


def _ledger(options: SinkOptions) -> Ledger:
    ledger = migrated_ledger(options.address)
    ledger.keep_retention(options.consumer, options.policy.retention)
    return ledger
