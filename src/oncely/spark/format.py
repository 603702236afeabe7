"""The Spark format "oncely": a sink that hands every message to a handler once, and a reader of the
ledger.
"""

import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from uuid import uuid4

from pyarrow import RecordBatch
from pyspark import SparkFiles, TaskContext
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from oncely.core.errors import ConfigError, OncelyError, StoreError
from oncely.lifecycle.heartbeat import AWAY
from oncely.spark.handler_process.supervisor import TaskSupervisor
from oncely.spark.ledgers import migrated_ledger, url_here
from oncely.spark.modes.open_task import check_columns, run_task
from oncely.spark.reader import SCHEMA, LedgerReader, read_reader_options
from oncely.spark.sink.channel import TaskChannel, report_batch
from oncely.spark.sink.counts import Counts, hand_over
from oncely.spark.sink.message_rows import numbered
from oncely.spark.sink.paths import check_quarantine
from oncely.spark.sink.quarantine import Quarantine, forget_attempts, remove_stale
from oncely.spark.sink.sink_options import (
    BATCH_JOB,
    LAKES,
    SinkOptions,
    check_on_driver,
    read_options,
)

_ARCHIVES = (".zip", ".egg", ".whl")


@dataclass
class TaskReport(WriterCommitMessage):
    """A task's report to the driver: its counts, and its file in the quarantine."""

    counts: Counts
    batch: str
    """The name of its file in the quarantine."""
    over: str
    """The earlier batch that cannot run again once this one is committed."""
    quarantined_file: str | None
    refusal: str | None = None
    """The store's error that ended the task, and that another attempt would meet again."""


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
        return read_reader_options(self.options)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        """The writer of a batch; raises ConfigError for wrong options or columns."""
        if overwrite:
            raise ConfigError('mode overwrite: effects cannot be undone; write .mode("append")')
        if BATCH_JOB in self.options:
            from oncely.spark.batches.member_jobs import JobWriter

            return JobWriter(self.options)
        return OncelyWriter(_checked(self.options, schema), uuid4().hex)

    def streamWriter(  # noqa: N802 - Spark's name.
        self,
        schema: StructType,
        overwrite: bool,
    ) -> DataSourceStreamArrowWriter:
        """The writer of a stream; raises ConfigError for wrong options or columns."""
        if overwrite:
            raise ConfigError(
                'outputMode complete: each batch has all results again; write .outputMode("append")'
            )
        return OncelyWriter(_checked(self.options, schema))


def _checked(options: Mapping[str, str], schema: StructType) -> SinkOptions:
    _find_archives()
    read = read_options(options)
    if read.handler_batch or (read.table or "").startswith(LAKES):
        name = "handler_batch" if read.handler_batch else "table"
        raise ConfigError(
            f"option {name}: a batch is written by your program, not by tasks; write "
            f".writeStream.foreachBatch(oncely.spark.foreach_batch({name}=...))"
        )
    check_on_driver(read)
    check_columns(read, schema)
    return read


class OncelyWriter(DataSourceArrowWriter, DataSourceStreamArrowWriter):
    """Writes the batch of one `run`, or without one the batches of a stream. It is used on the
    driver, and as a copy in each task.
    """

    def __init__(self, options: SinkOptions, run: str | None = None) -> None:
        if options.since is None:
            # The same for all tasks: what one task has failed, another does not take for old.
            with suppress(OncelyError):
                options = replace(options, since=migrated_ledger(options.address).now())
        self._options, self._run = options, run

    def write(self, iterator: Iterator[RecordBatch]) -> TaskReport:
        """Settle the rows of one partition of one batch."""
        if self._run is not None:
            return _run_task(self._options, self._run, self._run, iterator)
        batch = int(_property("streaming.sql.batchId") or 0)
        query = _property("sql.streaming.queryId")
        # Spark may not learn of this commit; only the next batch shows that it has.
        return _run_task(self._options, f"{query}-{batch}", f"{query}-{batch - 1}", iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int = 0) -> None:  # noqa: ARG002, N803
        """Add up the reports of the tasks."""
        commit_batch(self._options, messages)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int = 0) -> None:  # noqa: N803
        """Undo nothing: effects have happened, and the ledger knows which ones."""


def _find_archives() -> None:
    """Let modules be imported from archives that were added to the session: for a format that Spark
    has found by itself it adds to the path of its workers only the folder in which they are.
    """
    root = Path(SparkFiles.getRootDirectory())
    # Spark Connect has a folder of its own for them.
    files = [*root.glob("*"), *root.glob("pyfiles/*")]
    found = (str(file) for file in files if file.suffix in _ARCHIVES)
    sys.path.extend(sorted({*found} - {*sys.path}))


def _property(name: str) -> str | None:
    context = TaskContext.get()
    return None if context is None else context.getLocalProperty(name)


def _run_task(
    options: SinkOptions, batch: str, over: str, batches: Iterator[RecordBatch]
) -> TaskReport:
    _find_archives()
    context = TaskContext.get()
    partition = 0 if context is None else context.partitionId()
    # A cluster cannot share each ledger, and this machine may not have the secret.
    with url_here(options.address.location):
        check_quarantine(options.quarantine)
    task = f"{batch}-{partition:05d}"
    quarantine = Quarantine(options.quarantine, batch, partition)
    try:
        if options.mode == "rows":
            # Here: without a handler there is nothing to isolate.
            channel = TaskChannel(options.channel, options.channel_token, task)
            counts = run_task(options, quarantine.add, channel, numbered(batches))
        else:
            counts = TaskSupervisor(options, quarantine, task).run(batches)
        return TaskReport(counts, batch, over, quarantine.close())
    except BaseException as error:
        quarantine.discard()
        if isinstance(error, StoreError) and not isinstance(error, AWAY):
            # Raised here, Spark would repeat the task: it would wait for the claims of this
            # attempt, and run handlers again.
            return TaskReport(Counts(), batch, over, None, str(error))
        raise


def commit_batch(options: SinkOptions, messages: Sequence[WriterCommitMessage | None]) -> None:
    """Add up the reports of a batch's tasks. Raises OncelyError if the store has refused one, or
    if a delivery is not counted, and ConfigError for a trigger without batches.
    """
    reports = [message for message in messages if isinstance(message, TaskReport)]
    for report in reports:
        if report.refusal is not None:
            raise OncelyError(report.refusal)
    if None in messages:
        # Spark has not called the tasks at all. It only logs what is raised here, and goes on, but
        # marks no offset as processed.
        text = 'trigger continuous: no row is handled; write .trigger(processingTime="1 second")'
        warnings.warn(f"oncely: {text}", RuntimeWarning, stacklevel=1)
        raise ConfigError(text)
    total = sum((report.counts for report in reports), Counts())
    if len(reports) != len(messages) or total.received != total.settled:
        raise OncelyError(f"only {total.settled} of {total.received} deliveries are accounted for")
    whole = {report.quarantined_file for report in reports}
    for batch, over in {(report.batch, report.over) for report in reports}:
        remove_stale(options.quarantine, batch, whole)
        forget_attempts(options.quarantine, over)
    _judge(options, total)
    if options.channel is not None:
        report_batch(options.channel, options.channel_token, total)
    if options.report is not None:
        hand_over(options.report, total)


def _judge(options: SinkOptions, counts: Counts) -> None:
    """Raise OncelyError if more of a batch failed than `fail_if` or `max_failures` allows.

    The batch then does not count as committed: Spark may repeat it, and the ledger knows it.
    """
    see = f"; see: oncely list --consumer {options.consumer} --state failed"
    # Only handlers that ran: a batch that had failed before passes.
    failed = counts.ran - counts.handled
    if options.max_failures is not None and failed > options.max_failures * counts.ran:
        raise OncelyError(
            f"{failed:,} of {counts.ran:,} messages failed, more than the share that option "
            f"max_failures={options.max_failures:g} allows; last error: {counts.last_error}{see}"
        )
    left = counts.new - counts.handled
    is_all = left > 0 and not counts.handled
    text = f"{left:,} of {counts.new:,} new messages were not handled: {counts.in_words()}"
    if (options.fail_if == "all" and is_all) or (options.fail_if == "any" and left):
        raise OncelyError(f'{text} (option fail_if="{options.fail_if}"){see}')
    # A program that gets the counts can judge them itself.
    if is_all and options.fail_if is None and options.report is None and options.channel is None:
        warnings.warn(f"oncely: {text}{see}", RuntimeWarning, stacklevel=1)
