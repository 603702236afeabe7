"""Jobs on the messages of a batch: the program starts a job, and tasks of the sink do it.

One job claims each message for the batch, and writes the granted ones, which are new, to a file.
Claims have no lease, as only their batch has a heartbeat; and they have the batch's token: a task
that runs again is granted the same messages again. The others end messages. They claim them under
that token, which grants the claims again, or shows that another attempt has ended them already.
"""

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple
from uuid import uuid4

import pyarrow as pa
from pyarrow import RecordBatch
from pyspark import TaskContext
from pyspark.sql import DataFrame
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from oncely._util import clock
from oncely._util.crash_points import reached
from oncely._util.garbage import rarely_collecting
from oncely.core.commands import Busy, Granted, Outcome, TooOld
from oncely.core.control import Unrecoverable
from oncely.core.errors import OncelyError
from oncely.core.record import Key, birth_of
from oncely.core.turn import Turn
from oncely.ledger.driver import run_inline
from oncely.ledger.ledger import Ledger
from oncely.lifecycle.lifecycle import Lifecycle
from oncely.lifecycle.retry_queue import RetryQueue
from oncely.spark.batches.staging import Staging
from oncely.spark.ledgers import migrated_ledger
from oncely.spark.modes.steady import patiently
from oncely.spark.modes.tally import MISMATCH, RunTally
from oncely.spark.sink.counts import Counts
from oncely.spark.sink.horizon import Horizon
from oncely.spark.sink.message_rows import Row, numbered, read_chunks
from oncely.spark.sink.quarantine import Quarantine, forget_attempts
from oncely.spark.sink.sink_options import BATCH_JOB, SinkOptions, read_options

Does = Literal["claim", "complete", "fail", "doubt"]
BATCH = "batch"
"""The key in a record's metadata for the batch that claimed it."""
_AT_ONCE = "1ms"
_POLL_S = 0.5


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

    @property
    def staging(self) -> Staging:
        """Where the batch is staged."""
        return Staging(self.folder)

    @property
    def token(self) -> int:
        """The token of the claims on the batch's messages, the same for each attempt."""
        return birth_of(int(self.batch_key, 16))


@dataclass
class JobReport(WriterCommitMessage):
    """The result of a task, or of all: counted deliveries, and messages claimed or ended."""

    counts: Counts
    messages: int
    files: list[str]
    """The files with new messages."""

    def __add__(self, other: "JobReport") -> "JobReport":
        return JobReport(
            self.counts + other.counts, self.messages + other.messages, self.files + other.files
        )

    def as_json(self) -> dict[str, Any]:
        """The report as `read_report` reads it."""
        return {"counts": vars(self.counts), "messages": self.messages, "files": self.files}


def run_job(
    rows: DataFrame,
    options: Mapping[str, str],
    does: Does,
    batch_key: str,
    staging: Staging,
    error: str = "",
) -> JobReport:
    """Let tasks do the job on the rows; return the report."""
    job = Job(does, batch_key, staging.folder, f"{uuid4().hex}.json", error)
    told = {**options, BATCH_JOB: json.dumps(job)}
    rows.write.format("oncely").options(**told).mode("append").save()
    return read_report(staging.told(job.name))


def read_report(told: Mapping[str, Any]) -> JobReport:
    """The report from its `as_json`."""
    return JobReport(Counts(**told["counts"]), told["messages"], told["files"])


class Delivery(NamedTuple):
    """A row, and Spark's batch in which it has its number."""

    row: Row
    source: RecordBatch


class ClaimTask:
    """One run over the deliveries of one partition; the copies of an id are next to each other."""

    def __init__(
        self,
        ledger: Ledger,
        options: SinkOptions,
        batch_key: str,
        token: int,
        quarantine: Quarantine,
        staging: Staging,
    ) -> None:
        self._ledger = ledger
        self._options = options
        self._batch_key = batch_key
        self._token = token
        self._staging = staging
        self.files: list[str] = []
        """The file of the new messages, with all their columns, if there are any."""
        self._writer: Any = None
        self._horizon = Horizon(options.policy, options)
        self._since = ledger.now() if options.since is None else options.since
        self._tally = RunTally(options.policy, quarantine, self._since)
        self.counts = self._tally.counts
        self.granted = 0
        self._granted: dict[str, str | None] = {}
        """The fingerprints of granted messages by id, as long as copies may follow."""
        self._busy: list[Delivery] = []
        """Deliveries that another worker holds, to be claimed again."""

    def run(self, batches: Iterable[RecordBatch]) -> None:
        """Write the granted deliveries, and count all others."""
        for batch in batches:
            for rows in read_chunks(numbered([batch]), lambda: self._options.chunk):
                self.counts.received += len(rows)
                self._take([Delivery(row, batch) for row in rows if self._tally.is_message(row)])
                last = rows[-1].id
                self._granted = {last: self._granted[last]} if last in self._granted else {}
        # Claim again what another worker holds, until it is released or its lease is over.
        began = time.monotonic()
        while self._busy:
            clock.sleep(_POLL_S)
            busy, self._busy = self._busy, []
            self._take(busy, time.monotonic() - began)
        if self._writer is not None:
            self._writer.close()

    def _take(self, deliveries: Sequence[Delivery], waited_s: float = 0.0) -> None:
        """Claim each message once, for its first delivery; the others are its copies."""
        while deliveries:
            firsts: dict[str, Delivery] = {}
            copies = []
            for delivery in deliveries:
                if delivery.row.id in self._granted:
                    first, own = self._granted[delivery.row.id], delivery.row.fingerprint()
                    is_other = None not in (first, own) and first != own
                    if is_other and self._options.policy.on_mismatch != "ignore":
                        self._tally.set_aside(delivery.row, MISMATCH)
                    else:
                        self.counts.duplicates_input += 1
                elif firsts.setdefault(delivery.row.id, delivery) is not delivery:
                    copies.append(delivery)
            # In the order of ids: two tasks that claim the same ids cannot deadlock.
            self._ask([firsts[id_] for id_ in sorted(firsts)], waited_s)
            deliveries = copies

    def _ask(self, deliveries: Sequence[Delivery], waited_s: float) -> None:
        if not deliveries:
            return
        rows = [delivery.row for delivery in deliveries]
        ask = partial(
            self._ledger.claim_many,
            [Key(self._options.consumer, row.id) for row in rows],
            "none",
            self._horizon.policy,
            fingerprints=[row.fingerprint() for row in rows],
            metadata={BATCH: self._batch_key},
            token=self._token,
            sent_at=[self._horizon.sent_at(row) for row in rows],
        )
        outcomes = patiently(ask, self._options.consumer)
        reached("some_members_claimed")
        answered = list(zip(deliveries, outcomes, strict=True))
        granted = [each for each, outcome in answered if isinstance(outcome, Granted)]
        self._granted |= {each.row.id: each.row.fingerprint() for each in granted}
        self.granted += len(granted)
        # Deliveries that have waited may be of several.
        for source in {id(each.source): each.source for each in granted}.values():
            if self._writer is None:
                name, self._writer = self._staging.new_file(source.schema)
                self.files.append(name)
            numbers = [each.row.number for each in granted if each.source is source]
            rows = pa.Table.from_batches([source]).take(pa.array(numbers, pa.int64()))
            self._writer.write_table(rows)
        too_old = [(each, outcome) for each, outcome in answered if isinstance(outcome, TooOld)]
        for delivery, outcome in answered:
            if not isinstance(outcome, Granted | TooOld):
                self._count_refused(delivery, outcome, waited_s)
        if too_old:
            verdicts = self._horizon.judge([(each.row, outcome) for each, outcome in too_old])
            judged = zip(too_old, verdicts, strict=True)
            again = [each for (each, _), why in judged if self._tally.may_run(each.row, why)]
            self._ask(again, 0.0)

    def _count_refused(self, delivery: Delivery, outcome: Outcome, waited_s: float) -> None:
        # The other batch finishes its messages, and may itself wait for messages of this one.
        if isinstance(outcome, Busy) and BATCH in (outcome.record.metadata or {}):
            if outcome.record.first_seen >= self._since:
                # Its first delivery in this run shows whether it still waits.
                self.counts.duplicates_input += 1
            else:
                self.counts.waiting += 1
        elif self._tally.refused(outcome, lambda: delivery.row, waited_s) is not None:
            self._busy.append(delivery)


class JobWriter(DataSourceArrowWriter):
    """Writes to the sink if its options name a job. It is used on the driver, and as a copy in each
    task.
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
            ended = 0
            for rows in read_chunks(numbered(iterator), lambda: options.chunk):
                # In the order of ids: two tasks that claim the same ids cannot deadlock.
                rows.sort(key=lambda row: row.id)
                if job.does == "doubt":
                    _doubt(ledger, options, job.token, rows)
                else:
                    _end(ledger, options, job.token, rows, job.error)
                ended += len(rows)
        return JobReport(Counts(), ended, [])

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Write the report of all tasks to the staging folder."""
        reports = [message for message in messages if isinstance(message, JobReport)]
        if len(reports) != len(messages):
            raise OncelyError(f"only {len(reports)} of {len(messages)} tasks have reported")
        total = sum(reports, JobReport(Counts(), 0, []))
        forget_attempts(self._options.quarantine, self._job.batch_key)
        self._job.staging.tell(self._job.name, total.as_json())

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Undo nothing: the job is repeated."""

    def _claim(self, ledger: Ledger, batches: Iterator[RecordBatch]) -> JobReport:
        options, job = self._options, self._job
        context = TaskContext.get()
        partition = 0 if context is None else context.partitionId()
        quarantine = Quarantine(options.quarantine, job.batch_key, partition)
        try:
            task = ClaimTask(ledger, options, job.batch_key, job.token, quarantine, job.staging)
            task.run(batches)
            quarantine.close()
        except BaseException:
            quarantine.discard()
            raise
        if task.counts.settled + task.granted != task.counts.received:
            raise OncelyError(f"of {task.counts.received} deliveries some are not accounted for")
        return JobReport(task.counts, task.granted, task.files)


def _end(ledger: Ledger, options: SinkOptions, token: int, rows: Sequence[Row], error: str) -> None:
    """Complete these messages, or fail them with `error`, if there is one."""
    # The members were checked when they were claimed.
    policy = replace(options.policy, on_mismatch="ignore", on_too_old="run")
    lifecycle = Lifecycle.under(ledger, options.consumer, policy, "none")
    lifecycle = replace(lifecycle, retry_queue=RetryQueue(options.consumer))
    driver, turns = lifecycle.sync_driver, []
    for row in rows:
        turn = Turn(row.id, message=row.message(None))
        turn.token = token
        turns.append(turn)
    patiently(lambda: run_inline(lifecycle.claim(driver, turns)), options.consumer)
    granted = [turn for turn in turns if turn.claim is not None]
    for turn in granted:
        turn.called()
        turn.raised(BatchFailed(error) if error else None)
    run_inline(lifecycle.store(driver, granted))
    for turn in granted:
        if turn.refusal is not None:
            raise turn.refusal


def _doubt(ledger: Ledger, options: SinkOptions, token: int, rows: Sequence[Row]) -> None:
    """Hold these messages in doubt, by ending the leases of their claims."""
    policy = replace(options.policy, on_mismatch="ignore")
    keys = [Key(options.consumer, row.id) for row in rows]
    claim = partial(ledger.claim_many, keys, _AT_ONCE, policy, token=token)
    patiently(claim, options.consumer)
