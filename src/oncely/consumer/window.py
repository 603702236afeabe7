"""Window: many messages on their way: taken, claimed, run, stored and acknowledged, in batches."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from oncely._util import clock
from oncely._util.clock import monotonic
from oncely._util.crash_points import reached
from oncely._util.later import Later
from oncely.consumer.executor import SLOW_S, Executor
from oncely.consumer.order import Order
from oncely.consumer.sender import Sender
from oncely.core.commands import Company
from oncely.core.policy import Policy
from oncely.core.turn import Turn
from oncely.core.verdicts import Delay, Ending
from oncely.ledger.driver import run_inline
from oncely.lifecycle.heartbeat import AWAY, PAUSE_S
from oncely.lifecycle.lifecycle import Lifecycle

T = TypeVar("T", bound=Turn)

_IDLE_S = 0.1
"""How long to wait for a message if none is being handled."""
_SHORTEST_REST_S = 0.002
_LONGEST_REST_S = 0.05
"""How long to wait for a handler to end before more are taken."""
_GATHER_S = 0.005
"""How long messages wait for more, while there is other work: to claim and to store many costs
nearly the same as for one."""
_MOST_STORING = 2
"""The number of batches whose ends are being stored: more would only wait for each other."""


class Source(Protocol[T]):
    """Where the messages of a window come from: a queue, or the rows of a partition."""

    def take(self, room: int, free: int, wait_s: float) -> Sequence[T]:
        """Turns of messages that are given to nobody else meanwhile, at most `room`; `free` of them
        would begin soon. Waits at most so long for the first.
        """

    def renew(self, turn: T) -> None:
        """Make a turn ready for its next try, which was put off, and is due."""

    def is_empty(self) -> bool:
        """Whether nothing is left: no message waits, or was given to somebody else."""


class Sink(Protocol[T]):
    """Where the messages of a window end: what is told when the ledger knows how they ended, in the
    thread that stores.
    """

    def count(self, turn: T, ending: Ending) -> None:
        """A turn has ended in this way: called once for each try."""

    def acknowledge(self, turns: Sequence[T]) -> Sequence[T]:
        """Tell where they came from what becomes of these messages. Return those of which nothing
        is told, since they stay here until their next try.
        """

    def give_back(self, turns: Sequence[T]) -> None:
        """Tell that this process stops, and these have not ended."""


@dataclass(eq=False)
class Window(Generic[T]):
    """Takes turns from `source`, a window at a time; lets them run in `order`; claims those that
    come together in one batch, and has `executor` run them; stores their ends, on a thread of its
    own, beside the next claim; and tells `sink`.

    Without a `lifecycle` messages run untracked. When `stop` is set, nothing more is claimed.
    """

    source: Source[T]
    sink: Sink[T]
    order: Order[T]
    executor: Executor[T]
    lifecycle: Lifecycle | None
    policy: Policy
    stop: threading.Event
    joins: bool = False
    """Whether handlers work in transactions, in which their claims are made."""
    runs_all: bool = False
    """Whether the executor is given duplicates and refused messages, too."""
    gives_back: bool = False
    """Whether messages that have not begun are given back while no handler is free: for other
    workers, where it matters neither in which order nor how often messages are delivered."""
    sender: Sender | None = None
    """Sends what handlers have sent."""
    on_concluded: Callable[[], object] = lambda: None
    """Is called when some turns are done."""

    def __post_init__(self) -> None:
        self._arrived: list[T] = []
        """Turns that wait for more, to be claimed together."""
        self._begin_at = 0.0
        """`clock.monotonic()` at which they are claimed, without waiting for more."""
        self._in_flight: set[T] = set()
        self._begun = 0
        """How many of them would be at risk if this process died now."""
        self._ready: list[T] = []
        """Turns in flight that stood behind others, or were put off, and can run now."""
        self._suspects: deque[T] = deque()
        """Turns in flight that may have killed a worker, to be claimed and run one by one, while
        nothing else is at risk here."""
        self._runs_alone = False
        """Whether one of them is at work."""
        self._put_off: Later[T] = Later()
        """Turns in flight that stay here until their next try."""
        self._answered: list[T] = []
        """Turns whose handler does not run: they end together with those whose handler ran."""
        self._rest_s = _SHORTEST_REST_S
        self._free_at = monotonic()
        """`clock.monotonic()` when a handler was free last."""
        self._storing = ThreadPoolExecutor(1, "oncely-storing")
        self._batches: deque[tuple[Future[Sequence[T]], Sequence[T]]] = deque()
        """The turns whose ends are being stored."""

    # ---- Rounds --------------------------------------------------------------------------------

    def go_on(self) -> bool:
        """Do one round; return whether anything has happened."""
        has_moved = self._end(self.executor.collect(0.0))
        for turn in self._put_off.take():
            self.source.renew(turn)
            self._ready.append(turn)
        self._take()
        if self._is_time_to_begin():
            self._begin()
            has_moved = True
        if has_moved or (self._answered and not self._stores_most):
            self._rest_s = _SHORTEST_REST_S
            return True
        if self._under_way:
            self._end(self.executor.collect(self._rest_s))
            self._rest_s = min(2 * self._rest_s, _LONGEST_REST_S)
        return False

    def is_drained(self) -> bool:
        """Whether nothing is left to do, here or elsewhere."""
        is_unsent = self.sender is not None and self.sender.is_unsent
        if self._arrived or self._in_flight or is_unsent:
            return False
        return self.source.is_empty()

    def finish(self, grace_s: float) -> None:
        """Take nothing more; let running handlers end within that time, and what they have sent be
        sent.
        """
        self.executor.stop()
        left_s, until = grace_s, monotonic() + grace_s
        while self._under_way and left_s > 0:
            self._begin()
            is_to_store = self._answered and not self._stores_most
            self._end(self.executor.collect(0.0 if is_to_store else min(left_s, _IDLE_S)))
            left_s = until - monotonic()
        self._end(self.executor.collect(0.0))
        while self._batches:
            self._conclude()
            self._end(())
        if self.sender is not None:
            self.sender.close(max(0.0, until - monotonic()))

    def close(self) -> None:
        """Give back what has not ended, and free all threads. After an error, what has ended is
        stored, if that is possible.
        """
        self.executor.stop()
        if ended := [*self._answered, *self.executor.collect(0.0)]:
            self._have_stored(ended)
        self._storing.shutdown()
        over = {turn for _, turns in self._batches for turn in turns}
        if self.lifecycle is not None:
            # What runs longer than the grace time, and what has not begun. Claims in transactions
            # cannot be seen before the transactions end.
            left = [turn for turn in (*self._in_flight, *self._arrived) if turn not in over]
            if self.joins:
                left = [turn for turn in left if turn.claims_ahead]
            run_inline(self.lifecycle.give_back(self.lifecycle.sync_driver, left))
            self.sink.give_back(left)
        self.executor.close()
        if self.sender is not None:
            self.sender.close(0.0)

    @property
    def _under_way(self) -> int:
        """How many messages are being handled, or are about to."""
        return len(self._in_flight) - len(self._put_off)

    # ---- Taking and claiming -------------------------------------------------------------------

    def _take(self) -> None:
        under_way, arrived = self._under_way, len(self._arrived)
        free = self.executor.free(under_way + arrived)
        if free > 0:
            self._free_at = monotonic()
        elif self.gives_back and monotonic() - self._free_at > SLOW_S:
            self._give_back()
            return
        room = self.executor.room(under_way) - arrived
        # What is taken beside suspects would be delivered again, if one of them kills.
        if room > 0 and not (self._suspects or self._runs_alone):
            is_busy = under_way or arrived or self._answered
            self._arrived += self.source.take(room, free, 0.0 if is_busy else _IDLE_S)

    def _give_back(self) -> None:
        """Let what has not begun end here, where no handler has been free for long: another worker
        may have it.
        """
        waiting = [*self.executor.withdraw(), *self._enter()]
        for turn in waiting:
            if turn.ending is None and turn.refusal is None:
                turn.stopped(self.policy)
        self._answer(waiting)

    def _enter(self) -> list[T]:
        """Those that may begin now, of all that have not begun."""
        arrived, self._arrived = self._arrived, []
        self._in_flight.update(arrived)
        turns = [*self._suspects, *self._ready, *self.order.enter(arrived)]
        self._suspects.clear()
        self._ready.clear()
        self._begun += len(turns)
        return turns

    def _is_time_to_begin(self) -> bool:
        if self._suspects or self._runs_alone:
            return not self._begun
        if not (self._arrived or self._ready):
            return False
        is_full = self.executor.room(self._under_way) <= len(self._arrived)
        is_idle = self._under_way == len(self._ready)
        is_early = self.executor.is_behind or monotonic() < self._begin_at
        return is_full or is_idle or not is_early

    def _begin(self) -> None:
        """Claim what has arrived or is ready, or one suspect, and run what is granted."""
        if self._suspects and not self.executor.is_stopped:
            turns = [self._suspects.popleft()]
            turns[0].company = Company.ALONE
            self._begun += 1
            self._runs_alone = True
        else:
            turns = self._enter()
            self._begin_at = monotonic() + _GATHER_S
        if self.executor.is_stopped:
            self._answered += turns
            return
        self.order.keep(turns)
        asking: list[T] = []
        claiming: list[T] = []
        running: list[T] = []
        others: list[T] = []
        for turn in turns:
            is_over = turn.ending is not None or turn.refusal is not None
            (others if is_over else asking).append(turn)
            if not is_over and self._is_claimed_here(turn):
                claiming.append(turn)
        if self.lifecycle is not None and claiming:
            self._claim(self.lifecycle, claiming)
        for turn in asking:
            (running if self._is_to_run(turn) else others).append(turn)
        if running:
            self.executor.start(running)
        self._answer(others)

    def _is_claimed_here(self, turn: T) -> bool:
        """Whether its claim is committed before its handler begins. In a transactional consumer it
        is, where the message may have killed a worker, which would leave no trace; and of a retry,
        which costs no more than that.
        """
        is_alone = turn.company is Company.ALONE
        turn.claims_ahead = self.joins and (is_alone or turn.taken is not None)
        return turn.claims_ahead or not self.joins

    def _claim(self, lifecycle: Lifecycle, turns: Sequence[T]) -> None:
        """Claim all, and repeat that until the store answers. If this is stopped before that, the
        turns have no answer.
        """
        while not self.stop.is_set():
            try:
                run_inline(lifecycle.claim(lifecycle.sync_driver, turns))
            except AWAY as error:
                lifecycle.outage.met(error, "claims")
                clock.wait(self.stop, PAUSE_S)
            else:
                lifecycle.outage.over("claims")
                return

    def _is_to_run(self, turn: T) -> bool:
        if turn.refusal is not None or turn.is_duplicate:
            return self.runs_all and not turn.is_suspect
        return turn.is_to_run or (self.joins and not turn.claims_ahead)

    def _answer(self, turns: Sequence[T]) -> None:
        """Let these turns end: their handlers have run, or will not. Suspects begin anew, alone."""
        for turn in turns:
            if turn.is_suspect and not self.executor.is_stopped:
                turn.begins_anew()
                self._suspects.append(turn)
                self._begun -= 1
            else:
                self._answered.append(turn)

    # ---- Ending --------------------------------------------------------------------------------

    def _end(self, turns: Sequence[T]) -> bool:
        """Have the ends of these turns and of others stored, and conclude those that are stored;
        return whether there were any.
        """
        if turns:
            self._free_at = monotonic()
        self._answer(turns)
        has_moved = False
        while self._batches and self._batches[0][0].done():
            self._conclude()
            has_moved = True
        # Else they wait here: the loop goes on while the store is away, and if it ends they are
        # stored by `close`.
        if self._answered and not self._stores_most:
            ended, self._answered = self._answered, []
            self._have_stored(ended)
            self.executor.learn(ended)
            has_moved = True
        return has_moved

    @property
    def _stores_most(self) -> bool:
        return len(self._batches) >= _MOST_STORING

    def _have_stored(self, ended: Sequence[T]) -> None:
        future = self._storing.submit(self._store, ended)
        self._batches.append((future, ended))
        future.add_done_callback(self.executor.ring)

    def _store(self, turns: Sequence[T]) -> Sequence[T]:
        """Store the ends of these, and the messages that did not run and must wait; acknowledge
        all but those that are put off. Return these.
        """
        lifecycle = self.lifecycle
        if lifecycle is not None:
            run_inline(lifecycle.store(lifecycle.sync_driver, turns))
            # Dead letters that were not stored with their end, and what waits.
            if kept := [turn for turn in turns if turn.waits or turn.is_dead_unheard]:
                left = run_inline(lifecycle.put_aside(lifecycle.sync_driver, kept))
                for turn in kept:
                    turn.waits = turn not in left
        for turn in turns:
            ending = turn.ending or turn.ended(self.policy, is_stopping=self.stop.is_set())
            self.sink.count(turn, ending)
        if self.sender is not None:
            self.sender.send_of(turns)
        reached("before_acknowledge")
        return self.sink.acknowledge(turns)

    def _conclude(self) -> None:
        """Wait for the first batch that is being stored, and make ready what stood behind it.
        Raises the error with which storing it has ended.
        """
        future, turns = self._batches[0]
        put_off, now = future.result(), monotonic()
        self._batches.popleft()
        self._begun -= len(turns)
        self._runs_alone = self._runs_alone and self._begun > 0
        for turn in put_off:
            verdict = None if turn.ending is None else turn.ending.verdict
            self._put_off.add(now + (verdict.delay_s if isinstance(verdict, Delay) else 0.0), turn)
        done = [turn for turn in turns if turn not in put_off] if put_off else turns
        self._in_flight.difference_update(done)
        self._ready += self.order.leave(done)
        self.on_concluded()
