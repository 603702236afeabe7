"""The Spark format "oncely": a sink that hands every message to a handler once, and the ledger as
a DataFrame.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from uuid import uuid4

from pyarrow import RecordBatch
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from oncely._util.garbage import rarely_collecting
from oncely.core.errors import ConfigError, OncelyError
from oncely.spark.ledgers import migrated_ledger
from oncely.spark.modes.open_task import check_columns, open_task
from oncely.spark.reader import SCHEMA, LedgerReader, open_reader
from oncely.spark.reader_options import read_reader_options
from oncely.spark.sink.channel import TaskChannel, report_batch
from oncely.spark.sink.counts import Counts
from oncely.spark.sink.handover import hand_over
from oncely.spark.sink.quarantine import Quarantine, remove_stale
from oncely.spark.sink.sink_options import SinkOptions, read_options


@dataclass
class TaskReport(WriterCommitMessage):
    """What a task tells the driver: its counts, and the file of what it set aside."""

    counts: Counts
    batch: str
    """What the quarantine files of the batch start with."""
    quarantined_file: str | None


class OncelyDataSource(DataSource):
    """`format("oncely")`: batch and streaming writes of a DataFrame of messages, and batch reads
    of the ledger.
    """

    @classmethod
    def name(cls) -> str:
        """The name of the format."""
        return "oncely"

    def schema(self) -> str:
        """The columns of a read."""
        return SCHEMA

    def reader(self, schema: StructType) -> LedgerReader:  # noqa: ARG002 - Spark's own signature.
        """The reader of a batch; raises ConfigError for wrong options."""
        return open_reader(read_reader_options(self.options))

    def writer(self, schema: StructType, overwrite: bool) -> "OncelyWriter":
        """The writer of a batch; raises ConfigError for wrong options or columns."""
        if overwrite:
            raise ConfigError('mode overwrite: effects cannot be undone; write .mode("append")')
        return OncelyWriter(_checked(self.options, schema))

    def streamWriter(  # noqa: N802 - Spark's name.
        self,
        schema: StructType,
        overwrite: bool,  # noqa: ARG002 - Spark's own signature.
    ) -> "OncelyStreamWriter":
        """The writer of a stream; raises ConfigError for wrong options or columns."""
        return OncelyStreamWriter(_checked(self.options, schema))


def _checked(options: Mapping[str, str], schema: StructType) -> SinkOptions:
    read = read_options(options)
    check_columns(read, schema)
    return read


class _Committing:
    """What the driver does for a batch, whether or not it is one of a stream."""

    def __init__(self, options: SinkOptions) -> None:
        self._options = options

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int = 0) -> None:  # noqa: ARG002, N803
        """Add up what the tasks report."""
        _commit(self._options, messages)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int = 0) -> None:  # noqa: N803
        """Undo nothing: effects have happened, and the ledger knows which."""


class OncelyWriter(_Committing, DataSourceArrowWriter):
    """Writes one batch. Lives on the driver, and as a copy in every task."""

    def __init__(self, options: SinkOptions) -> None:
        super().__init__(options)
        self._run = uuid4().hex

    def write(self, iterator: Iterator[RecordBatch]) -> TaskReport:
        """Settle the rows of one partition."""
        return _run_task(self._options, f"{self._run}-", iterator)


class OncelyStreamWriter(_Committing, DataSourceStreamArrowWriter):
    """Writes the batches of a stream. Lives on the driver, and as a copy in every task."""

    def write(self, iterator: Iterator[RecordBatch]) -> TaskReport:
        """Settle the rows of one partition of one batch."""
        batch = _property("streaming.sql.batchId")
        query = _property("sql.streaming.queryId")
        return _run_task(self._options, f"{query}-{batch}-", iterator)


def _property(name: str) -> str | None:
    context = TaskContext.get()
    return None if context is None else context.getLocalProperty(name)


def _run_task(options: SinkOptions, batch: str, batches: Iterator[RecordBatch]) -> TaskReport:
    context = TaskContext.get()
    partition = 0 if context is None else context.partitionId()
    ledger = migrated_ledger(options.place)
    quarantine = Quarantine(options.quarantine, f"{batch}{partition:05d}.parquet")
    channel = TaskChannel(options.channel, options.channel_token)
    whole = None
    try:
        ledger.keep_retention(options.consumer, options.policy.retention)
        task = open_task(ledger, options, quarantine, channel)
        with rarely_collecting():
            task.run(batches)
        report = TaskReport(task.counts, batch, quarantine.close())
        whole = task.counts
        return report
    except BaseException:
        quarantine.discard()
        raise
    finally:
        channel.close(whole)


def _commit(options: SinkOptions, messages: Sequence[WriterCommitMessage | None]) -> None:
    reports = [message for message in messages if isinstance(message, TaskReport)]
    total = sum((report.counts for report in reports), Counts())
    if len(reports) != len(messages) or total.received != total.settled:
        raise OncelyError(f"of {total.received} deliveries {total.settled} are accounted for")
    whole = {report.quarantined_file for report in reports}
    for batch in {report.batch for report in reports}:
        remove_stale(options.quarantine, batch, whole)
    if options.channel is not None:
        report_batch(options.channel, options.channel_token, total)
    if options.report is not None:
        hand_over(options.report, total)
