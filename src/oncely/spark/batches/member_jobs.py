"""Jobs on the messages of a batch: the program starts a job, and tasks of the sink do it.

One job claims each message for the batch, and writes the granted ones, which are new, to a file.
Claims have no lease, as only their batch has a heartbeat; and they have the batch's token: a task
that runs again is granted the same messages again. The others end messages. They claim them under
that token, which grants the claims again, or shows that another attempt has ended them already.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple
from uuid import uuid4

import pyarrow as pa
from py4j.protocol import Py4JError
from pyarrow import RecordBatch
from pyspark import TaskContext
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from oncely._util.crash_points import reached
from oncely._util.garbage import rarely_collecting
from oncely.core.commands import Busy
from oncely.core.control import Unrecoverable
from oncely.core.errors import ConfigError, OncelyError
from oncely.core.record import Key, birth_of
from oncely.ledger.driver import run_inline
from oncely.ledger.ledger import Ledger
from oncely.lifecycle.lifecycle import Lifecycle
from oncely.lifecycle.retry_queue import RetryQueue
from oncely.spark.batches.staging import IN_DOUBT, STAGED, StagingFolder
from oncely.spark.ledgers import migrated_ledger
from oncely.spark.modes.chunks import ChunkTask
from oncely.spark.modes.row_turn import RowTurn
from oncely.spark.modes.steady import patiently
from oncely.spark.modes.tally import MISMATCH, Aside
from oncely.spark.sink.channel import TaskChannel
from oncely.spark.sink.counts import Counts
from oncely.spark.sink.message_rows import (
    BROKEN_COLUMN,
    COLUMN_TYPES,
    COLUMNS_OF_ROWS,
    ROW_COLUMN,
    Row,
    numbered,
    read_chunks,
)
from oncely.spark.sink.quarantine import Quarantine, forget_attempts
from oncely.spark.sink.sink_options import BATCH_JOB, SinkOptions, read_options
from oncely.spark.sink.spreading import spread

Does = Literal["claim", "complete", "fail", "doubt"]
BATCH = "batch"
"""The key in a record's metadata for the batch that claimed it."""
_AT_ONCE = "1ms"


class BatchFailed(Unrecoverable):
    """The batch of a message has failed permanently."""


class Job(NamedTuple):
    """A job on the rows that are written to the sink."""

    does: Does
    batch_key: str
    folder: str
    """Where the batch is staged."""
    name: str
    """The name of the job's report there."""
    error: str = ""
    """The error of the messages, if they have failed."""
    due: Sequence[str] = ()
    """The ids of the messages that the program has taken from the ledger."""

    @property
    def staging(self) -> StagingFolder:
        """Where the batch is staged."""
        return StagingFolder(self.folder)

    @property
    def token(self) -> int:
        """The token of the claims on the batch's messages, the same for each attempt."""
        return birth_of(int(self.batch_key, 16))


@dataclass
class JobReport(WriterCommitMessage):
    """The result of a task, or of all: counted deliveries, and claimed messages."""

    counts: Counts = field(default_factory=Counts)
    messages: int = 0
    files: list[str] = field(default_factory=list)
    """The files with new messages."""

    def __add__(self, other: "JobReport") -> "JobReport":
        return JobReport(
            self.counts + other.counts, self.messages + other.messages, self.files + other.files
        )


def read_report(told: Mapping[str, Any]) -> JobReport:
    """The report from its JSON."""
    return JobReport(**{**told, "counts": Counts(**told["counts"])})


@dataclass(frozen=True)
class Batch:
    """The batch of one key: its messages, their staging folder, and the jobs on them."""

    spark: SparkSession
    key: str
    staging: StagingFolder
    settings: Mapping[str, str]
    """The sink's."""
    partitions: int | None
    deliveries: DataFrame | None = None
    """The input; None if an earlier program has begun the batch."""
    due: Sequence[str] = ()
    """The ids of what this program has taken from the ledger."""

    def stage(self) -> None:
        """Store the deliveries, unless they are stored."""
        if self.deliveries is not None:
            self.deliveries.write.mode("overwrite").parquet(self.staging.rows)
            self.staging.write(STAGED)
            reached("batch_staged")

    def claim(self) -> Any:
        """Claim the new messages among the deliveries; return a report as JSON. After an
        interruption repeat it: the same messages are granted.
        """
        if (claimed := self.staging.claimed()) is not None:
            # Of what the ledger has forgotten, no more is granted now.
            return claimed
        rows = spread(self.spark.read.parquet(self.staging.rows), self.partitions)
        # Copies are next to each other, so that a task finds them without keeping all ids.
        return self._let_tasks("claim", rows.sortWithinPartitions("id"))

    def new(self, claimed: JobReport) -> DataFrame:
        """The new messages: the same each time the handler is called."""
        return self._read(claimed).drop(ROW_COLUMN, BROKEN_COLUMN)

    def end(self, claimed: JobReport, does: Does, error: str = "") -> None:
        """Complete all its messages, or fail them permanently, or put them in doubt; unless another
        program has, and has removed the files.
        """
        try:
            if self.are_there(claimed):
                rows = self._read(claimed)
                # A dead letter has its message.
                needed = COLUMN_TYPES if does == "fail" else ("id",)
                there = [name for name in rows.columns if name in needed]
                self._let_tasks(does, rows.select(there), error)
        except (PySparkException, Py4JError, ConfigError, OSError):
            if self.are_there(claimed):
                raise
        if does == "doubt":
            self.staging.write(IN_DOUBT)
            return
        reached("members_failed" if does == "fail" else "members_completed")

    def _let_tasks(self, does: Does, rows: DataFrame, error: str = "") -> Any:
        """Let tasks do a job on the rows; return the report as JSON."""
        job = Job(does, self.key, self.staging.folder, f"told/{uuid4().hex}.json", error, self.due)
        told = {**self.settings, BATCH_JOB: json.dumps(job)}
        rows.write.format("oncely").options(**told).mode("append").save()
        return self.staging.told(job.name)

    def _read(self, claimed: JobReport) -> DataFrame:
        if not self.staging.has(STAGED):
            raise self.not_there()
        schema = self.spark.read.parquet(self.staging.rows).schema
        paths = [f"{self.staging.folder}/{name}" for name in claimed.files]
        return self.spark.read.schema(schema).parquet(*paths)

    def are_there(self, claimed: JobReport) -> bool:
        """Whether the files are there; they are removed only after the job."""
        return bool(claimed.files) and self.staging.has(*claimed.files)

    def not_there(self) -> ConfigError:
        """The error of a folder that is not there, though the batch is not settled."""
        return ConfigError(
            f"staging: batch {self.key} is not in {self.staging.folder!r}; name a folder that "
            "all machines share"
        )


# ---- In tasks ------------------------------------------------------------------------------------


class ClaimTask(ChunkTask):
    """Claims the deliveries of one partition for a batch, and writes the granted ones to a file;
    the copies of an id are next to each other.
    """

    def __init__(self, ledger: Ledger, options: SinkOptions, job: Job, aside: Aside) -> None:
        # A row has no body and no time of sending: such columns are the user's own.
        self._reads = COLUMNS_OF_ROWS if options.mode == "rows" else (*COLUMN_TYPES,)
        # The handler and the probe are called by the program, for a batch.
        options, channel = replace(options, named={}), TaskChannel(None, "")
        if options.mode == "rows":
            # The table is asked about batches alone: a row that is in doubt may be in it.
            options = replace(options, policy=replace(options.policy, on_in_doubt="hold"))
        super().__init__(ledger, options, lambda _: None, aside, channel)
        self._lifecycle = Lifecycle.under(ledger, options.consumer, self._horizon.policy, "none")
        # The program has taken the retries that are due.
        self._retries, self._due = None, frozenset(job.due)
        self._job = job
        self.files: list[str] = []
        """The file of the new messages, with all their columns, if there are any."""
        self._writer: Any = None
        self._source: tuple[Sequence[int], RecordBatch]
        """The numbers of the rows of Spark's last batch, and the rows."""
        self.granted = 0
        self._granted: dict[str, str | None] = {}
        """The fingerprints of granted messages by id, as long as copies may follow."""

    def run(self, batches: Iterable[tuple[Sequence[int], RecordBatch]]) -> None:
        """Write the granted deliveries, and count all others."""

        def read() -> Iterator[tuple[Sequence[int], RecordBatch]]:
            for source in batches:
                self._source = numbers, rows = source
                yield numbers, rows.select([n for n in rows.schema.names if n in self._reads])

        super().run(read())
        if self._writer is not None:
            self._writer.close()

    @property
    def unsettled(self) -> int:
        """As in ChunkTask."""
        return super().unsettled - self.granted

    def _take_in_pace(self, chunk: Sequence[Row]) -> None:
        super()._take_in_pace(chunk)
        last = chunk[-1].id
        self._granted = {last: self._granted[last]} if last in self._granted else {}

    def _turn(self, row: Row) -> RowTurn:
        turn = super()._turn(row)
        turn.token, turn.metadata = self._job.token, {BATCH: self._job.batch_key}
        turn.source, turn.is_due = self._source, row.id in self._due
        return turn

    def _process(self, turns: Sequence[RowTurn]) -> None:
        # All claims of a batch have its token, for which each of several would be granted.
        one_each = {turn.row.id: turn for turn in turns}
        copies = [turn for turn in turns if one_each[turn.row.id] is not turn]
        asking = [turn for id_, turn in one_each.items() if id_ not in self._granted]
        self._steadily(lambda: run_inline(self._lifecycle.claim(self._driver, asking)))
        reached("some_members_claimed")
        granted = [turn for turn in asking if turn.claim is not None]
        # Deliveries that have waited may be of several.
        for numbers, source in {id(turn.source): turn.source for turn in granted}.values():
            if self._writer is None:
                name, self._writer = self._job.staging.new_file(source.schema)
                self.files.append(name)
            indexes = [turn.row.number - numbers[0] for turn in granted if turn.source[1] is source]
            rows = pa.Table.from_batches([source]).take(pa.array(indexes, pa.int64()))
            self._writer.write_table(rows)
        self.granted += len(granted)
        self._granted |= {turn.row.id: turn.fingerprint for turn in granted}
        self._ready += self._order.leave(granted)
        self._count_ended([turn for turn in one_each.values() if turn.claim is None])
        if copies:
            self._process(copies)

    def _count(self, turn: RowTurn) -> float | None:
        outcome = turn.outcome
        if outcome is None and turn.row.id in self._granted:
            known = (turn.fingerprint, self._granted[turn.row.id])
            if None not in known and len({*known}) > 1:
                self._tally.set_aside(turn.row, MISMATCH)
            else:
                self.counts.duplicates_input += 1
            return None
        # The other batch finishes its messages, and may itself wait for messages of this one.
        if isinstance(outcome, Busy) and BATCH in (outcome.record.metadata or {}):
            if outcome.record.first_seen >= self._since:
                # Its first delivery in this run shows whether it still waits.
                self.counts.duplicates_input += 1
            else:
                self.counts.waiting += 1
            return None
        return super()._count(turn)


class JobWriter(DataSourceArrowWriter):
    """Writes to the sink if its options name a job. It is used on the driver, and as a copy in each
    task. Where it is aborted nothing is undone: the job is repeated.
    """

    def __init__(self, options: Mapping[str, str]) -> None:
        given = {name.lower(): value for name, value in options.items()}
        self._job = Job(*json.loads(given.pop(BATCH_JOB)))
        self._options = read_options(given)

    def write(self, iterator: Iterator[RecordBatch]) -> JobReport:
        """Do the job with the rows of one partition."""
        options, job = self._options, self._job
        ledger = patiently(lambda: migrated_ledger(options.address), options.consumer)
        with rarely_collecting():
            if job.does == "claim":
                return self._claim(ledger, iterator)
            end = _doubt if job.does == "doubt" else _end
            for rows in read_chunks(numbered(iterator), lambda: options.chunk):
                end(ledger, options, job, rows)
        return JobReport()

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Write the report of all tasks to the staging folder."""
        reports = [message for message in messages if isinstance(message, JobReport)]
        if len(reports) != len(messages):
            raise OncelyError(f"only {len(reports)} of {len(messages)} tasks have reported")
        total = sum(reports, JobReport())
        forget_attempts(self._options.quarantine, self._job.batch_key)
        self._job.staging.write(self._job.name, json.dumps(total, default=vars))

    def _claim(self, ledger: Ledger, batches: Iterator[RecordBatch]) -> JobReport:
        options, job = self._options, self._job
        context = TaskContext.get()
        partition = 0 if context is None else context.partitionId()
        quarantine = Quarantine(options.quarantine, job.batch_key, partition)
        try:
            task = ClaimTask(ledger, options, job, quarantine.add)
            task.run(numbered(batches))
            quarantine.close()
        except BaseException:
            quarantine.discard()
            raise
        if task.unsettled:
            raise OncelyError(f"of {task.counts.received} deliveries some are not accounted for")
        return JobReport(task.counts, task.granted, task.files)


def _end(ledger: Ledger, options: SinkOptions, job: Job, rows: Sequence[Row]) -> None:
    """Complete these messages, or fail them with the job's error, if there is one."""
    # The members were checked when they were claimed.
    policy = replace(options.policy, on_mismatch="ignore", on_too_old="run")
    lifecycle = Lifecycle.under(ledger, options.consumer, policy, "none")
    lifecycle = replace(lifecycle, retry_queue=RetryQueue(options.consumer))
    driver, turns = lifecycle.sync_driver, [RowTurn(row, job.token) for row in rows]
    patiently(lambda: run_inline(lifecycle.claim(driver, turns)), options.consumer)
    granted = [turn for turn in turns if turn.claim is not None]
    for turn in granted:
        turn.message = turn.row.message()
        turn.called()
        turn.raised(BatchFailed(job.error) if job.error else None)
    run_inline(lifecycle.store(driver, granted))
    for turn in granted:
        if turn.refusal is not None:
            raise turn.refusal


def _doubt(ledger: Ledger, options: SinkOptions, job: Job, rows: Sequence[Row]) -> None:
    """Hold these messages in doubt, by ending the leases of their claims."""
    policy = replace(options.policy, on_mismatch="ignore")
    keys = [Key(options.consumer, row.id) for row in rows]
    claim = partial(ledger.claim_many, keys, _AT_ONCE, policy, token=job.token)
    patiently(claim, options.consumer)
