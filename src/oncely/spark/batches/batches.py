"""Batches: a handler gets all new messages of a batch at once, as a DataFrame; or they are written
into a table of Delta Lake or Apache Iceberg.

A batch is itself a message: it is claimed, run and ended like any other, by the consumer
`NAME/batches`. Tasks of the sink claim its members for it, without a lease. The success of its
handler is stored on the batch alone, and then rolled forward to its members. Its key is random and
kept in the ledger: a key from the source's offsets would name other messages after a checkpoint was
lost, and one from its members is not known before they are claimed, which is done in its name.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from oncely._util import clock
from oncely._util.crash_points import reached
from oncely._util.event_log import EventLog
from oncely._util.signals import is_process_stopping
from oncely.core.commands import Exhausted, Granted, InDoubt
from oncely.core.errors import OncelyError, RefusedError
from oncely.core.errors_by_kind import with_error
from oncely.core.message import Message
from oncely.core.policy import Policy
from oncely.core.record import Claim, Key, Record, State
from oncely.core.turn import Turn, recorded
from oncely.core.verdicts import Counted, Delay, End
from oncely.core.waiting import retries_of
from oncely.ledger.driver import run_inline
from oncely.ledger.probing import probe_answer
from oncely.lifecycle.handler_context import context_of
from oncely.lifecycle.lifecycle import Lifecycle
from oncely.lifecycle.wrapping import check_called
from oncely.locations import absolute
from oncely.spark.batches.member_jobs import BATCH, Batch, JobReport, read_report
from oncely.spark.batches.staging import IN_DOUBT, STAGED, StagingFolder, folders_in
from oncely.spark.ledgers import migrated_ledger
from oncely.spark.modes.lake_table import LakeTable
from oncely.spark.modes.steady import patiently
from oncely.spark.sink.counts import Counts
from oncely.spark.sink.message_rows import check_types
from oncely.spark.sink.sink_options import import_function, read_options

_log = EventLog(__name__)

BatchHandler = Callable[[DataFrame, str], Any]
"""Called with the new messages and the batch key, which is the same if the same messages are
handed over again."""

_STAGING = "staging"
"""The metadata of a batch's record that names its folder."""
_CLAIMED = "claimed"
"""The step in which the messages of a batch are claimed."""
_BEGUN = "begun under fence {}"
"""The step that is stored before the handler may have an effect."""
_AT_ONCE = "1ms"
_POLL_S = 0.2
_MOST_UNFINISHED = 10_000
_SCHEMA_OF_DUE = (
    "id string, type string, body binary, headers map<string,string>, source string,"
    " time timestamp, key string"
)
_MOST_DUE = 1_000
"""The most messages from the ledger in one batch."""
_alive: set[Key] = set()
"""Batches of other programs that have extended their leases."""


class Batches:
    """The batches of one consumer; `settings` are the options of the sink.

    `handler` replaces the function in the settings. Raises ConfigError.
    """

    def __init__(
        self,
        settings: Mapping[str, str],
        handler: BatchHandler | None = None,
        partitions: int | None = None,
    ) -> None:
        options = read_options(settings)
        self._policy = options.whole_policy()
        self._table = None
        if options.mode == "rows":
            self._table = table = LakeTable(options.table or "", options.upsert)
            # A batch has no tries to spend: what its table refuses, ends the run.
            self._policy = replace(self._policy, on_in_doubt=table.finding, tries=None)
        else:
            name = options.handler_batch or ""
            found = handler or import_function(name, "handler_batch", options.handler_path)
            self._handler = check_called(found, "handler_batch", ("messages", "batch_key"))
            probe: Any = self._policy.on_in_doubt
            if callable(probe):
                self._policy = replace(self._policy, on_in_doubt=lambda asked: probe(asked.id))
        self._folder = absolute(options.staging or f"{options.quarantine.rstrip('/')}-batches")
        self._ledger = patiently(lambda: migrated_ledger(options.address), options.consumer)
        self._consumer = options.consumer
        lifecycle = Lifecycle.under(self._ledger, f"{self._consumer}/batches", self._policy)
        self._lifecycle = lifecycle.followed
        self._since = self._ledger.now() if options.since is None else options.since
        self._settings = {**settings, "since": str(self._since)}
        self._partitions = partitions

    def process(self, messages: DataFrame) -> Counts:
        """Finish the batches of earlier programs, and then hand the new messages to the handler."""
        messages = self.fitted(messages)
        counts = self.take_up(messages.sparkSession)
        deliveries, due = self._with_due(messages)
        key = uuid4().hex
        staging = StagingFolder(f"{self._folder}/{key}")
        batch = Batch(
            messages.sparkSession, key, staging, self._settings, self._partitions, deliveries, due
        )
        return counts + self._run(batch, self._policy)

    def fitted(self, messages: DataFrame) -> DataFrame:
        """The messages as they are handled. Raises ConfigError for wrong columns."""
        if self._table is not None:
            return self._table.fitted(messages)
        check_types(messages.schema)
        return messages

    def _with_due(self, messages: DataFrame) -> tuple[DataFrame, Sequence[str]]:
        """`messages`, and the consumer's messages that wait in the ledger and are due, such as
        retried dead letters, in the message columns that `messages` has; and the ids of these.
        """
        mailbox, queue = self._ledger.mailbox, retries_of(self._consumer)
        # To look is a cheap read; to take is a write. What waits is a message, and not a row.
        if self._table is not None or mailbox.free_in_s(queue) != 0:
            return messages, ()
        rows = [
            (m.id, m.type, m.body, dict(m.headers), m.source, m.time, m.key)
            for m in (t.message for t in mailbox.take(_MOST_DUE, self._policy.lease, queue=queue))
        ]
        due = messages.sparkSession.createDataFrame(rows, _SCHEMA_OF_DUE)
        own = {field.name: field.dataType for field in messages.schema.fields}
        columns = [f.col(name).cast(own[name]).alias(name) for name in due.columns if name in own]
        together = messages.unionByName(due.select(columns), allowMissingColumns=True)
        return together, [id_ for id_, *_ in rows]

    # ---- Batches of earlier programs -----------------------------------------------------------

    def take_up(self, spark: SparkSession) -> Counts:
        """Finish the batches that were begun and are due; return their counts.

        Waits for the lease of a batch whose program may be gone, but not for a batch whose lease
        was extended.
        """
        total = Counts()
        for found in patiently(self._unfinished, self._consumer):
            record = self._waited_for(found)
            folder = (found.metadata or {}).get(_STAGING)
            if record is not None and folder is not None and not is_process_stopping():
                key, staging = record.key.message_id, StagingFolder(folder)
                batch = Batch(spark, key, staging, self._settings, self._partitions)
                total += self._see_through(batch, record)
        for key, staging in patiently(self._forgotten, self._consumer):
            if not is_process_stopping():
                batch = Batch(spark, key, staging, self._settings, self._partitions)
                total += self._run(batch, self._policy)
        return total

    def _unfinished(self) -> list[Record]:
        """The batches that are not settled: also completed ones that still have a folder, which an
        operator has settled, or whose program has ended since.
        """
        consumer = self._lifecycle.consumer
        keys = [Key(consumer, name) for name in folders_in(self._folder)]
        there = self._ledger.find_many(keys).values()
        return [record for record in there if record.state is State.COMPLETED] + [
            record
            for state in (State.PROCESSING, State.HANDLED, State.FAILED)
            for record in self._ledger.scan(consumer, state, limit=_MOST_UNFINISHED)
        ]

    def _forgotten(self) -> list[tuple[str, StagingFolder]]:
        """The batches whose records are gone, and for which messages are still held: a batch that
        waits may be purged.
        """
        names = folders_in(self._folder)
        known = self._ledger.find_many([Key(self._lifecycle.consumer, name) for name in names])
        there = {name: StagingFolder(f"{self._folder}/{name}") for name in names}
        for key in known:
            del there[key.message_id]
        return [each for each in there.items() if self._are_held(*each)]

    def _are_held(self, key: str, staging: StagingFolder) -> bool:
        """Whether the messages are held for this batch, by this ledger, and are not in doubt."""
        with suppress(FileNotFoundError):  # Another ledger's batch may be ending.
            claimed = staging.claimed()
            if claimed is not None and not staging.has(IN_DOUBT):
                [first, *_] = staging.read(claimed["files"][:1], ["id"])["id"].to_pylist()
                record = self._ledger.find(Key(self._consumer, first))
                if record is not None and record.state is State.PROCESSING:
                    return (record.metadata or {}).get(BATCH) == key
        return False

    def _waited_for(self, record: Record) -> Record | None:
        """Wait until the lease is over, or is extended; return the record then."""
        found: Record | None = record
        while found is not None and record.key not in _alive and self._is_held(found):
            if is_process_stopping():
                return None
            clock.sleep(_POLL_S)
            found = self._ledger.find(record.key)
            if found is not None and found.lease_until != record.lease_until:
                _alive.add(record.key)
        return found

    def _is_held(self, record: Record) -> bool:
        # The sink refuses a policy without leases.
        return record.state is State.PROCESSING and self._ledger.now() < (record.lease_until or 0.0)

    def _see_through(self, batch: Batch, record: Record) -> Counts:
        if self._is_held(record):
            return Counts()
        is_ended = record.state is State.COMPLETED or record.exhausted
        if is_ended and not batch.staging.is_there:
            # Its messages are, too: the folder is removed last.
            return Counts()
        claimed = self._claimed(batch)
        if record.exhausted:
            return self._fail(batch, claimed, record.error or "")
        if not is_ended:
            self._check_seen(batch, claimed)
        if record.state in (State.HANDLED, State.COMPLETED):
            return self._complete(batch, claimed)
        if record.state is State.PROCESSING:
            return self._after_doubt(batch, record, claimed)
        if not batch.staging.is_there:
            # It was settled, and reset since.
            return Counts()
        due = record.last_seen + self._policy.delay_s(record.attempts) if record.attempts else 0.0
        if self._ledger.now() < due:
            return Counts()
        return self._run(batch, self._policy, has_waited=record.first_seen >= self._since)

    def _after_doubt(self, batch: Batch, record: Record, claimed: JobReport) -> Counts:
        """End a batch in doubt by its policy and probe. If no handler began, it is not in doubt."""
        if _BEGUN.format(record.fence) not in self._ledger.steps(record.key):
            if batch.staging.has(STAGED):
                return self._run(batch, replace(self._policy, on_in_doubt="retry", tries=None))
            # None of its messages is claimed. If another program has taken it up, that goes on.
            with suppress(RefusedError):
                self._ledger.forget(record.key, found=record)
                batch.staging.remove()
            return Counts()
        probe = self._policy.on_in_doubt
        if not callable(probe):
            return self._run(batch, self._policy)
        told = Message(batch.key, time=datetime.fromtimestamp(record.first_seen, UTC))
        finding = probe_answer(probe, told).finding
        if finding == "happened":
            self._run(batch, replace(self._policy, on_in_doubt=lambda _: finding))
            newest = self._ledger.find(record.key)
            is_completed = newest is not None and newest.state is State.COMPLETED
            return self._complete(batch, claimed) if is_completed else Counts()
        may_run = finding == "not_happened"
        return self._run(batch, replace(self._policy, on_in_doubt="retry" if may_run else "hold"))

    # ---- One batch -----------------------------------------------------------------------------

    def _run(self, batch: Batch, policy: Policy, *, has_waited: bool = False) -> Counts:
        """Run a batch. `has_waited`: its messages were counted as waiting in this run."""
        turn = Turn(batch.key, None, Message(batch.key), {_STAGING: batch.staging.folder})
        lifecycle = replace(self._lifecycle, policy=policy)
        patiently(
            lambda: run_inline(lifecycle.claim(lifecycle.sync_driver, [turn])), self._consumer
        )
        match turn.outcome:
            case Granted(claim):
                reached("batch_claimed")
                # How it ends is as the user says, whatever has let it begin.
                own = replace(self._lifecycle, policy=replace(self._policy, tries=policy.tries))
                claimed, is_known = self._run_held(batch, turn, claim, own)
                counts = claimed.counts
                if is_known:
                    # The counts of the claims are not added again.
                    number = claimed.messages
                    counts = Counts(waiting=-number) if has_waited else Counts(received=number)
                return self._ended(batch, turn, claimed, counts)
            case InDoubt():
                claimed = self._claimed(batch)
                if batch.staging.has(IN_DOUBT):
                    return Counts()
                batch.end(claimed, "doubt")
                return Counts(received=claimed.messages, in_doubt=claimed.messages)
            case Exhausted(record):
                return self._fail(batch, self._claimed(batch), record.error or "")
            case _:
                # Another program finishes it.
                return Counts()

    def _run_held(
        self, batch: Batch, turn: Turn, claim: Claim, lifecycle: Lifecycle
    ) -> tuple[JobReport, bool]:
        """Claim its messages, call the handler, and store the end; whether an earlier run has
        claimed them.
        """
        try:
            is_known = _CLAIMED in self._ledger.steps(claim.key)
            context = context_of(turn, lifecycle.sync_driver, lifecycle)
            batch.stage()
            claimed = read_report(context.step(_CLAIMED, batch.claim))
            reached("members_claimed")
            if claimed.messages:
                context.step(_BEGUN.format(claim.fence), lambda: None)
                self._call(batch, claimed, turn)
        except BaseException:
            # Another program takes the batch up at once, without waiting for its lease.
            [newest] = lifecycle.let_go([turn])
            with suppress(OncelyError):
                self._ledger.extend(newest, _AT_ONCE)
            raise
        turn.called()
        run_inline(lifecycle.store(lifecycle.sync_driver, [turn]))
        return claimed, is_known

    def _call(self, batch: Batch, claimed: JobReport, turn: Turn) -> None:
        """Call the handler. Raises only errors that end the run."""
        reached("before_batch_handler")
        try:
            if self._table is not None:
                self._table.write(batch.staging.read(claimed.files), batch.key)
            else:
                self._handler(batch.new(claimed), batch.key)
        except BaseException as error:
            if self._table or is_process_stopping() or isinstance(error, KeyboardInterrupt):
                # Not a failure of the handler: what it has written is in doubt.
                raise
            names = {"consumer": self._lifecycle.consumer, "message_id": batch.key}
            _log.warning(
                "the batch handler of '%(consumer)s' failed for batch '%(message_id)s': %(reason)s",
                exc_info=error,
                extra={"event": "batch_handler_failed", **names},
            )
            turn.raised(error)
        reached("after_batch_handler")

    def _ended(self, batch: Batch, turn: Turn, claimed: JobReport, counts: Counts) -> Counts:
        """The counts of a batch whose handler has ended, added to `counts`."""
        if turn.refusal is not None:
            raise turn.refusal
        ending, number = self._lifecycle.end(turn), claimed.messages
        if ending.end is End.COMPLETED:
            reached("batch_handled")
            self._complete(batch, claimed)
            return counts + Counts(handled=number)
        errors = dict.fromkeys(with_error({}, turn.error), number)
        counts += Counts(failed_attempts=number, errors=errors)
        if ending.counted is Counted.RETRIED:
            return counts + Counts(waiting=number)
        if ending.end is End.IN_DOUBT:
            if not isinstance(ending.verdict, Delay):  # Else a probe is asked about it.
                batch.end(claimed, "doubt")
            return counts + Counts(in_doubt=number)
        self._fail(batch, claimed, recorded(turn.error))
        return counts + Counts(failed=number, newly_failed=number)

    # ---- The end of its messages ---------------------------------------------------------------

    def _claimed(self, batch: Batch) -> JobReport:
        told = self._ledger.steps(Key(self._lifecycle.consumer, batch.key)).get(_CLAIMED)
        return JobReport() if told is None else read_report(told)

    def _check_seen(self, batch: Batch, claimed: JobReport) -> None:
        """Raise ConfigError if the files of a batch that has not ended are not to be seen."""
        if not claimed.files or batch.are_there(claimed):
            return
        # Read after the look at the files, which another program may have removed: it has ended
        # the batch before.
        record = self._ledger.find(Key(self._lifecycle.consumer, batch.key))
        if record is None or record.state is State.COMPLETED or record.exhausted:
            return
        # One without attempts was reset, perhaps after it had ended.
        if record.attempts:
            raise batch.not_there()

    def _complete(self, batch: Batch, claimed: JobReport) -> Counts:
        batch.end(claimed, "complete")
        self._ledger.mailbox.finish([Key(self._lifecycle.consumer, batch.key)])
        batch.staging.remove()
        return Counts(received=claimed.messages, handled=claimed.messages)

    def _fail(self, batch: Batch, claimed: JobReport, error: str) -> Counts:
        batch.end(claimed, "fail", f"batch {batch.key}: {error}")
        batch.staging.remove()
        number = claimed.messages
        return Counts(received=number, failed=number, newly_failed=number)
