"""Modes: opens the task of the sink's option `mode`."""

from collections.abc import Iterable, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING

from pyarrow import RecordBatch
from pyspark.sql.types import StructType

from oncely._util.garbage import rarely_collecting
from oncely.core.errors import StoreError
from oncely.lifecycle.heartbeat import AWAY
from oncely.spark.ledgers import migrated_ledger, url_here
from oncely.spark.modes.start import Start
from oncely.spark.modes.steady import patiently
from oncely.spark.modes.tally import Aside
from oncely.spark.sink.channel import TaskChannel
from oncely.spark.sink.counts import Counts
from oncely.spark.sink.message_rows import check_schema
from oncely.spark.sink.sink_options import SinkOptions, import_handler
from oncely.stores.open_store import open_sessions

if TYPE_CHECKING:
    from oncely.spark.modes.chunks import ChunkTask
    from oncely.spark.modes.table_rows import TableRowsTask

_sessions_at = lru_cache(maxsize=8)(open_sessions)
"""One engine for each Python worker, over all its tasks."""


def check_columns(options: SinkOptions, schema: StructType) -> None:
    """Raise ConfigError for a DataFrame that the mode cannot take."""
    match options.mode:
        case "leased" | "transactional":
            check_schema(schema)
        case "rows":
            from oncely.spark.modes.target_table import TargetTable, open_table

            # As soon as the database answers: a stream may start a batch without it.
            def table() -> TargetTable:
                return open_table(options, migrated_ledger(options.address))

            patiently(table, options.consumer, None, options.policy.lease_s).check(schema)


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
        opened = partial(open_task, options, aside, channel, start)
        task = patiently(opened, options.consumer, channel, options.policy.lease_s)
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
    ledger = migrated_ledger(options.address)
    match options.mode:
        case "leased":
            from oncely.spark.modes.leased import LeasedTask

            handler = import_handler(options)
            return LeasedTask(ledger, options, handler, aside, channel, start)
        case "transactional":
            from oncely.spark.modes.transactional import TransactionalTask

            handler = import_handler(options)
            with url_here(options.address.location) as url:
                begins = _sessions_at(url)
            return TransactionalTask(ledger, options, handler, aside, channel, begins, start)
        case "rows":
            from oncely.spark.modes.table_rows import TableRowsTask
            from oncely.spark.modes.target_table import open_table

            ledger.keep_retention(options.consumer, options.policy.retention)
            return TableRowsTask(ledger, options, aside, channel, open_table(options, ledger))
