"""One Spark task in mode `rows`: writes rows to a table, with their ledger records.

A chunk is one transaction: messages without a record are completed in one statement; others are
claimed if they may be; their rows are written. All of it is stored, or nothing. A row that the
database refuses is found by halving the chunk, and is set aside. A message that another worker
holds waits until the task's own rows are done. Each delivery is counted exactly once.
"""

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import pyarrow as pa
from pyarrow import RecordBatch

from oncely._util.crash_points import reached
from oncely._util.later import Later
from oncely.core.commands import ClaimOutcome, Granted, Handled
from oncely.core.control import Reject
from oncely.core.errors import MessageError, StoreUnavailable
from oncely.core.ids import are_plain_ids, check_id
from oncely.core.record import Key
from oncely.ledger.inbox import Inbox
from oncely.ledger.ledger import Ledger
from oncely.lifecycle.heartbeat import PAUSE_S, store_outage
from oncely.spark.modes.chunks import MAX_WAITING
from oncely.spark.modes.tally import Aside, RunTally
from oncely.spark.modes.target_table import TargetTable, refusal, sorted_by_id
from oncely.spark.sink.channel import TaskChannel
from oncely.spark.sink.message_rows import BROKEN_COLUMN, ROW_COLUMN, Row, values_of
from oncely.spark.sink.quarantine import plain
from oncely.spark.sink.sink_options import SinkOptions

_FOR_OTHERS = 2
"""A database that answers after so many lost connections closes them because of the rows."""


class TableChunk(NamedTuple):
    """Rows of the DataFrame, and the ids of their messages."""

    ids: Sequence[str]
    batch: "RecordBatch"

    def at(self, indexes: Sequence[int]) -> "TableChunk":
        """The rows at these places, which are in order."""
        if len(indexes) == len(self.ids):
            return self
        chosen = self.batch.take(pa.array(indexes, pa.int64()))
        return TableChunk([self.ids[n] for n in indexes], chosen)

    def row(self, index: int) -> Row:
        """The row at a place, for the quarantine, with all its values as text."""
        row = self.batch.slice(index, 1)
        values: dict[str, Any] = {}
        for name, column in zip(row.schema.names, row.columns, strict=True):
            [values[name]] = values_of(name, column, {})
        original = values.pop(ROW_COLUMN, None) or json.dumps(values, default=plain)
        return Row(self.ids[index], original=original)


class _Settled(NamedTuple):
    """The results of rows, by their places, in a committed transaction."""

    stored: Sequence[int]
    others: Sequence[tuple[int, ClaimOutcome]]
    first_seen: Sequence[float] = ()
    """When each duplicate was first seen; a duplicate needs nothing else."""


class TableRowsTask:
    """One run over the rows of one partition."""

    def __init__(
        self,
        ledger: Ledger,
        options: SinkOptions,
        aside: Aside,
        channel: TaskChannel,
        table: TargetTable,
    ) -> None:
        since = ledger.now() if options.since is None else options.since
        self._tally = RunTally(options.policy, aside, since)
        self.counts = self._tally.counts
        self._ledger = ledger
        self._options = options
        self._policy = options.policy
        self._channel = channel
        self._outage = store_outage(consumer=options.consumer)
        self._table = table
        self._wanted = [*options.upsert, *filter(None, [options.sequence_by])]
        """The columns without which a row cannot be written."""
        self._meets_duplicates = False
        """Whether most of the last rows were duplicates: then records are looked up first."""
        self._waiting: Later[tuple[TableChunk, float]] = Later()
        """Rows that others hold, and since when they wait (monotonic)."""

    def run(self, batches: Iterable[tuple[Sequence[int], RecordBatch]]) -> None:
        """Settle every row. Raises Stopped, and StoreError."""
        for batch in sorted_by_id(batch for _, batch in batches):
            for start in range(0, batch.num_rows, self._options.chunk):
                chunk = batch.slice(start, self._options.chunk)
                self.counts.received += chunk.num_rows
                self._settle(self._usable(chunk))
                self._wait_for_all_but(MAX_WAITING)
        self._wait_for_all_but(0)

    def _usable(self, chunk: RecordBatch) -> TableChunk:
        """The rows that are messages; sets the others aside."""
        unreadable: dict[int, str] = {}
        rows = TableChunk(values_of("id", chunk.column("id"), unreadable), chunk)
        bad = {**_bad_rows(rows, self._wanted), **unreadable}
        if not bad:
            return rows
        for n, reason in bad.items():
            self._tally.set_aside(rows.row(n), reason)
        return rows.at([n for n in range(len(rows.ids)) if n not in bad])

    # ---- Transactions --------------------------------------------------------------------------

    def _settle(self, rows: TableChunk, since: float | None = None) -> None:
        """Settle rows, and count them; rows that must wait do so `since` that time, or now."""
        if not rows.ids:
            return
        self._channel.raise_if_stopping()
        reason = None
        try:
            settled = self._transact(partial(self._store, rows))
        except Exception as error:
            reason = _refusal(error)
            if reason is None:
                raise
        # Not inside of the except block: that error would become the context of all others.
        count = len(rows.ids)
        if reason is not None and count > 1:
            self._settle(rows.at(range(count // 2)), since)
            self._settle(rows.at(range(count // 2, count)), since)
            return
        if reason is not None:
            settled = self._transact(partial(self._reject, rows, reason))
            if not settled.others:
                self._tally.set_aside(rows.row(0), reason)
        reached("after_commit")
        self._meets_duplicates = len(settled.first_seen) > count // 2
        self.counts.handled += len(settled.stored)
        self._tally.duplicates(settled.first_seen)
        now = time.monotonic()
        since, due, busy = now if since is None else since, now, []
        for n, outcome in settled.others:
            wait_s = self._tally.refused(outcome, partial(rows.row, n), now - since)
            if wait_s is not None:
                busy.append(n)
                due = now + wait_s
        if busy:
            self._waiting.add(due, (rows.at(busy), since))
        self._channel.report(self.counts)

    def _transact(self, work: Callable[[Any, Inbox], _Settled]) -> _Settled:
        """Run `work` in a transaction; again while the database is unavailable, and where the
        transaction only lost against another one. Raises Stopped.
        """
        ledger, answered = self._ledger, 0
        while True:
            try:
                with self._table.begin() as connection, ledger.transaction(connection) as inbox:
                    settled = work(connection, inbox)
            except Exception as error:
                is_outage = ledger.is_outage(error)
                if _refusal(error) is not None or not (is_outage or ledger.is_contention(error)):
                    raise
                if is_outage:
                    answered += 1
                    try:
                        ledger.now()
                    except StoreUnavailable:
                        answered = 0
                    if answered == _FOR_OTHERS:
                        raise
                    self._outage.met(error)
            else:
                self._outage.over()
                return settled
            self._channel.wait(time.monotonic() + PAUSE_S)

    def _store(self, rows: TableChunk, connection: Any, inbox: Inbox) -> _Settled:
        """Write the rows whose messages can be claimed, with their records, in one transaction."""
        settled = self._claim(inbox, rows)
        reached("before_completed")
        if settled.stored:
            self._table.write(connection, rows.at(settled.stored).batch)
        reached("before_commit")
        return settled

    def _claim(self, inbox: Inbox, rows: TableChunk) -> _Settled:
        consumer = self._options.consumer
        known: Mapping[str, float] = {}
        if self._meets_duplicates:
            known = inbox.lately_completed(consumer, rows.ids, self._policy)
        new = inbox.complete_new(consumer, set(rows.ids) - known.keys(), self._policy)
        if len(new) == len(rows.ids):
            return _Settled(range(len(rows.ids)), ())
        stored: list[int] = []
        left: list[int] = []
        for n, id_ in enumerate(rows.ids):
            # The first copy of a message is written, the others are duplicates.
            (stored if id_ in new else left).append(n)
            new.discard(id_)
        if not self._meets_duplicates:
            known = inbox.lately_completed(consumer, {rows.ids[n] for n in left}, self._policy)
        first_seen = [known[rows.ids[n]] for n in left if rows.ids[n] in known]
        left = [n for n in left if rows.ids[n] not in known]
        keys = [Key(consumer, rows.ids[n]) for n in left]
        answers = list(zip(left, inbox.claim_many(keys, policy=self._policy), strict=True))
        granted = [(n, said.claim) for n, said in answers if isinstance(said, Granted)]
        handled = [said.claim.key for _, said in answers if isinstance(said, Handled)]
        if granted:
            inbox.complete_many([claim for _, claim in granted])
            stored = sorted([*stored, *(n for n, _ in granted)])
        if handled:
            inbox.mailbox.finish(handled)
        others = [(n, a) for n, a in answers if not isinstance(a, Granted)]
        return _Settled(stored, others, first_seen)

    def _reject(self, row: TableChunk, reason: str, _: Any, inbox: Inbox) -> _Settled:
        """Record that a message is refused, if it can be claimed."""
        key = Key(self._options.consumer, row.ids[0])
        outcome = inbox.claim(key, policy=self._policy)
        if isinstance(outcome, Handled):
            inbox.mailbox.finish([key])
        if not isinstance(outcome, Granted):
            return _Settled((), [(0, outcome)])
        inbox.fail(outcome.claim, Reject(reason), final=True)
        return _Settled((), ())

    # ---- Waiting -------------------------------------------------------------------------------

    def _wait_for_all_but(self, number: int) -> None:
        """Ask again for what is due, until no more rows than that wait."""
        while True:
            for rows, since in self._waiting.take():
                self._settle(rows, since)
            if sum(len(rows.ids) for rows, _ in self._waiting) <= number:
                return
            self._channel.wait(self._waiting.next_due)


def _bad_rows(rows: TableChunk, wanted: Sequence[str]) -> dict[int, str]:
    """Why rows are not messages, or lack a required value, by their places."""
    bad = {}
    for n, id_ in enumerate(() if are_plain_ids(rows.ids) else rows.ids):
        try:
            check_id(id_)
        except MessageError as error:
            bad[n] = str(error)
    for name in wanted:
        column = rows.batch.column(name)
        if column.null_count:
            nulls = enumerate(column.is_null().to_pylist())
            bad.update((n, f"missing {name}") for n, is_null in nulls if is_null)
    if BROKEN_COLUMN in rows.batch.schema.names:
        told = enumerate(rows.batch.column(BROKEN_COLUMN).to_pylist())
        bad.update((n, reason) for n, reason in told if reason is not None)
    return bad


def _refusal(error: Exception) -> str | None:
    """Why rows cannot be written; None if the rows are not the cause."""
    if isinstance(error, ValueError | OverflowError):
        return f"unreadable: {error}"
    refused = refusal(error)
    return None if refused is None else f"refused by the database: {refused}"
