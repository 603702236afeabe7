"""One Spark task on the deliveries of a batch: it claims each message for the batch, and writes the
granted ones, which are new, to a file.

Claims have no lease, as only their batch has a heartbeat; and they have the batch's token: a task
that runs again is granted the same messages again.
"""

import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import pyarrow as pa
from pyarrow import RecordBatch

from oncely._util import clock
from oncely._util.crash_points import reached
from oncely.core.commands import Busy, Granted, Outcome, TooOld
from oncely.core.record import Key
from oncely.ledger.ledger import Ledger
from oncely.spark.batches.staging import Staging
from oncely.spark.modes.steady import patiently
from oncely.spark.modes.tally import MISMATCH, RunTally
from oncely.spark.sink.horizon import Horizon
from oncely.spark.sink.message_rows import Row, numbered, read_chunks
from oncely.spark.sink.quarantine import Quarantine
from oncely.spark.sink.sink_options import SinkOptions

BATCH = "batch"
"""The key in a record's metadata for the batch that claimed it."""
_POLL_S = 0.5


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
