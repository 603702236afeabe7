"""The common part of tasks with a handler, in all modes: chunks, waiting and counting.

A message that fails waits in the ledger, and holds up no batch: any worker takes it when it is due.
A message that another worker holds waits in the task until the task's own rows are done. Each
delivery is counted exactly once.
"""

import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, closing, suppress
from contextvars import copy_context
from functools import partial
from typing import Any, TypeVar, cast

from pyarrow import RecordBatch

from oncely._util.later import Later
from oncely.consumer.order import Order
from oncely.consumer.sender import Sender
from oncely.consumer.source import DueRetries
from oncely.core.commands import (
    Duplicate,
    Exhausted,
    Granted,
    InDoubt,
    Mismatch,
    Outcome,
    TooOld,
    Waiting,
)
from oncely.core.control import Reject
from oncely.core.errors import StoreError, UnstorableMessage, reason_of
from oncely.core.record import Key, birth_of
from oncely.core.turn import TurnState
from oncely.core.verdicts import Counted, Delay, Ending
from oncely.core.waiting import WaitingMessage
from oncely.ledger.driver import run_inline
from oncely.ledger.ledger import Ledger
from oncely.lifecycle.heartbeat import AWAY
from oncely.lifecycle.lifecycle import Lifecycle
from oncely.lifecycle.retry_queue import RetryQueue, settle_taken
from oncely.lifecycle.wrapping import is_async
from oncely.locations import open_named_transport
from oncely.outbox import Relay
from oncely.spark.modes.row_turn import RowTurn
from oncely.spark.modes.start import CAPACITY, Entry, Start
from oncely.spark.modes.steady import steadily
from oncely.spark.modes.tally import FIRST_POLL_S, Aside, RunTally
from oncely.spark.sink.channel import Stopped, TaskChannel
from oncely.spark.sink.horizon import Horizon
from oncely.spark.sink.message_rows import Row, read_chunks
from oncely.spark.sink.sink_options import SinkOptions

T = TypeVar("T")

_FIRST_CHUNK = 100
_QUICK_S = 0.5
_SLOW_S = 2.0
_LOOK_S = 1.0
"""When a task first looks for due retries between its own rows."""
_SEND_S = 10.0
"""How long a task at its end waits until its deferred messages are sent."""
_RETRY_S = 5.0
"""How long a task at its end goes on with due retries: the next batch takes them, too."""
MAX_WAITING = 10_000


class ChunkTask(ABC):
    """One run over the rows of one partition."""

    def __init__(
        self,
        ledger: Ledger,
        options: SinkOptions,
        handler: Callable[..., Any],
        aside: Aside,
        channel: TaskChannel,
        start: Start | None = None,
    ) -> None:
        self._ledger = ledger
        self._handler = handler
        if not is_async(handler):
            # What one handler sets in its context is not there for the next.
            self._handler = lambda *given: copy_context().run(handler, *given)
        self._options = options
        self._policy = options.whole_policy()
        self._channel = channel
        self._start = start = start or Start()
        since = ledger.now() - (time.monotonic() - start.began_at)
        self._since = since if options.since is None else options.since
        self._tally = RunTally(self._policy, aside, self._since, start.counts)
        self.counts = self._tally.counts
        self._settled: list[int] = []
        """The numbers of rows that were settled since the last report."""
        self._begun = {**start.inherited}
        """Rows whose handlers had begun in a process that died."""
        self._adopted = itertools.count(min(start.adopted, default=0) - 1, -1)
        """The numbers for messages taken from the ledger."""
        self._largest_chunk = min(options.chunk, CAPACITY)
        self._chunk = min(_FIRST_CHUNK, self._largest_chunk)
        self._order = Order[RowTurn](is_ordered=False)
        """The task's own rows that are not settled: copies of a message stand behind it."""
        self._ready: list[RowTurn] = []
        """Rows that stood behind others, and can be claimed now."""
        self._put_off: Later[RowTurn] = Later()
        """Rows that are claimed again later: another worker holds them, or for a retry."""
        self._horizon = Horizon(self._policy, options)
        self._lifecycle = Lifecycle.under(ledger, options.consumer, self._horizon.policy)
        self._serializer = self._lifecycle.serializer_of(handler)
        self._driver = self._lifecycle.sync_driver
        self._retries: DueRetries | None = None
        queue = RetryQueue(options.consumer)
        if ledger.can_defer:
            self._lifecycle.retry_queue = queue
            hold_s, outage = self._lifecycle.lease_s or 0.0, self._lifecycle.outage
            look_at = time.monotonic() + _LOOK_S
            self._retries = DueRetries(ledger.mailbox, queue, hold_s, outage, look_at)
        self._opened = ExitStack()
        """The resources to close at the end of the run."""
        self._sending: Sender | None = None
        if options.transport is not None:
            transport = self._opened.enter_context(closing(open_named_transport(options.transport)))
            self._sending = Sender(Relay(ledger, transport), ledger.mailbox, queue)
            self._opened.callback(self._sending.close, _SEND_S)

    def run(self, batches: Iterable[tuple[Sequence[int], RecordBatch]]) -> None:
        """Settle every row; rows come with their numbers. Raises Stopped, and StoreError."""
        with self._opened:
            self._take_adopted()
            for chunk in read_chunks(batches, lambda: self._chunk):
                self.counts.received += len(chunk)
                self._take_in_pace(chunk)
                self._settle(self._put_off.take(self._chunk))
                self._take_retries(at_once=False)
                # The input waits, so that not too many rows that others hold are in memory.
                self._wait_for_all_but(MAX_WAITING)
            self._wait_for_all_but(0)
            until = time.monotonic() + _RETRY_S
            while self._take_retries(at_once=True) and time.monotonic() < until:
                pass
            self._tell()
            if self._sending is not None:
                # A relay sends the rest.
                self._sending.finish(_SEND_S)

    @abstractmethod
    def _process(self, turns: Sequence[RowTurn]) -> None:
        """Claim these, run the handler of granted ones, and count the results."""

    def _inherit(self, turn: RowTurn, entry: Entry) -> bool:  # noqa: ARG002
        """Settle a row whose handler had begun in a process that died; return whether it is."""
        return False

    # ---- Rows ----------------------------------------------------------------------------------

    @property
    def unsettled(self) -> int:
        """How many of the rows taken so far wait."""
        return self.counts.received - self.counts.settled

    def _take_in_pace(self, chunk: Sequence[Row]) -> None:
        """Process a chunk, and size the next one so that a kill leaves little in doubt."""
        began = time.monotonic()
        usable = [row for row in chunk if self._tally.is_message(row)]
        self._settled += {row.number for row in chunk} - {row.number for row in usable}
        self._settle(self._order.enter([self._turn(row) for row in usable]))
        took_s = time.monotonic() - began
        if took_s < _QUICK_S and len(chunk) >= self._chunk:
            self._chunk = min(self._chunk * 2, self._largest_chunk)
        elif took_s > _SLOW_S:
            self._chunk = max(self._chunk // 2, 1)
        self._tell()

    def _turn(self, row: Row) -> RowTurn:
        # With its token the successor of a process that died is granted the same claim again. Steps
        # of two: the number after a token is the birth of a released claim.
        token = birth_of(self._start.token + 2 * row.number)
        turn = RowTurn(row, token)
        if row.taken is None:
            # Its id is one.
            turn.key = Key(self._options.consumer, row.id)
        if self._policy.on_mismatch != "ignore":
            turn.fingerprint = row.fingerprint()
        turn.serializer = self._serializer
        return turn

    def _settle(self, turns: Sequence[RowTurn]) -> None:
        """Process these, and those that stood behind them."""
        while turns:
            if self._options.stops_early and self.counts.hopeless:
                self._channel.refuse(self.counts.hopeless)
            self._channel.raise_if_stopping()
            if self._begun:
                turns = [turn for turn in turns if not self._is_inherited(turn)]
            if turns:
                self._process(turns)
            turns, self._ready = self._ready, []

    def _is_inherited(self, turn: RowTurn) -> bool:
        """Whether a process that died had begun the row, which is then settled here."""
        entry = self._begun.pop(turn.row.number, None)
        return entry is not None and self._inherit(turn, entry)

    def _wait_for_all_but(self, number: int) -> None:
        while self.unsettled > number:
            self._channel.wait(self._put_off.next_due)
            self._settle(self._put_off.take(self._chunk))

    # ---- Messages that waited in the ledger ------------------------------------------------------

    def _take_adopted(self) -> None:
        """Settle the messages that a process that died had taken from the ledger."""
        numbers = {key: number for number, key in self._start.adopted.items()}
        if numbers:
            there = self._steadily(partial(self._ledger.mailbox.retries, [*numbers]))
            self._settle([self._taken(each, numbers[key]) for key, each in there.items()])

    def _take_retries(self, *, at_once: bool) -> bool:
        """Take retries that are due; return whether there were any."""
        retries = self._retries
        if retries is None or not (retries.look() if at_once else retries.are_due()):
            return False
        taken = retries.take(self._chunk)
        turns = [self._taken(each, next(self._adopted)) for each in taken]
        for turn, each in zip(turns, taken, strict=True):
            self._start.adopt(turn.row.number, each.parent)
        try:
            self._settle(turns)
        except Stopped:
            # Others may take those at once that are not settled.
            with suppress(*AWAY):
                settle_taken(self._ledger.mailbox, turns)
            raise
        return bool(taken)

    def _taken(self, taken: WaitingMessage, number: int) -> RowTurn:
        """The turn of a message that was taken; its number is not one of the input."""
        m = taken.message
        values = (m.id, m.type, m.body, list(m.headers.items()), m.source, m.time, m.key)
        return self._turn(Row(*values, number=number, taken=taken))

    # ---- Ends ----------------------------------------------------------------------------------

    def _tell(self) -> None:
        """Report the progress of the task."""
        self._channel.report(self.counts)
        settled, self._settled = self._settled, []
        self._start.tell(settled, self.counts)

    def _steadily(self, ask: Callable[[], T]) -> T:
        """Call `ask` until the store answers; return its result. Raises Stopped."""
        return steadily(ask, self._channel, self._lifecycle.outage, self._ledger)

    def _count_ended(self, turns: Sequence[RowTurn]) -> None:
        """Count the ends of these turns, or put them off."""
        for turn in turns:
            self._lifecycle.end(turn)
        if dead := [turn for turn in turns if turn.is_dead_unheard]:
            for turn in dead:
                turn.message = turn.row.message()
            run_inline(self._lifecycle.put_aside(self._driver, dead))
        if taken := [turn for turn in turns if turn.taken is not None]:
            self._steadily(lambda: settle_taken(self._ledger.mailbox, taken))
        if self._sending is not None:
            self._sending.send_of(turns)
        self._start.journal.forget({turn.row.number for turn in turns})
        too_old: list[tuple[RowTurn, TooOld]] = []
        done: list[RowTurn] = []
        for turn in turns:
            if isinstance(turn.outcome, TooOld) and turn.taken is None:
                too_old.append((turn, turn.outcome))
                continue
            wait_s = self._count(turn)
            if wait_s is None:
                done.append(turn)
            elif turn.taken is None:
                # Else it waits in the ledger.
                self._put_off.add(time.monotonic() + wait_s, turn)
                turn.begins_anew()
        done += self._count_too_old(too_old)
        self._settled += [turn.row.number for turn in done]
        self._ready += self._order.leave([turn for turn in done if turn.taken is None])
        self._tell()

    def _count_too_old(self, answers: Sequence[tuple[RowTurn, TooOld]]) -> list[RowTurn]:
        """Set aside messages that the ledger may have forgotten, or count them by the archive;
        return them. Others may run: they are claimed again.
        """
        done = []
        judged = self._horizon.judge([(turn.row, said) for turn, said in answers])
        for (turn, said), why_not in zip(answers, judged, strict=True):
            if why_not is None:
                turn.passed = said.horizon
                turn.begins_anew()
                self._ready.append(turn)
                continue
            done.append(turn)
            if isinstance(why_not, str):
                self._tally.set_aside(turn.row, why_not)
            else:
                self._count_refused(turn, why_not)
        return done

    def _count(self, turn: RowTurn) -> float | None:
        """Count a turn, which has ended; or return the seconds until it is tried again."""
        wait_s, ending = None, cast(Ending, turn.ending)
        match turn.outcome:
            case None | Granted():
                wait_s = self._count_end(turn, ending)
            case Duplicate(record) if record.birth == turn.token:
                # Done by a process that died before it could report it.
                self.counts.handled += 1
            case Waiting(record) if record.birth == turn.token:
                self.counts.waiting += 1
            case Exhausted() | InDoubt() if ending.counted is Counted.GIVEN_BACK:
                # The dead letter could not be stored.
                wait_s = FIRST_POLL_S
            case Mismatch() | TooOld() if turn.taken is not None:
                # Not for the quarantine: it is not a row of the source.
                self.counts.failed += 1
            case outcome:
                wait_s = self._count_refused(turn, cast(Outcome, outcome))
        if wait_s is None and turn.taken is not None:
            if self._is_counted(turn):
                self.counts.waiting -= 1
            else:
                self.counts.received += 1
        return wait_s

    def _count_end(self, turn: RowTurn, ending: Ending) -> float | None:
        """As `_count`, where the message was granted, or cannot be."""
        error = turn.error or turn.refusal
        is_kept = self._lifecycle.retry_queue is not None and turn.state is TurnState.STORED
        match ending.counted:
            case Counted.HANDLED:
                self.counts.handled += 1
            case Counted.REJECTED:
                self._tally.set_aside(turn.row, reason_of(turn.error or Reject()))
            case Counted.SET_ASIDE if isinstance(turn.refusal, UnstorableMessage):
                self._tally.set_aside(turn.row, reason_of(turn.refusal))
            case Counted.FAILED | Counted.SET_ASIDE:
                self.counts.failed += 1
                self.counts.newly_failed += 1
                self._tally.erred(turn.row.id, error, is_again=self._is_counted(turn))
            case Counted.IN_DOUBT if not isinstance(ending.verdict, Delay):
                self.counts.in_doubt += 1
                self._tally.erred(turn.row.id, error, is_again=self._is_counted(turn))
            case Counted.RETRIED | Counted.IN_DOUBT if is_kept:
                self.counts.waiting += 1
                self._tally.erred(turn.row.id, error, is_again=self._is_counted(turn))
            case Counted.RETRIED | Counted.IN_DOUBT:
                # By this task, as the ledger keeps no messages.
                return cast(Delay, ending.verdict).delay_s
            case _ if isinstance(turn.refusal, StoreError) and not isinstance(turn.refusal, AWAY):
                raise turn.refusal
            case _:
                # Another worker has taken it over, and settles it.
                return FIRST_POLL_S
        return None

    def _count_refused(self, turn: RowTurn, outcome: Outcome) -> float | None:
        """As `_count`, where the message was not granted."""
        now = time.monotonic()
        turn.held_since = turn.held_since or now
        return self._tally.refused(outcome, lambda: turn.row, now - turn.held_since)

    def _is_counted(self, turn: RowTurn) -> bool:
        """Whether it was taken from the ledger, and was counted as waiting in this run: it had
        failed in this run, or was delivered in it once more.
        """
        if turn.taken is None:
            return False
        former = None if turn.claim is None else turn.claim.former
        seen_at = turn.taken.since if former is None else former.last_seen
        # A reset removes the attempts: a dead letter was not counted as waiting.
        was_reset = former is not None and not former.attempts
        return seen_at is not None and seen_at >= self._since and not was_reset
