"""What tasks of all modes with a handler have in common: chunks, waiting, and what is counted.

Messages that another worker holds, and those that are retried, wait until the task's own rows are
through. No delivery is left out: each is counted exactly once.
"""

import heapq
import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, closing
from typing import Any, NamedTuple

from pyarrow import RecordBatch

from oncely.archive.lookup import Archive
from oncely.consuming.sending import Sending
from oncely.core.commands import Granted, Outcome, TooOld
from oncely.core.control import Reject
from oncely.core.errors import MessageError, StoreError, reason_of
from oncely.core.ids import check_id
from oncely.core.verdicts import Counted, Delay, Ending
from oncely.ledger import Ledger
from oncely.lifecycle.handling import Handling
from oncely.locations import open_named_transport
from oncely.outbox import Relay
from oncely.spark.modes.row_turn import RowTurn
from oncely.spark.modes.tally import FIRST_POLL_S, RunTally
from oncely.spark.sink.channel import TaskChannel
from oncely.spark.sink.horizon import Horizon
from oncely.spark.sink.message_rows import Row, read_chunks
from oncely.spark.sink.quarantine import Quarantine
from oncely.spark.sink.sink_options import SinkOptions

_FIRST_CHUNK = 100
_QUICK_S = 0.5
_SLOW_S = 2.0
_SEND_S = 10.0
"""How long the end of a task waits for what its handlers have sent."""
MAX_WAITING = 10_000


class _Delay(NamedTuple):
    """When to ask for an id again, and since when that goes on (both monotonic)."""

    due: float
    since: float


class ChunkTask(ABC):
    """One run over the rows of one partition."""

    def __init__(
        self,
        ledger: Ledger,
        options: SinkOptions,
        handler: Callable[..., Any],
        quarantine: Quarantine,
        channel: TaskChannel,
    ) -> None:
        self._ledger = ledger
        self._handler = handler
        self._options = options
        self._policy = options.whole_policy()
        self._channel = channel
        since = ledger.now() if options.since is None else options.since
        self._tally = RunTally(self._policy, quarantine, since)
        self.counts = self._tally.counts
        self._chunk = min(_FIRST_CHUNK, options.chunk)
        self._waiting: list[tuple[float, int, Row]] = []
        """A heap of deliveries by when they are due."""
        self._order = itertools.count()
        self._delays: dict[str, _Delay] = {}
        """For every id that waits, until it is settled."""
        archive = None if options.archive is None else Archive(options.archive, options.consumer)
        self._horizon = Horizon(self._policy, archive)
        self._handling = Handling.under(ledger, options.consumer, self._horizon.policy)
        self._opened = ExitStack()
        """What is closed when the run is over."""
        self._sending: Sending | None = None
        if options.transport is not None:
            transport = self._opened.enter_context(closing(open_named_transport(options.transport)))
            relay = Relay(ledger, transport)
            self._sending = Sending(relay, ledger.mailbox, options.consumer)
            self._opened.callback(self._sending.close, _SEND_S)

    def run(self, batches: Iterable[RecordBatch]) -> None:
        """Settle every row. Raises Stopped; StoreError and whatever ends a process come through."""
        with self._opened:
            for chunk in read_chunks(batches, lambda: self._chunk):
                self.counts.received += len(chunk)
                self._take_in_pace(chunk)
                self._take_due()
                # Where most messages fail, the input waits for them, and not they in memory.
                self._wait_for_all_but(MAX_WAITING)
            self._wait_for_all_but(0)
            if self._sending is not None:
                # What this cannot send, a relay does.
                self._sending.finish(_SEND_S)

    @abstractmethod
    def _process(self, rows: Sequence[Row]) -> None:
        """Ask for each row, of which there are some; run the handler where it is granted, and count
        what came of it.
        """

    # ---- Chunks --------------------------------------------------------------------------------

    def _take_in_pace(self, chunk: Sequence[Row]) -> None:
        """Take a chunk, and size the next so that a kill leaves little in doubt."""
        began = time.monotonic()
        self._take(chunk)
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
        """Set aside rows that are not messages; return the rest."""
        usable = []
        for row in chunk:
            reason = _unusable(row)
            if reason is None:
                usable.append(row)
            else:
                self._tally.set_aside(row, reason)
        return usable

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

    # ---- Turns ---------------------------------------------------------------------------------

    def _settle(self, rows: Sequence[Row]) -> None:
        if rows:
            self._channel.raise_if_stopping()
            self._process(rows)

    def _turns(self, rows: Sequence[Row]) -> list[RowTurn]:
        is_compared = self._policy.on_mismatch != "ignore"
        sent_at = self._horizon.sent_at
        return [RowTurn(row, sent_at(row), is_compared=is_compared) for row in rows]

    def _count_ended(self, turns: Sequence[RowTurn]) -> None:
        """Count what came of these, or put them off."""
        too_old = []
        for turn in turns:
            ending = turn.ending or self._handling.ending_of(turn)
            if isinstance(turn.outcome, TooOld):
                too_old.append((turn.row, turn.outcome))
            elif turn.outcome is not None and not isinstance(turn.outcome, Granted):
                self._count_outcome(turn.row, turn.outcome)
            else:
                self._count_end(turn, ending)
        self._channel.report(self.counts)
        if self._sending is not None:
            self._sending.send([turn.key for turn in turns if turn.key and turn.may_have_sent])
        self._count_too_old(too_old)

    def _count_too_old(self, answers: Sequence[tuple[Row, TooOld]]) -> None:
        """Set aside what the ledger may have forgotten, or count it as the archive knows it; ask
        again for what may run all the same.
        """
        if not answers:
            return
        again = []
        for (row, _), why in zip(answers, self._horizon.judge(answers), strict=True):
            if why is None:
                again.append(row)
            elif isinstance(why, str):
                self._delays.pop(row.id, None)
                self._tally.set_aside(row, why)
            else:
                self._count_outcome(row, why)
        self._channel.report(self.counts)
        self._settle(again)

    def _count_end(self, turn: RowTurn, ending: Ending) -> None:
        self._delays.pop(turn.row.id, None)
        if isinstance(turn.refusal, StoreError):
            raise turn.refusal
        match ending.counted:
            case Counted.HANDLED:
                self.counts.handled += 1
            case Counted.REJECTED:
                self._tally.set_aside(turn.row, reason_of(turn.error or Reject()))
            case Counted.FAILED:
                self.counts.failed += 1
            case _:
                # To be tried again; or another worker took over, and settles it.
                now = time.monotonic()
                delay_s = ending.verdict.delay_s if isinstance(ending.verdict, Delay) else 0.0
                wait_s = delay_s if ending.counted is Counted.RETRIED else FIRST_POLL_S
                self._put_off(turn.row, _Delay(now + wait_s, now))

    def _count_outcome(self, row: Row, outcome: Outcome) -> None:
        """Count what was not granted, or put it off."""
        now = time.monotonic()
        delay = self._delays.pop(row.id, None)
        since = now if delay is None else delay.since
        wait_s = self._tally.refused(outcome, lambda: row, now - since)
        if wait_s is not None:
            self._put_off(row, _Delay(now + wait_s, since))


def _unusable(row: Row) -> str | None:
    """Why no message can be made of `row`, if so."""
    if row.broken is not None:
        return row.broken
    try:
        check_id(row.id)
    except MessageError as error:
        return str(error)
    return None
