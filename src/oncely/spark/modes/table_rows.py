"""What one Spark task does in mode `rows`: the rows go into a table, with their ledger records.

A chunk is one transaction: its messages that have no record are completed, in one statement; what
else may be claimed is; their rows are written; and all of it is stored, or nothing. What the
database refuses is found by halves, and set aside. What another worker holds waits until the task's
own rows are through. No delivery is left out: each is counted exactly once.
"""

import heapq
import itertools
import json
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from oncely.claiming.inbox import Inbox
from oncely.core.commands import (
    Busy,
    ClaimOutcome,
    Duplicate,
    Exhausted,
    Granted,
    Handled,
    InDoubt,
    Mismatch,
)
from oncely.core.control import Reject
from oncely.core.errors import MessageError
from oncely.core.message import are_plain_ids, check_id
from oncely.core.record import Claim, Key
from oncely.crashpoints import reached
from oncely.handling.transacting import retried
from oncely.ledger import Ledger
from oncely.spark.modes.chunks import MAX_WAITING
from oncely.spark.modes.copying import as_csv, as_values, chosen, sorted_by_id
from oncely.spark.modes.table_columns import written_columns
from oncely.spark.modes.tally import Tally
from oncely.spark.sink.channel import TaskChannel
from oncely.spark.sink.options import SinkOptions
from oncely.spark.sink.quarantine import Quarantine, plain
from oncely.spark.sink.rows import BROKEN_COLUMN, ROW_COLUMN, Row, values_of
from oncely.target_table import TargetTable, refusal

if TYPE_CHECKING:
    from pyarrow import RecordBatch


class Rows(NamedTuple):
    """Rows of the DataFrame, and the ids of their messages."""

    ids: Sequence[str]
    batch: "RecordBatch"

    def at(self, places: Sequence[int]) -> "Rows":
        """Those at these places, which stand in order."""
        if len(places) == len(self.ids):
            return self
        return Rows([self.ids[n] for n in places], chosen(self.batch, places))

    def halves(self) -> "tuple[Rows, Rows]":
        """The first half and the second."""
        half = len(self.ids) // 2
        return (
            Rows(self.ids[:half], self.batch.slice(0, half)),
            Rows(self.ids[half:], self.batch.slice(half)),
        )


class _Settled(NamedTuple):
    """What became of rows, by their places, in a transaction that is committed."""

    stored: Sequence[int]
    others: Sequence[tuple[int, ClaimOutcome]]


class _Delay(NamedTuple):
    """When to ask for rows again, and since when that goes on (both monotonic)."""

    due: float
    order: int
    since: float
    rows: Rows


class TableRowsTask:
    """One run over the rows of one partition."""

    def __init__(
        self,
        ledger: Ledger,
        options: SinkOptions,
        quarantine: Quarantine,
        channel: TaskChannel,
        table: TargetTable,
    ) -> None:
        since = ledger.now() if options.since is None else options.since
        self._tally = Tally(options.policy, quarantine, since)
        self.counts = self._tally.counts
        self._ledger = ledger
        self._options = options
        self._policy = options.policy
        self._channel = channel
        self._table = table
        self._waiting: list[_Delay] = []
        """A heap."""
        self._order = itertools.count()

    def run(self, batches: Iterable["RecordBatch"]) -> None:
        """Settle every row. Raises Stopped; StoreError and whatever ends a process come through."""
        for batch in sorted_by_id(batches):
            for start in range(0, batch.num_rows, self._options.chunk):
                chunk = batch.slice(start, self._options.chunk)
                self.counts.received += chunk.num_rows
                self._settle(self._usable(chunk))
                self._take_due()
                self._wait_for_all_but(MAX_WAITING)
        self._wait_for_all_but(0)

    def _usable(self, chunk: "RecordBatch") -> Rows:
        """The rows that are messages; the others are set aside."""
        unreadable: dict[int, str] = {}
        rows = Rows(values_of("id", chunk.column("id"), unreadable), chunk)
        bad = {**_bad_rows(rows, self._options.upsert), **unreadable}
        if not bad:
            return rows
        for n, reason in bad.items():
            self._tally.set_aside(_as_row(rows.at([n])), reason)
        return rows.at([n for n in range(len(rows.ids)) if n not in bad])

    # ---- Transactions --------------------------------------------------------------------------

    def _settle(self, rows: Rows, since: float | None = None) -> None:
        """Bring rows to an end; those that have to wait do so `since` then, or now."""
        if not rows.ids:
            return
        self._channel.raise_if_stopping()
        try:
            settled = retried(self._ledger, lambda: self._store(rows))
        except Exception as error:
            reason = _refusal(error)
            if reason is None:
                raise
            if len(rows.ids) == 1:
                settled = retried(self._ledger, lambda: self._reject(rows, reason))
            else:
                for half in rows.halves():
                    self._settle(half, since)
                return
        self.counts.handled += len(settled.stored)
        self._count(rows, settled.others, time.monotonic() if since is None else since)
        self._channel.report(self.counts)

    def _store(self, rows: Rows) -> _Settled:
        """Write the rows whose messages can be claimed, with their records, in one transaction."""
        with (
            self._table.begin() as connection,
            self._ledger.transaction(connection) as inbox,
        ):
            settled = self._claim(inbox, rows)
            reached("before_completed")
            if settled.stored:
                self._write(connection, rows.at(settled.stored).batch)
            reached("before_commit")
        reached("after_commit")
        return settled

    def _claim(self, inbox: Inbox, rows: Rows) -> _Settled:
        consumer = self._options.consumer
        new = inbox.complete_new(consumer, set(rows.ids), self._policy)
        if len(new) == len(rows.ids):
            return _Settled(range(len(rows.ids)), ())
        stored: list[int] = []
        left: list[int] = []
        for n, id_ in enumerate(rows.ids):
            # Of the copies of a message the first is written, and the others are duplicates.
            (stored if id_ in new else left).append(n)
            new.discard(id_)
        keys = [Key(consumer, rows.ids[n]) for n in left]
        answers = list(zip(left, inbox.claim_known(keys, self._policy), strict=True))
        granted = [(n, said.claim) for n, said in answers if isinstance(said, Granted)]
        handled = [said.claim.key for _, said in answers if isinstance(said, Handled)]
        if granted:
            inbox.complete_many([claim for _, claim in granted])
            stored = sorted([*stored, *(n for n, _ in granted)])
        if handled:
            inbox.finish(handled)
        return _Settled(stored, [(n, a) for n, a in answers if not isinstance(a, Granted)])

    def _write(self, connection: Any, batch: "RecordBatch") -> None:
        columns = written_columns(self._table, batch.schema.names)
        written = batch.select(columns)
        if self._table.is_copied_to:
            self._table.copy(connection, columns, as_csv(written))
        else:
            self._table.insert(connection, as_values(written))

    def _reject(self, row: Rows, reason: str) -> _Settled:
        """Take down that a message is refused, where it can be claimed at all."""
        key = Key(self._options.consumer, row.ids[0])
        with (
            self._table.begin() as connection,
            self._ledger.transaction(connection) as inbox,
        ):
            outcome = inbox.claim(key, policy=self._policy)
            if isinstance(outcome, Handled):
                inbox.finish([key])
            if not isinstance(outcome, Granted):
                return _Settled((), [(0, outcome)])
            inbox.fail(outcome.claim, Reject(reason), final=True)
        self._tally.set_aside(_as_row(row), reason)
        return _Settled((), ())

    # ---- Counts --------------------------------------------------------------------------------

    def _count(self, rows: Rows, others: Sequence[tuple[int, ClaimOutcome]], since: float) -> None:
        """Count rows that were not stored, or put them off."""
        waited_s = time.monotonic() - since
        busy: list[int] = []
        poll_s = None
        for n, outcome in others:
            match outcome:
                case Busy(_, retry_at):
                    wait_s = self._tally.busy(waited_s, ends=retry_at is not None)
                    if wait_s is not None:
                        busy.append(n)
                        poll_s = wait_s
                case Duplicate(record) | Handled(Claim(record)):
                    self._tally.duplicate(record)
                case Exhausted(record):
                    self._tally.exhausted(_as_row(rows.at([n])), record)
                case InDoubt():
                    self.counts.in_doubt += 1
                case Mismatch() | Granted():
                    raise AssertionError("nothing is compared here, and what is granted is stored")
        if poll_s is not None:
            due = time.monotonic() + poll_s
            delay = _Delay(due, next(self._order), since, rows.at(busy))
            heapq.heappush(self._waiting, delay)

    # ---- Waiting -------------------------------------------------------------------------------

    def _take_due(self) -> None:
        """Ask again for what is due."""
        now = time.monotonic()
        while self._waiting and self._waiting[0].due <= now:
            delay = heapq.heappop(self._waiting)
            self._settle(delay.rows, delay.since)

    def _wait_for_all_but(self, number: int) -> None:
        while sum(len(delay.rows.ids) for delay in self._waiting) > number:
            self._channel.wait(self._waiting[0].due, self.counts)
            self._take_due()


def _bad_rows(rows: Rows, key: Sequence[str]) -> dict[int, str]:
    """By their places, why rows are no messages, or have no key to be written under."""
    bad = {}
    for n, id_ in enumerate(() if are_plain_ids(rows.ids) else rows.ids):
        try:
            check_id(id_)
        except MessageError as error:
            bad[n] = str(error)
    for name in key:
        column = rows.batch.column(name)
        if column.null_count:
            nulls = enumerate(column.is_null().to_pylist())
            bad.update((n, f"missing {name}") for n, is_null in nulls if is_null)
    if BROKEN_COLUMN in rows.batch.schema.names:
        told = enumerate(rows.batch.column(BROKEN_COLUMN).to_pylist())
        bad.update((n, reason) for n, reason in told if reason is not None)
    return bad


def _refusal(error: Exception) -> str | None:
    """Why rows cannot be written; None where that is not their fault."""
    if isinstance(error, ValueError | OverflowError):
        return f"unreadable: {error}"
    refused = refusal(error)
    return None if refused is None else f"refused by the database: {refused}"


def _as_row(row: Rows) -> Row:
    """A row for the quarantine, with all of its values as text."""
    values: dict[str, Any] = {}
    for name, column in zip(row.batch.schema.names, row.batch.columns, strict=True):
        [values[name]] = values_of(name, column, {})
    original = values.pop(ROW_COLUMN, None) or json.dumps(values, default=plain)
    return Row(row.ids[0], None, None, None, None, None, None, original, None)
