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
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

from pyarrow import RecordBatch

from oncely._util.later import Later
from oncely.consumer.sender import Sender
from oncely.core.commands import ClaimOutcome, Granted, Mismatch, Outcome, TooOld, Waiting
from oncely.core.control import Reject
from oncely.core.errors import StoreError, UnreadableRow, reason_of
from oncely.core.record import birth_of
from oncely.core.turn import TurnState
from oncely.core.verdicts import Counted, Delay, Ending
from oncely.core.waiting import WaitingMessage
from oncely.ledger.driver import run_inline
from oncely.ledger.ledger import Ledger
from oncely.lifecycle.heartbeat import AWAY
from oncely.lifecycle.lifecycle import Lifecycle
from oncely.lifecycle.retry_queue import RetryQueue, settle_taken
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
from oncely.stores.store import PutBack

T = TypeVar("T")

_FIRST_CHUNK = 100
_QUICK_S = 0.5
_SLOW_S = 2.0
_LOOK_S = 1.0
"""How often a task looks for due retries between its own rows."""
_SEND_S = 10.0
"""How long a task at its end waits until its deferred messages are sent."""
_RETRY_S = 5.0
"""How long a task at its end goes on with due retries: the next batch takes them, too."""
MAX_WAITING = 10_000


class Delayed(NamedTuple):
    """When to claim an id again, and since when it is delayed (both monotonic)."""

    due: float
    since: float


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
        self._options = options
        self._policy = options.whole_policy()
        self._channel = channel
        self._start = start = start or Start()
        since = ledger.now() - (time.monotonic() - start.began_at)
        self._since = since if options.since is None else options.since
        self._tally = RunTally(self._policy, aside, self._since, start.counts)
        self.counts = self._tally.counts
        self._lost: set[int] = set()
        """The numbers of rows whose claims were lost."""
        self._settled: list[int] = []
        """The numbers of rows that were settled since the last report."""
        self._begun = {**start.inherited}
        """Rows whose handlers had begun in a process that died."""
        self._adopted = itertools.count(min(start.adopted, default=0) - 1, -1)
        """The numbers for messages taken from the ledger."""
        self._largest_chunk = min(options.chunk, CAPACITY)
        self._chunk = min(_FIRST_CHUNK, self._largest_chunk)
        self._waiting: Later[Row] = Later()
        """Rows that are claimed again later: another worker holds them, or for a retry."""
        self._delays: dict[str, Delayed] = {}
        """The delay of each id that waits, until it is settled."""
        self._horizon = Horizon(self._policy, options)
        self._lifecycle = Lifecycle.under(ledger, options.consumer, self._horizon.policy)
        self._serializer = self._lifecycle.serializer_of(handler)
        self._driver = self._lifecycle.sync_driver
        self._outage = self._lifecycle.outage
        self._look_at = time.monotonic() + _LOOK_S
        """When to look for due retries again."""
        if ledger.can_defer:
            self._lifecycle.retry_queue = RetryQueue(options.consumer)
        self._opened = ExitStack()
        """The resources to close at the end of the run."""
        self._sending: Sender | None = None
        if options.transport is not None:
            transport = self._opened.enter_context(closing(open_named_transport(options.transport)))
            relay = Relay(ledger, transport)
            self._sending = Sender(relay, ledger.mailbox, RetryQueue(options.consumer))
            self._opened.callback(self._sending.close, _SEND_S)

    def run(self, batches: Iterable[tuple[Sequence[int], RecordBatch]]) -> None:
        """Settle every row; rows come with their numbers. Raises Stopped, and StoreError."""
        with self._opened:
            self._take_adopted()
            for chunk in read_chunks(batches, lambda: self._chunk):
                self.counts.received += len(chunk)
                self._take_in_pace(chunk)
                self._take(self._waiting.take(self._chunk))
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
    def _process(self, rows: Sequence[Row]) -> None:
        """Claim each row, of which there is at least one; run the handler of granted ones, and
        count the results.
        """

    @abstractmethod
    def _inherit(self, row: Row, entry: Entry) -> bool:
        """Settle a row whose handler had begun in a process that died; return whether it is."""

    # ---- Chunks --------------------------------------------------------------------------------

    def _take_in_pace(self, chunk: Sequence[Row]) -> None:
        """Process a chunk, and size the next one so that a kill leaves little in doubt."""
        began = time.monotonic()
        self._take(chunk)
        took_s = time.monotonic() - began
        if took_s < _QUICK_S and len(chunk) >= self._chunk:
            self._chunk = min(self._chunk * 2, self._largest_chunk)
        elif took_s > _SLOW_S:
            self._chunk = max(self._chunk // 2, 1)
        self._tell()

    def _take(self, chunk: Sequence[Row]) -> None:
        firsts: dict[str, Row] = {}
        copies = []
        now = time.monotonic()
        usable = [row for row in chunk if self._tally.is_message(row)]
        self._settled += {row.number for row in chunk} - {row.number for row in usable}
        for row in self._left_after_death(usable):
            delay = self._delays.get(row.id)
            if delay is not None and delay.due > now:
                # To claim now would spend an attempt of the copy that waits, before it is due.
                self._put_off(row, delay)
            elif row.id in firsts:
                copies.append(row)
            else:
                firsts[row.id] = row
        # In the order of ids: two tasks that claim the same ids cannot deadlock.
        self._settle([firsts[id_] for id_ in sorted(firsts)])
        free = []
        for row in copies:
            delay = self._delays.get(row.id)
            if delay is None:
                free.append(row)
            else:
                self._put_off(row, delay)
        self._settle(free)

    def _left_after_death(self, rows: Sequence[Row]) -> Sequence[Row]:
        """The rows to claim: those that no process that died had begun."""
        if not self._begun:
            return rows
        left = []
        for row in rows:
            entry = self._begun.pop(row.number, None)
            if entry is None or not self._inherit(row, entry):
                left.append(row)
        return left

    def _take_adopted(self) -> None:
        """Settle the messages that a process that died had taken from the ledger."""
        numbers = {key: number for number, key in self._start.adopted.items()}
        if numbers:
            there = self._steadily(partial(self._ledger.mailbox.retries, [*numbers]))
            rows = [_taken_row(each, numbers[key]) for key, each in there.items()]
            self._settle(self._left_after_death(rows))

    def _wait_for_all_but(self, number: int) -> None:
        while len(self._waiting) > number:
            self._channel.wait(self._waiting.next_due, self.counts)
            self._take(self._waiting.take(self._chunk))

    def _put_off(self, row: Row, delay: Delayed) -> None:
        """Delay a row. A row that was taken from the ledger waits there instead."""
        if row.taken is None:
            self._delays[row.id] = delay
            self._waiting.add(delay.due, row)

    def _take_retries(self, *, at_once: bool) -> bool:
        """Take retries that are due; return whether there were any."""
        queue, mailbox = self._lifecycle.retry_queue, self._ledger.mailbox
        if queue is None or not (at_once or time.monotonic() >= self._look_at):
            return False

        def take() -> Sequence[WaitingMessage]:
            self._look_at = time.monotonic() + _LOOK_S
            # To look is a cheap read; to take is a write.
            if mailbox.free_in_s(queue.name) != 0:
                return []
            # No other worker gets them for the time of the lease.
            return mailbox.take(self._chunk, self._policy.lease, queue=queue.name)

        taken = self._steadily(take)
        rows = [_taken_row(each, next(self._adopted)) for each in taken]
        for row, each in zip(rows, taken, strict=True):
            self._start.adopt(row.number, each.parent)
        try:
            self._settle(rows)
        except Stopped:
            with suppress(*AWAY):
                # Others may take them at once, except those that are settled.
                mailbox.put_back([PutBack(each, None, 0.0, is_try=False) for each in taken])
            raise
        return bool(rows)

    # ---- Turns ---------------------------------------------------------------------------------

    def _settle(self, rows: Sequence[Row]) -> None:
        if rows:
            self._channel.raise_if_stopping()
            self._process(rows)

    def _tell(self) -> None:
        """Report the progress of the task."""
        self._channel.report(self.counts)
        settled, self._settled = self._settled, []
        self._start.tell(settled, self.counts)

    def _steadily(self, ask: Callable[[], T]) -> T:
        """Call `ask` until the store answers; return its result. Raises Stopped."""
        return steadily(ask, self._channel, self._outage, self.counts, self._ledger)

    def _turns(self, rows: Sequence[Row]) -> list[RowTurn]:
        is_compared = self._policy.on_mismatch != "ignore"
        sent_at = self._horizon.sent_at
        turns = []
        for row in rows:
            # With its token the successor of a process that died is granted the same claim again. A
            # row whose claim was lost has none: another worker may hold it. Steps of two: the
            # number after a token is the birth of a released claim.
            is_lost = row.number in self._lost
            token = None if is_lost else birth_of(self._start.token + 2 * row.number)
            turns.append(RowTurn(row, sent_at(row), token, is_compared=is_compared))
        if self._lifecycle.keeps_result:
            for turn in turns:
                turn.serializer = self._serializer
        return turns

    def _count_ended(self, turns: Sequence[RowTurn]) -> None:
        """Count the ends of these turns, or delay them."""
        for turn in turns:
            self._lifecycle.end(turn)
        if self._lifecycle.retry_queue is not None:
            self._keep_dead([turn for turn in turns if turn.is_dead_unheard])
        taken = [turn for turn in turns if turn.taken is not None]
        if taken:
            self._steadily(lambda: settle_taken(self._ledger.mailbox, taken))
        too_old = []
        for turn in turns:
            if isinstance(turn.outcome, TooOld) and turn.taken is None:
                too_old.append((turn.row, turn.outcome))
            else:
                self._count_one(turn)
        self._start.journal.forget({turn.row.number for turn in turns})
        self._tell()
        if self._sending is not None:
            self._sending.send_of(turns)
        self._count_too_old(too_old)

    def _keep_dead(self, turns: Sequence[RowTurn]) -> None:
        """Store messages that need an operator as dead letters, with their bodies."""
        if not turns:
            return
        keys = [turn.key for turn in turns if turn.key is not None]
        # The dead letter has the reason.
        there = self._steadily(lambda: self._ledger.mailbox.retries(keys))
        new = [turn for turn in turns if turn.key not in there or not turn.is_known_dead]
        for turn in new:
            turn.message = turn.row.message(None)
        run_inline(self._lifecycle.put_aside(self._driver, new))

    def _count_one(self, turn: RowTurn) -> None:
        settled = self.counts.settled
        ending = cast(Ending, turn.ending)
        if turn.token is None:
            # Its claim may be stored although its transaction is not.
            self._lost.add(turn.row.number)
        if turn.was_done_before:
            # Done by a process that died before it could report it.
            self._delays.pop(turn.row.id, None)
            if isinstance(turn.outcome, Waiting):
                self.counts.waiting += 1
            else:
                self.counts.handled += 1
        elif turn.outcome is None or isinstance(turn.outcome, Granted) or turn.is_unkept:
            self._count_end(turn, ending)
        elif turn.taken is not None and isinstance(turn.outcome, Mismatch | TooOld):
            # Not for the quarantine: it is not a row of the source.
            self.counts.failed += 1
        else:
            self._count_outcome(turn.row, cast(ClaimOutcome, turn.outcome))
        if self.counts.settled == settled:
            return
        self._settled.append(turn.row.number)
        if turn.taken is not None:
            self._count_taken(turn, turn.taken)

    def _count_taken(self, turn: RowTurn, taken: WaitingMessage) -> None:
        """Count a message that was delivered before: earlier in this run, where it was counted as
        waiting, or in an earlier run.
        """
        former = None if turn.claim is None else turn.claim.former
        failed_at = taken.since if former is None else former.last_seen
        # A reset removes the attempts: a dead letter was not counted as waiting.
        was_reset = former is not None and not former.attempts
        if failed_at is not None and failed_at >= self._since and not was_reset:
            self.counts.waiting -= 1
        else:
            self.counts.received += 1

    def _count_too_old(self, answers: Sequence[tuple[Row, TooOld]]) -> None:
        """Set aside messages that the ledger may have forgotten, or count them by the archive;
        claim again those that may run.
        """
        if not answers:
            return
        again = []
        for (row, _), why_not in zip(answers, self._horizon.judge(answers), strict=True):
            if self._tally.may_run(row, why_not):
                again.append(row)
            else:
                self._delays.pop(row.id, None)
                self._settled.append(row.number)
        self._tell()
        self._settle(again)

    def _count_end(self, turn: RowTurn, ending: Ending) -> None:
        self._delays.pop(turn.row.id, None)
        is_kept = self._lifecycle.retry_queue is not None and turn.state is TurnState.STORED
        match ending.counted:
            case Counted.HANDLED:
                self.counts.handled += 1
            case Counted.SET_ASIDE if isinstance(turn.refusal, UnreadableRow):
                self.counts.failed += 1
                self._tally.erred(turn.row.id, turn.refusal)
            case _ if isinstance(turn.refusal, StoreError) and not isinstance(turn.refusal, AWAY):
                raise turn.refusal
            case Counted.REJECTED:
                self._tally.set_aside(turn.row, reason_of(turn.error or Reject()))
            case Counted.FAILED:
                self.counts.failed += 1
                self._tally.erred(turn.row.id, turn.error)
            case Counted.RETRIED if is_kept:
                self.counts.waiting += 1
                self._tally.erred(turn.row.id, turn.error)
            case _:
                # To be retried by this task, as the ledger keeps no messages; or another worker has
                # taken it over, and settles it.
                self._lost.add(turn.row.number)
                now = time.monotonic()
                delay_s = ending.verdict.delay_s if isinstance(ending.verdict, Delay) else 0.0
                wait_s = delay_s if ending.counted is Counted.RETRIED else FIRST_POLL_S
                self._put_off(turn.row, Delayed(now + wait_s, now))

    def _count_outcome(self, row: Row, outcome: Outcome) -> None:
        """Count a row that was not granted, or delay it."""
        now = time.monotonic()
        delay = self._delays.pop(row.id, None)
        since = now if delay is None else delay.since
        wait_s = self._tally.refused(outcome, lambda: row, now - since)
        if wait_s is not None:
            self._put_off(row, Delayed(now + wait_s, since))


def _taken_row(taken: WaitingMessage, number: int) -> Row:
    """The row of a message that was taken from the ledger; its number is not one of the input."""
    given = taken.message
    headers = list(given.headers.items())
    values = (given.id, given.type, given.body, headers, given.source, given.time, given.key)
    return Row(*values, number=number, taken=taken)
