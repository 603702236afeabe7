"""What tasks of all modes with a handler have in common: chunks, waiting, and what is counted.

What another worker holds, and what is to be tried again, waits until the task's own rows are
through. No delivery is left out: each is counted exactly once.
"""

import heapq
import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, NamedTuple

from oncely.archive.lookup import Archive
from oncely.claiming.calls import Calls
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
from oncely.core.errors import MessageError, reason_of
from oncely.core.message import check_id
from oncely.core.policy import Finding
from oncely.core.record import Claim, Key, Record
from oncely.handling.around import asked_probe
from oncely.ledger import Ledger
from oncely.locations import open_named_transport
from oncely.outbox import Relay
from oncely.runtime.deferred import Deferred
from oncely.spark.modes.ends import End, Kind
from oncely.spark.modes.tally import FIRST_POLL_S, MISMATCH, Tally
from oncely.spark.sink.channel import TaskChannel
from oncely.spark.sink.horizon import forgotten
from oncely.spark.sink.options import SinkOptions
from oncely.spark.sink.quarantine import Quarantine
from oncely.spark.sink.rows import Row, read_chunks

if TYPE_CHECKING:
    from pyarrow import RecordBatch

_FIRST_CHUNK = 100
_QUICK_S = 0.5
_SLOW_S = 2.0
MAX_WAITING = 10_000


Answers = Sequence[tuple[Row, ClaimOutcome]]
"""What the ledger says of rows that were asked for."""

_Refusal = Busy | InDoubt | Duplicate | Exhausted | Mismatch
"""The outcomes that give no claim."""


class Doubt(NamedTuple):
    """What a probe found out about a message in doubt."""

    finding: Finding
    record: Record


class _Delay(NamedTuple):
    """When to ask for an id again, and since when that goes on (both monotonic)."""

    due: float
    since: float


class ChunkTask(ABC):
    """One run over the rows of one partition."""

    def __init__(
        self, ledger: Ledger, options: SinkOptions, quarantine: Quarantine, channel: TaskChannel
    ) -> None:
        self._ledger = ledger
        self._options = options
        self._policy = options.whole_policy()
        self._channel = channel
        since = ledger.now() if options.since is None else options.since
        self._tally = Tally(self._policy, quarantine, since)
        self.counts = self._tally.counts
        self._chunk = min(_FIRST_CHUNK, options.chunk)
        self._waiting: list[tuple[float, int, Row]] = []
        """A heap of deliveries by when they are due."""
        self._order = itertools.count()
        self._delays: dict[str, _Delay] = {}
        """For every id that waits, until it is settled."""
        self._archive = (
            None if options.archive is None else Archive(options.archive, options.consumer)
        )
        self._opened = ExitStack()
        """What is closed when the run is over."""
        self._sending = None if options.transport is None else self._open(options.transport)

    def _open(self, location: str) -> Deferred:
        transport = self._opened.enter_context(closing(open_named_transport(location)))
        return Deferred(Relay(self._ledger, transport))

    def run(self, batches: Iterable["RecordBatch"]) -> None:
        """Settle every row. Raises Stopped; StoreError and whatever ends a process come through."""
        with self._opened:
            for chunk in read_chunks(batches, lambda: self._chunk):
                self.counts.received += len(chunk)
                self._in_pace(self._take, chunk)
                self._take_due()
                # Where most messages fail, the input waits for them, and not they in memory.
                self._wait_for_all_but(MAX_WAITING)
            self._wait_for_all_but(0)

    @abstractmethod
    def _process(self, rows: Sequence[Row], doubt: Doubt | None) -> None:
        """Ask for each row, of which there are some, with what is known of it where it is in
        `doubt`; run the handler where it is granted, and count what came of it.
        """

    # ---- Chunks --------------------------------------------------------------------------------

    def _in_pace(self, take: Callable[[Sequence[Row]], None], chunk: Sequence[Row]) -> None:
        """Take a chunk, and size the next so that a kill leaves little in doubt."""
        began = time.monotonic()
        take(chunk)
        took_s = time.monotonic() - began
        if took_s < _QUICK_S and len(chunk) >= self._chunk:
            self._chunk = min(self._chunk * 2, self._options.chunk)
        elif took_s > _SLOW_S:
            self._chunk = max(self._chunk // 2, 1)
        self._channel.report(self.counts)

    def _take(self, chunk: Sequence[Row]) -> None:
        firsts: dict[str, Row] = {}
        copies = []
        now = time.monotonic()
        for row in self._usable(chunk):
            delay = self._delays.get(row.id)
            if delay is not None and delay.due > now:
                # Asking now would spend a try of the copy that waits, before its time.
                self._put_off(row, delay)
            elif row.id in firsts:
                copies.append(row)
            else:
                firsts[row.id] = row
        # In the order of their ids: two tasks that claim the same ones cannot deadlock.
        self._settle([firsts[id_] for id_ in sorted(firsts)])
        self._settle_copies(copies)

    def _usable(self, chunk: Sequence[Row]) -> Sequence[Row]:
        """Set aside what is no message, or too old to tell, and count what is known from the
        archive; return the rest.
        """
        usable = []
        for row in chunk:
            reason = _unusable(row)
            if reason is None:
                usable.append(row)
            else:
                self._tally.set_aside(row, reason)
        refused = forgotten(
            self._ledger, self._options.consumer, self._policy, usable, self._archive
        )
        for place, why in refused.items():
            if isinstance(why, str):
                self._tally.set_aside(usable[place], why)
            else:
                self._count_refusal(usable[place], why, None)
        return [row for place, row in enumerate(usable) if place not in refused]

    def _settle_copies(self, copies: Sequence[Row]) -> None:
        free = []
        for row in copies:
            delay = self._delays.get(row.id)
            if delay is None:
                free.append(row)
            else:
                self._put_off(row, delay)
        self._settle(free)

    def _take_due(self) -> None:
        """Ask again for what is due."""
        due: list[Row] = []
        now = time.monotonic()
        while self._waiting and self._waiting[0][0] <= now and len(due) < self._chunk:
            due.append(heapq.heappop(self._waiting)[2])
        if due:
            self._take(due)

    def _wait_for_all_but(self, number: int) -> None:
        while len(self._waiting) > number:
            self._channel.wait(self._waiting[0][0], self.counts)
            self._take_due()

    def _put_off(self, row: Row, delay: _Delay) -> None:
        self._delays[row.id] = delay
        heapq.heappush(self._waiting, (delay.due, next(self._order), row))

    # ---- Claims --------------------------------------------------------------------------------

    def _settle(self, rows: Sequence[Row], doubt: Doubt | None = None) -> None:
        if rows:
            self._channel.raise_if_stopping()
            self._process(rows, doubt)

    def _ask(self, calls: Calls, rows: Sequence[Row], doubt: Doubt | None) -> Answers:
        compared = self._policy.on_mismatch != "ignore"
        outcomes = calls.claim_many(
            [Key(self._options.consumer, row.id) for row in rows],
            policy=self._policy,
            fingerprints=[row.fingerprint() for row in rows] if compared else None,
            finding=None if doubt is None else doubt.finding,
            in_doubt=None if doubt is None else doubt.record,
        )
        return list(zip(rows, outcomes, strict=True))

    def _count_refused(self, answers: Answers, doubt: Doubt | None) -> None:
        """Count what was not granted, or put it off."""
        self._finish([(row, said.claim) for row, said in answers if isinstance(said, Handled)])
        for row, outcome in answers:
            if not isinstance(outcome, Granted | Handled):
                self._count_refusal(row, outcome, doubt)

    def _finish(self, handled: Sequence[tuple[Row, Claim]]) -> None:
        """Make the last mark on what was handled before and has nothing left to send."""
        if not handled:
            return
        keys = [claim.key for _, claim in handled]
        self._ledger.finish(keys)
        for row, claim in handled:
            self._delays.pop(row.id, None)
            self._tally.duplicate(claim.record)
        self._send(keys)

    def _count_refusal(self, row: Row, outcome: _Refusal, doubt: Doubt | None) -> None:
        delay = self._delays.pop(row.id, None)
        match outcome:
            case Busy(_, retry_at):
                self._count_busy(row, delay, ends=retry_at is not None)
            case InDoubt(record):
                self._count_in_doubt(row, record, is_probed=doubt is not None)
            case Duplicate(record):
                self._tally.duplicate(record)
            case Exhausted(record):
                self._tally.exhausted(row, record)
            case Mismatch():
                self._tally.set_aside(row, MISMATCH)

    def _count_busy(self, row: Row, delay: _Delay | None, *, ends: bool) -> None:
        now = time.monotonic()
        since = now if delay is None else delay.since
        wait_s = self._tally.busy(now - since, ends=ends)
        if wait_s is not None:
            self._put_off(row, _Delay(now + wait_s, since))

    def _count_in_doubt(self, row: Row, record: Record, *, is_probed: bool) -> None:
        """Ask the user's probe what became of it; without one it stays in doubt."""
        probe = self._policy.on_in_doubt
        if is_probed or not callable(probe):
            self.counts.in_doubt += 1
        else:
            finding = asked_probe(probe, row.message(None))
            self._settle([row], Doubt(finding, record))

    # ---- Ends ----------------------------------------------------------------------------------

    def _count_ends(self, ends: Sequence[End]) -> None:
        for end in ends:
            self._delays.pop(end.row.id, None)
            if not end.stored:
                # Another worker took over, and settles it: its record will tell.
                self._put_off(end.row, self._after(FIRST_POLL_S))
            elif end.kind in (Kind.DONE, Kind.SENDING):
                self.counts.handled += 1
            elif end.kind is Kind.REJECTED:
                self._tally.set_aside(end.row, reason_of(end.error or Reject()))
            elif end.kind in (Kind.FAILED, Kind.LEFT):
                self.counts.failed += 1
            else:
                self._put_off(end.row, self._after(end.delay_s))
        self._channel.report(self.counts)
        self._send([end.claim.key for end in ends if end.stored and end.deferred])

    def _send(self, keys: Sequence[Key]) -> None:
        """Send what these have deferred, where this task is to; what it cannot, a relay sends."""
        if self._sending is not None:
            self._sending.send(keys)

    @staticmethod
    def _after(delay_s: float) -> _Delay:
        now = time.monotonic()
        return _Delay(now + delay_s, now)


def _unusable(row: Row) -> str | None:
    """Why no message can be made of `row`, if so."""
    if row.broken is not None:
        return row.broken
    try:
        check_id(row.id)
    except MessageError as error:
        return str(error)
    return None
