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
from oncely.consuming.outages import Outage
from oncely.consuming.put_off import FirstSeen, PutOff
from oncely.consuming.retries import Retries
from oncely.consuming.running import AsyncRunning, Parts, Running, RunningTogether
from oncely.consuming.sending import Sending
from oncely.consuming.stages import Stage
from oncely.consuming.turn import DeliveryTurn
from oncely.consuming.window_claims import Claims, MetadataOf
from oncely.core.errors import (
    BrokerRefused,
    MessageError,
    StoreError,
    TransportError,
)
from oncely.core.message import Message
from oncely.core.policy import Policy
from oncely.core.record import Key
from oncely.core.rules import AFTER_DOUBT, BEHIND, GIVEN_BACK, after_unknown
from oncely.core.verdicts import (
    Ack,
    Counted,
    Delay,
    Ending,
    Phase,
    Refuse,
    Requeue,
    SetAside,
    Settlement,
    Told,
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
_ENDLESS_HOLD_S = 300.0
"""For how long nobody else is given what was taken, where claims have no end."""
_LEARNS = 0.3
"""How much of what is known of the pace gives way to what was seen last."""
_GROWS = 4
_UNTRIED = 64
"""The largest window of whoever has seen only duplicates lately: what is new may take long."""
_QUICK_S = 0.2
"""A handler that takes less is not waited for by others that could begin elsewhere."""
_WINDOW_S = 0.1
"""What is claimed together is handled in about that time: a killed process leaves no more than that
in doubt, and others find work while a slow handler runs."""

Listener = Callable[[Any, Message], Any]


@dataclass(slots=True, kw_only=True)
class ConsumerSettings:
    """How a consumer consumes."""

    name: str
    """Of the consumer."""
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
        self._drains = False
        self._pace = _Pace(settings)
        self._lanes = Lanes(is_ordered=settings.is_ordered)
        self._arrived: list[Delivery] = []
        """What is not claimed yet."""
        self._begin_at = 0.0
        """`time.monotonic()` when what has arrived or is ready waits for no more."""
        self._in_flight: set[DeliveryTurn] = set()
        self._ready: list[DeliveryTurn] = []
        """What stood behind others, or was put off, and can run now."""
        self._put_off = PutOff()
        self._answered: list[DeliveryTurn] = []
        """Of what nothing runs: it ends with what has run."""
        self._has_received = False
        self._rest_s = _SHORTEST_REST_S
        self._unknown = FirstSeen()
        handling = self._parts.handling
        self._broker = Outage("broker", settings.queue)
        self._store_outage = Outage("store", settings.queue)
        self._claims: Claims | None = None
        self._retries: Retries | None = None
        self._sending: Sending | None = None
        if handling is not None:
            is_async_ = self._parts.are_async
            calls = SteadyLedger(handling.ledger) if is_async_ else InlineCalls(handling.ledger)
            outage = self._store_outage
            self._claims = Claims(handling, settings.metadata_of, calls, stop, outage)
        if handling is not None and handling.keeping is not None:
            mailbox = handling.ledger.mailbox
            hold_s = handling.lease_s or _ENDLESS_HOLD_S
            self._retries = Retries(mailbox, handling.keeping, hold_s, self._store_outage)
            relay = Relay(handling.ledger, transport, hold=_HOLD)
            self._sending = Sending(relay, mailbox, handling.consumer)
        self._place = _place(self._parts, settings.concurrency)
        self._storing = Stage("oncely-storing", self._store, self._place.ring)
        self._settling = Stage("oncely-settling", self._settle, lambda: None)

    # ---- The way of the whole ------------------------------------------------------------------

    def run(self, *, drain: bool) -> ConsumerReport:
        """Until it is told to stop or, to `drain`, until nothing waits, is put off or in flight."""
        self._drains = drain
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
            if self._sending is not None:
                self._sending.close(0.0)
            self._transport.close()
        return self.report

    def _go_on(self) -> bool:
        """Whether anything has happened."""
        ended = self._end(self._place.collect(0.0))
        self._again(self._put_off.due())
        self._receive()
        has_begun = self._begin_gathered()
        if ended or has_begun or self._answered:
            self._rest_s = _SHORTEST_REST_S
            return True
        if self._under_way:
            self._end(self._place.collect(self._rest_s))
            self._rest_s = min(2 * self._rest_s, _LONGEST_REST_S)
        return False

    def _receive(self) -> None:
        room = self._pace.room(self._under_way) - len(self._arrived)
        if self._retries is not None and self._retries.are_due():
            # What is due goes first; until a handler is free, another worker may take it.
            most = min(room, self._pace.free(self._under_way + len(self._arrived)))
            if most <= 0:
                return
            taken = self._retries.take(self._settings.queue, most)
            self._arrived += taken
            room -= len(taken)
        if room <= 0:
            return
        wait_s = 0.0 if self._under_way or self._arrived or self._answered else _IDLE_S
        try:
            deliveries = self._transport.receive(self._settings.queue, room, wait_s)
        except TransportError as error:
            if not self._has_received:
                raise
            # It was there, and will be again.
            self._broker.met(error)
            self._stop.wait(_AWAY_S)
            return
        self._broker.over()
        self._has_received = True
        self._arrived += deliveries

    @property
    def _under_way(self) -> int:
        """How many messages are being handled, or are about to."""
        return len(self._in_flight) - len(self._put_off)

    def _again(self, turns: Sequence[DeliveryTurn]) -> None:
        """Let these run that were put off."""
        for turn in turns:
            was_tried = turn.ending is not None and turn.ending.counted is Counted.RETRIED
            turn.deliveries += was_tried
            self.report.received += was_tried
            turn.start_over()
            if turn.handler is _never:
                turn.ending = GIVEN_BACK
                self._answered.append(turn)
                continue
            self._prepare(turn)
            self._ready.append(turn)

    def _begin_gathered(self) -> bool:
        """Begin what has arrived, and what is ready, unless it is to wait for more."""
        if not (self._arrived or self._ready):
            return False
        is_full = self._pace.room(self._under_way) <= len(self._arrived)
        is_idle = self._under_way == len(self._ready)
        if not (is_full or is_idle) and time.monotonic() < self._begin_at:
            return False
        self._begin()
        self._begin_at = time.monotonic() + _GATHER_S
        return True

    def _is_drained(self) -> bool:
        if self._in_flight or (self._sending is not None and self._sending.is_unsent):
            return False
        self._settling.wait()
        if self._retries is not None and not self._retries.are_none():
            return False
        try:
            return self._transport.is_drained(self._settings.queue)
        except TransportError as error:
            self._broker.met(error)
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
        while self._under_way and left_s > 0:
            self._begin()
            self._end(self._place.collect(0.0 if self._answered else min(left_s, _IDLE_S)))
            left_s = until - time.monotonic()
        self._end(self._place.collect(0.0))
        self._conclude(self._storing.wait())
        if self._sending is not None:
            self._sending.close(max(0.0, until - time.monotonic()))
            self.report.deferred_sent = self._sending.sent

    def _give_back(self) -> None:
        """Release what runs longer than that, and what has not begun."""
        # Claims in transactions are not to be seen before these end.
        if self._claims is None or self._parts.begins is not None:
            return
        left = [*self._in_flight]
        self._claims.give_back(left)
        self._settle_taken([turn for turn in left if turn.taken is not None])

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
        self._prepare(turn)
        return turn

    def _prepare(self, turn: DeliveryTurn) -> None:
        """Find out what is known of a message before anybody is asked."""
        if turn.delivery.problem is not None:
            turn.refusal = MessageError(turn.delivery.problem)
            return
        if self._claims is not None:
            self._claims.prepare(turn)
        if turn.handler is _never:
            self._wait_for_a_handler(turn)
        elif self._claims is None:
            turn.begun = Untracked(turn.message)

    def _wait_for_a_handler(self, turn: DeliveryTurn) -> None:
        """Of a type that nobody here takes: others may."""
        error = UnhandledError(f"nothing here takes messages of the type {turn.message.type!r}")
        waited_s = self._unknown.ago(turn.message.id)
        if turn.taken is not None:
            waited_s = (turn.taken.due or 0.0) - (turn.taken.since or 0.0)
        ending = after_unknown(self._settings.policy, error, waited_s, drains=self._drains)
        if isinstance(ending.verdict, SetAside):
            turn.refusal = error
        else:
            turn.ending = ending
            turn.waits = self._retries is not None

    def _start(self, turns: Sequence[DeliveryTurn]) -> Sequence[DeliveryTurn]:
        """Let these run, as far as they are granted; return those of which nothing runs."""
        if self._place.is_stopped:
            return turns
        self._keep_order(turns)
        asking = [turn for turn in turns if turn.ending is None and turn.refusal is None]
        if self._claims is not None and self._parts.begins is None and asking:
            self._claims.begin(asking)
        running = [turn for turn in asking if self._is_to_run(turn)]
        if running:
            self._place.start(running)
        if len(running) == len(turns):
            return []
        started = set(running)
        return [turn for turn in turns if turn not in started]

    def _keep_order(self, turns: Sequence[DeliveryTurn]) -> None:
        """Let those wait in the ledger that stand there behind another of their order."""
        new = [turn for turn in turns if turn.taken is None and turn.ending is None]
        if self._retries is None or not self._settings.is_ordered:
            return
        try:
            lanes = self._retries.lanes(new)
        except StoreError as error:
            self._store_outage.met(error)
            for turn in new:
                turn.ending = AFTER_DOUBT
            return
        for turn in new:
            if self._retries.lane_of(turn) in lanes:
                turn.ending, turn.waits = BEHIND, True

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
            turn.ending = ending = turn.ending or self._ending(turn)
            self._count(turn, ending)
        self._send_deferred(turns)
        reached("before_acknowledge")
        put_off = [turn for turn in turns if self._is_put_off(turn)]
        done = [turn for turn in turns if turn not in put_off] if put_off else turns
        self._put_off.add(put_off)
        self._settling.put(done)
        self._settling.collect()
        self._in_flight.difference_update(done)
        self._ready += self._lanes.leave(done)
        if self._retries is not None:
            self._retries.expect(done)
        self._on_progress(self.report)

    def _is_put_off(self, turn: DeliveryTurn) -> bool:
        """Whether it stays here, unacknowledged, until it is tried again."""
        is_delayed = turn.ending is not None and isinstance(turn.ending.verdict, Delay)
        return is_delayed and turn.taken is None and not self._is_kept(turn)

    def _is_kept(self, turn: DeliveryTurn) -> bool:
        """Whether the ledger has it, as what waits or as a dead letter."""
        if self._retries is None or turn.ending is None:
            return False
        told, verdict, _ = turn.ending
        is_told = told in (Told.FAILED, Told.EXHAUSTED)
        return turn.waits or is_told or isinstance(verdict, SetAside)

    def _settle(self, turns: Sequence[DeliveryTurn]) -> None:
        verdicts = [(turn.delivery, self._verdict(turn)) for turn in turns if turn.taken is None]
        self._settle_taken([turn for turn in turns if turn.taken is not None])
        try:
            if verdicts:
                self._transport.settle(verdicts)
        except (TransportError, BrokerRefused):
            # They come again, and the ledger knows them.
            _log.warning("settling_failed", exc_info=True, extra={"count": len(verdicts)})

    def _settle_taken(self, turns: Sequence[DeliveryTurn]) -> None:
        if not turns or self._retries is None:
            return
        try:
            self._retries.settle(turns)
        except StoreError:
            _log.warning("settling_failed", exc_info=True, extra={"count": len(turns)})

    def _verdict(self, turn: DeliveryTurn) -> Settlement:
        """What becomes of a delivery."""
        verdict = turn.ending.verdict if turn.ending else Requeue()
        if self._is_kept(turn) or isinstance(verdict, Ack):
            return Ack()
        return Refuse(verdict.reason) if isinstance(verdict, SetAside) else Requeue()

    def _ending(self, turn: DeliveryTurn) -> Ending:
        is_stopping = self._stop.is_set()
        return ending_of(turn, self._settings.policy, is_stopping=is_stopping)

    def _count(self, turn: DeliveryTurn, ending: Ending) -> None:
        report, error = self.report, turn.error or turn.refusal
        report.dead_lettered += isinstance(ending.verdict, SetAside)
        match ending.counted:
            case Counted.HANDLED:
                report.handled += 1
            case Counted.DUPLICATE:
                report.duplicates += 1
            case Counted.RETRIED:
                report.retried += 1
                self._tell(self._settings.on_retry, error, turn, "handler_failed")
            case Counted.FAILED | Counted.REJECTED:
                report.failed += 1
                self._tell(self._settings.on_failed, error, turn, "handler_failed")
            case Counted.SET_ASIDE:
                self._tell((), error, turn, "refused")

    def _tell(
        self,
        listeners: Iterable[Listener],
        error: BaseException | None,
        turn: DeliveryTurn,
        event: str,
    ) -> None:
        verdict = turn.ending.verdict if turn.ending else None
        told: dict[str, Any] = {
            "message_id": turn.message.id,
            "consumer": self._settings.name,
            "queue": self._settings.queue,
            "type": turn.message.type,
            "attempt": turn.deliveries if turn.held is None else turn.held.claim.attempts,
            "next_try_in_s": verdict.delay_s if isinstance(verdict, Delay) else None,
        }
        _log.warning(event, exc_info=error, extra=told)
        for listener in listeners:
            try:
                listener(error, turn.message)
            except Exception:  # noqa: BLE001 - what a listener raises is no fault of the message.
                _log.exception("listener_failed")

    def _send_deferred(self, turns: Sequence[DeliveryTurn]) -> None:
        if self._sending is None:
            return
        self.report.deferred_sent = self._sending.sent
        if keys := [key for turn in turns if (key := self._sent_by(turn)) is not None]:
            self._sending.send(keys)

    def _sent_by(self, turn: DeliveryTurn) -> Key | None:
        """Under which the ledger has what a turn has left to be sent, where it may have any."""
        keeping = self._parts.handling and self._parts.handling.keeping
        is_dead = turn.ending is not None and isinstance(turn.ending.verdict, SetAside)
        if keeping and is_dead and keeping.error_queue is not None:
            return keeping.key_of(turn)
        return turn.key if turn.may_have_sent else None


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
        self._ended_at = -math.inf
        """`time.monotonic()` when a quick one has ended last."""

    def learn(self, turns: Sequence[DeliveryTurn]) -> None:
        """What these have taken."""
        if any(turn.took_s < _QUICK_S for turn in turns):
            self._ended_at = time.monotonic()
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

    def free(self, in_flight: int) -> int:
        """How many more would begin soon: as many as handlers are idle; where they come to their
        ends quickly, any number.
        """
        are_quick = time.monotonic() - self._ended_at < _QUICK_S
        return self._settings.window if are_quick else self._settings.concurrency - in_flight

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
