"""Consuming: takes deliveries in windows, lets their turns run, and settles them."""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from oncely._util.crash_points import reached
from oncely.async_ledger import SteadyLedger
from oncely.consuming.consumer_report import ConsumerReport
from oncely.consuming.executors import Executor, LoopExecutor, ThreadExecutor
from oncely.consuming.lanes import Lanes
from oncely.consuming.relaying import Deferred
from oncely.consuming.running import AsyncRunning, Parts, Running, RunningTogether
from oncely.consuming.stages import Stage
from oncely.consuming.turn import DeliveryTurn
from oncely.consuming.window_claims import Claims, MetadataOf
from oncely.core.errors import BrokerRefused, MessageError, TransportError, describe
from oncely.core.message import Message
from oncely.core.policy import Policy
from oncely.core.verdicts import (
    Counted,
    DeadLetter,
    Delay,
    Ending,
    Phase,
    Told,
    Verdict,
)
from oncely.engine.inline_calls import InlineCalls
from oncely.lifecycle.handling import ending_of
from oncely.lifecycle.held_message import Untracked
from oncely.lifecycle.turn import Kept
from oncely.middleware.chain import Stoppable
from oncely.outbox import Relay
from oncely.transports.transport import Delivery, Transport

_log = logging.getLogger(__name__)

_IDLE_S = 0.1
"""How long to wait for a delivery where none is being handled."""
_SHORTEST_REST_S = 0.002
_LONGEST_REST_S = 0.05
"""How long to wait for a handler's end before deliveries are looked for again."""
_GATHER_S = 0.005
"""How long fewer deliveries than a window wait for others, while there is something else to do: a
claiming, and a storing, cost nearly the same for one as for many."""
_AWAY_S = 1.0
_HOLD = timedelta(seconds=10)
"""For what a consumer sends: after a failure it is sent again when that is over."""
_LEARNS = 0.3
"""How much of what is known of the pace gives way to what was seen last."""
_GROWS = 4
_UNTRIED = 64
"""The largest window of whoever has seen only duplicates lately: what is new may take long."""
_WINDOW_S = 0.1
"""What is claimed together is handled in about that time: a killed process leaves no more than that
in doubt, and others find work while a slow handler runs."""

Listener = Callable[[Any, Message], Any]


@dataclass(slots=True, kw_only=True)
class ConsumerSettings:
    """How a consumer consumes."""

    queue: str
    parts: Parts
    policy: Policy
    metadata_of: MetadataOf | None
    on_retry: Sequence[Listener]
    on_failed: Sequence[Listener]
    concurrency: int
    window: int
    grace_s: float
    is_ordered: bool


class Consuming:
    """One consumer at work, from start to end."""

    def __init__(
        self,
        settings: ConsumerSettings,
        transport: Transport,
        stop: threading.Event,
        on_progress: Callable[[ConsumerReport], None],
    ) -> None:
        self.report = ConsumerReport()
        self._settings = settings
        self._parts = settings.parts.for_one_run(stop, settings.grace_s)
        self._transport = transport
        self._stop = stop
        self._on_progress = on_progress
        self._pace = _Pace(settings)
        self._lanes = Lanes(is_ordered=settings.is_ordered)
        self._arrived: list[Delivery] = []
        """What is not claimed yet."""
        self._begin_at = 0.0
        """`time.monotonic()` when what has arrived or is ready waits for no more."""
        self._in_flight: set[DeliveryTurn] = set()
        self._ready: list[DeliveryTurn] = []
        """What stood behind others, and can run now."""
        self._answered: list[DeliveryTurn] = []
        """Of what nothing runs: it ends with what has run."""
        self._has_received = False
        self._rest_s = _SHORTEST_REST_S
        handling = self._parts.handling
        self._claims: Claims | None = None
        self._deferred: Deferred | None = None
        if handling is not None:
            is_async_ = self._parts.are_async
            calls = SteadyLedger(handling.ledger) if is_async_ else InlineCalls(handling.ledger)
            self._claims = Claims(handling, settings.metadata_of, calls, stop)
            if handling.ledger.can_defer:
                self._deferred = Deferred(Relay(handling.ledger, transport, hold=_HOLD))
        self._place = _place(self._parts, settings.concurrency)
        self._storing = Stage("oncely-storing", self._store, self._place.ring)
        self._settling = Stage("oncely-settling", self._settle, lambda: None)
        self._unsettled: list[tuple[Delivery, Verdict]] = []
        """What the broker did not take of what is delayed or dead: such a delivery stays ours for
        as long as we are connected."""
        self._settle_again_at = 0.0

    # ---- The way of the whole ------------------------------------------------------------------

    def run(self, *, drain: bool) -> ConsumerReport:
        """Until it is told to stop or, to `drain`, until nothing waits, is delayed or in flight."""
        try:
            while not self._stop.is_set():
                has_moved = self._go_on()
                if drain and not has_moved and self._is_drained():
                    break
            self._wait_for_the_rest()
        finally:
            self._place.stop()
            self._storing.close()
            self._give_back()
            self._place.close()
            self._settling.close()
            self._transport.close()
        return self.report

    def _go_on(self) -> bool:
        """Whether anything has happened."""
        ended = self._end(self._place.collect(0.0))
        self._receive()
        has_begun = self._begin_gathered()
        if ended or has_begun or self._answered:
            self._rest_s = _SHORTEST_REST_S
            return True
        if self._in_flight:
            self._end(self._place.collect(self._rest_s))
            self._rest_s = min(2 * self._rest_s, _LONGEST_REST_S)
        if self._deferred is not None:
            self.report.deferred_sent += self._deferred.send_again()
        is_due = time.monotonic() >= self._settle_again_at
        # One more beside what is under way might have to wait for a broker that is slow to refuse.
        if self._unsettled and is_due and self._settling.is_idle:
            self._settling.put([])
        return False

    def _receive(self) -> None:
        room = self._pace.room(len(self._in_flight)) - len(self._arrived)
        if room <= 0:
            return
        wait_s = 0.0 if self._in_flight else _IDLE_S
        try:
            deliveries = self._transport.receive(self._settings.queue, room, wait_s)
        except TransportError as error:
            if not self._has_received:
                raise
            # It was there, and will be again.
            _log.warning("broker_is_away", extra={"error": describe(error)})
            self._stop.wait(_AWAY_S)
            return
        self._has_received = True
        self._arrived += deliveries

    def _begin_gathered(self) -> bool:
        """Begin what has arrived, and what is ready, unless it is to wait for more."""
        if not (self._arrived or self._ready):
            return False
        is_full = self._pace.room(len(self._in_flight)) <= len(self._arrived)
        is_idle = len(self._in_flight) == len(self._ready)
        if not (is_full or is_idle) and time.monotonic() < self._begin_at:
            return False
        self._begin()
        self._begin_at = time.monotonic() + _GATHER_S
        return True

    def _is_drained(self) -> bool:
        if self._in_flight or (self._deferred is not None and self._deferred.is_unsent):
            return False
        self._settling.wait()
        if self._unsettled:
            return False
        try:
            return self._transport.is_drained(self._settings.queue)
        except TransportError as error:
            _log.warning("broker_is_away", extra={"error": describe(error)})
            return False

    def _wait_for_the_rest(self) -> None:
        """Let what runs come to its end, for the time of grace."""
        self._place.stop()
        middlewares: Iterable[Any] = (*self._parts.outer, *self._parts.inner)
        for middleware in middlewares:
            if isinstance(middleware, Stoppable):
                middleware.stop()
        left_s = self._settings.grace_s
        until = time.monotonic() + left_s
        while self._in_flight and left_s > 0:
            self._begin()
            self._end(self._place.collect(0.0 if self._answered else min(left_s, _IDLE_S)))
            left_s = until - time.monotonic()
        self._end(self._place.collect(0.0))
        self._conclude(self._storing.wait())

    def _give_back(self) -> None:
        """Release what runs longer than that, and what has not begun."""
        # Claims in transactions are not to be seen before these end.
        if self._claims is not None and self._parts.begins is None:
            self._claims.give_back([*self._in_flight])

    # ---- Beginning -----------------------------------------------------------------------------

    def _begin(self) -> None:
        turns = [self._turn(delivery) for delivery in self._arrived]
        self._arrived.clear()
        self.report.received += len(turns)
        self._in_flight.update(turns)
        ready, self._ready = [*self._ready, *self._lanes.enter(turns)], []
        self._answered += self._start(ready)

    def _turn(self, delivery: Delivery) -> DeliveryTurn:
        handler = self._parts.handlers.of(delivery.message.type)
        turn = DeliveryTurn(delivery, handler or _never)
        if handler is None:
            turn.refusal = UnhandledError(
                f"nothing here takes messages of the type {delivery.message.type!r}"
            )
        elif self._claims is not None:
            self._claims.prepare(turn)
        else:
            turn.begun = Untracked(delivery.message)
        return turn

    def _start(self, turns: Sequence[DeliveryTurn]) -> Sequence[DeliveryTurn]:
        """Let these run, as far as they are granted; return those of which nothing runs."""
        if self._place.is_stopped:
            return turns
        asking = [turn for turn in turns if turn.put_off_s is None and turn.refusal is None]
        if self._claims is not None and self._parts.begins is None and asking:
            self._claims.begin(asking)
        running = [turn for turn in asking if self._is_to_run(turn)]
        if running:
            self._place.start(running)
        if len(running) == len(turns):
            return []
        started = set(running)
        return [turn for turn in turns if turn not in started]

    def _is_to_run(self, turn: DeliveryTurn) -> bool:
        parts = self._parts
        if turn.refusal is not None or isinstance(turn.begun, Kept):
            return bool(parts.outer)
        return turn.begun is not None or parts.begins is not None

    # ---- Ending --------------------------------------------------------------------------------

    def _end(self, turns: Sequence[DeliveryTurn]) -> bool:
        """Have stored how these and what else has ended, and conclude what is stored; whether
        there was anything.
        """
        ended, self._answered = [*self._answered, *turns], []
        if ended:
            self._pace.learn(ended)
            self._storing.put(ended)
        stored = self._storing.collect()
        self._conclude(stored)
        return bool(ended or stored)

    def _store(self, turns: Sequence[DeliveryTurn]) -> None:
        if self._claims is not None:
            self._claims.end(turns)

    def _conclude(self, turns: Sequence[DeliveryTurn]) -> None:
        """Settle these, and make ready what stood behind them."""
        if not turns:
            return
        for turn in turns:
            turn.ending = ending = self._ending(turn)
            self._lanes.note(turn, ending.verdict)
            self._count(turn, ending)
        self._send_deferred(turns)
        reached("before_acknowledge")
        self._settling.put(turns)
        self._settling.collect()
        self._in_flight.difference_update(turns)
        self._ready += self._lanes.leave(turns)
        self._on_progress(self.report)

    def _settle(self, turns: Sequence[DeliveryTurn]) -> None:
        settled = ((turn.delivery, turn.ending.verdict) for turn in turns if turn.ending)
        verdicts = [*self._unsettled, *settled]
        try:
            self._transport.settle(verdicts)
            self._unsettled = []
        except (TransportError, BrokerRefused):
            # Where the connection is lost the broker redelivers them, and the ledger knows them.
            self._unsettled = [
                (delivery, verdict)
                for delivery, verdict in verdicts
                if isinstance(verdict, Delay | DeadLetter)
            ]
            self._settle_again_at = time.monotonic() + _AWAY_S
            _log.warning("settling_failed", exc_info=True, extra={"count": len(verdicts)})

    def _ending(self, turn: DeliveryTurn) -> Ending:
        if turn.put_off_s is not None:
            return Ending(Told.NOTHING, Delay(turn.put_off_s), Counted.GIVEN_BACK)
        if turn.ending is not None:
            return turn.ending
        is_stopping = self._stop.is_set()
        return ending_of(turn, self._settings.policy, is_stopping=is_stopping)

    def _count(self, turn: DeliveryTurn, ending: Ending) -> None:
        report, error = self.report, turn.error or turn.refusal
        report.dead_lettered += isinstance(ending.verdict, DeadLetter)
        match ending.counted:
            case Counted.HANDLED:
                report.handled += 1
            case Counted.DUPLICATE:
                report.duplicates += 1
            case Counted.RETRIED:
                report.retried += 1
                self._tell(self._settings.on_retry, error, turn.message)
            case Counted.FAILED | Counted.REJECTED:
                report.failed += 1
                self._tell(self._settings.on_failed, error, turn.message)

    def _tell(
        self, listeners: Iterable[Listener], error: BaseException | None, message: Message
    ) -> None:
        _log.warning("handler_failed", exc_info=error, extra={"id": message.id})
        for listener in listeners:
            try:
                listener(error, message)
            except Exception:  # noqa: BLE001 - what a listener raises is no fault of the message.
                _log.exception("listener_failed")

    def _send_deferred(self, turns: Sequence[DeliveryTurn]) -> None:
        keys = [turn.key for turn in turns if turn.key is not None and turn.may_have_sent]
        if self._deferred is not None and keys:
            self.report.deferred_sent += self._deferred.send(keys)


class UnhandledError(MessageError):
    """No handler takes a message of that type."""


class _Pace:
    """How many turns to take on, by how long they have lately taken."""

    def __init__(self, settings: ConsumerSettings) -> None:
        self._settings = settings
        self._turn_s: float | None = None
        """Of one turn."""
        self._window = settings.concurrency
        """How many are claimed together."""

    def learn(self, turns: Sequence[DeliveryTurn]) -> None:
        """What these have taken."""
        took = [turn.took_s for turn in turns if turn.phase > Phase.WAITING]
        if not took:
            self._widen(min(self._settings.window, _UNTRIED))
            return
        mean_s = sum(took) / len(took)
        before_s = mean_s if self._turn_s is None else self._turn_s
        self._turn_s = before_s + _LEARNS * (mean_s - before_s)
        settings = self._settings
        fitting = math.ceil(settings.concurrency * _WINDOW_S / max(self._turn_s, 1e-6))
        if fitting > self._window:
            self._widen(min(settings.window, fitting))
        else:
            self._window = max(settings.concurrency, fitting)

    def _widen(self, most: int) -> None:
        # Slowly: the first may not be like the others.
        self._window = max(self._window, min(most, _GROWS * self._window))

    def room(self, in_flight: int) -> int:
        """How many more may come."""
        return min(self._window, 2 * self._window - in_flight)


def _place(parts: Parts, concurrency: int) -> Executor:
    if parts.are_async:
        return LoopExecutor(AsyncRunning(parts).run, concurrency)
    running = RunningTogether(parts) if parts.is_together else Running(parts)
    if parts.begins is None or parts.handling is None:
        return ThreadExecutor(running.run, concurrency)
    return ThreadExecutor(running.run, concurrency, running.run_together)


def _never(_: Message) -> None:
    raise AssertionError("what nothing takes is not run")
