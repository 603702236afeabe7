"""Consuming: receives deliveries in windows, runs their handlers, and settles them."""

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from oncely._util.clock import monotonic
from oncely._util.crash_points import reached
from oncely._util.later import Later
from oncely.consuming.acknowledger import Acknowledger
from oncely.consuming.consumer_report import ConsumerReport
from oncely.consuming.executors import Executor, LoopExecutor, ThreadExecutor
from oncely.consuming.health import BrokerOutage, Pulse
from oncely.consuming.lanes import Lanes
from oncely.consuming.pace import Pace
from oncely.consuming.retries import Retries
from oncely.consuming.running import AsyncRunning, Running, RunningTogether
from oncely.consuming.sending import Sending
from oncely.consuming.settings import ConsumerSettings
from oncely.consuming.stages import Stage
from oncely.consuming.telling import tell
from oncely.consuming.turn import DeliveryTurn
from oncely.consuming.window_claims import Claims
from oncely.core.errors import MessageError, TransportError
from oncely.core.turn import GIVEN_BACK, after_unknown
from oncely.core.verdicts import Counted, DeadLetter, Delay
from oncely.lifecycle.claim_keeper import store_outage
from oncely.lifecycle.results import Serializer
from oncely.middleware.chain import Stoppable
from oncely.outbox import Relay
from oncely.transports.transport import Delivery, Transport

_IDLE_S = 0.1
"""How long to wait for a delivery if none is being handled."""
_SHORTEST_REST_S = 0.002
_LONGEST_REST_S = 0.05
"""How long to wait for a handler to end before receiving again."""
_GATHER_S = 0.005
"""How long a partial window waits for more deliveries, while there is other work: to claim and to
store many messages costs nearly the same as for one."""
_AWAY_S = 1.0
_HOLD = timedelta(seconds=10)
"""After a failure to send, the consumer sends its deferred messages again after this time."""
_ENDLESS_HOLD_S = 300.0
"""For how long no other worker is given the messages taken, if claims have no lease."""
_MOST_UNKNOWN = 10_000
"""Messages of unknown types whose first delivery is remembered; the oldest are forgotten."""


class UnhandledError(MessageError):
    """No handler takes a message of that type."""


class Consuming:
    """One consumer at work, from start to end, over a transport that has subscribed.

    With `drain` it ends when nothing is waiting, delayed or in flight. `pulse` records whether
    the broker can be reached.
    """

    def __init__(
        self,
        settings: ConsumerSettings,
        transport: Transport,
        stop: threading.Event,
        on_progress: Callable[[ConsumerReport], None],
        pulse: Pulse,
        *,
        drains: bool,
    ) -> None:
        self.report = ConsumerReport()
        outage = store_outage(queue=settings.queue)
        if settings.lifecycle is not None:
            own = replace(settings.lifecycle, stop=stop, grace_s=settings.grace_s, outage=outage)
            settings = replace(settings, lifecycle=own)
        self._settings = settings
        self._transport = transport
        self._stop = stop
        self._on_progress = on_progress
        self._drains = drains
        self._arrived: list[Delivery] = []
        """Turns that are not claimed yet."""
        self._begin_at = 0.0
        """`clock.monotonic()` at which the gathered turns begin, without waiting for more."""
        self._in_flight: set[DeliveryTurn] = set()
        self._ready: list[DeliveryTurn] = []
        """Turns that stood behind others, or were delayed, and can run now."""
        self._put_off: Later[DeliveryTurn] = Later()
        """Turns that are held here, unacknowledged, until their retry."""
        self._unknown: dict[str, float] = {}
        """When this process has first seen messages of types that no handler here takes."""
        self._answered: list[DeliveryTurn] = []
        """Turns whose handler does not run: they end together with those whose handler ran."""
        self._rest_s = _SHORTEST_REST_S
        self._pace = Pace(settings.concurrency, settings.window)
        self._lanes = Lanes(is_ordered=settings.is_ordered)
        self._broker = BrokerOutage(settings.queue, pulse)
        self._claims: Claims | None = None
        self._retries: Retries | None = None
        self._sending: Sending | None = None
        self._serializers: dict[int, Serializer] = {}
        """Of each handler, by its id, since it may not be hashable; empty if no result is kept."""
        if (lifecycle := settings.lifecycle) is not None:
            ledger = lifecycle.ledger
            ledger.check_privileges("worker")
            self._claims = Claims(settings, lifecycle, stop)
            if lifecycle.keeps_result:
                handlers = settings.handlers.all
                self._serializers = {id(each): lifecycle.serializer_of(each) for each in handlers}
            if lifecycle.retry_queue is not None:
                hold_s = lifecycle.lease_s or _ENDLESS_HOLD_S
                self._retries = Retries(ledger.mailbox, lifecycle.retry_queue, hold_s, outage)
                relay = Relay(ledger, transport, hold=_HOLD)
                self._sending = Sending(relay, ledger.mailbox, lifecycle.consumer)
        self._executor = _executor(settings)
        self._acknowledger = Acknowledger(transport, self._retries, stop)
        self._to_store = Stage("oncely-storing", self._store, self._executor.ring)
        self._to_acknowledge = Stage(
            "oncely-acknowledging", self._acknowledger.acknowledge, lambda: None
        )

    # ---- The main loop -------------------------------------------------------------------------

    def run(self) -> ConsumerReport:
        """Run until stopped or, with `drain`, until nothing is left."""
        try:
            while not self._stop.is_set():
                has_moved = self._go_on()
                if self._drains and not has_moved and self._is_drained():
                    break
            self._wait_for_the_rest()
        finally:
            self._executor.stop()
            self._to_store.close()
            # Claims in transactions cannot be seen before the transactions end.
            if self._claims is not None and self._settings.begins is None:
                # What runs longer than the grace time, and what has not begun.
                left = [*self._in_flight]
                self._claims.give_back(left)
                self._acknowledger.acknowledge([turn for turn in left if turn.taken is not None])
            self._executor.close()
            self._to_acknowledge.close()
            if self._sending is not None:
                self._sending.close(0.0)
            self._transport.close()
        return self.report

    def _go_on(self) -> bool:
        """Do one round; return whether anything has happened."""
        ended = self._end(self._executor.collect(0.0))
        self._again(self._put_off.take())
        self._receive()
        has_begun = self._begin_gathered()
        if ended or has_begun or self._answered:
            self._rest_s = _SHORTEST_REST_S
            return True
        if self._under_way:
            self._end(self._executor.collect(self._rest_s))
            self._rest_s = min(2 * self._rest_s, _LONGEST_REST_S)
        return False

    def _receive(self) -> None:
        room = self._pace.room(self._under_way) - len(self._arrived)
        if self._retries is not None and self._retries.are_due():
            # Retries that are due go first; until a handler is free, another worker may take them.
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
            # The broker was there when the consumer subscribed, and will be there again.
            self._broker.met(error)
            self._stop.wait(_AWAY_S)
            return
        self._broker.over()
        self._arrived += deliveries

    @property
    def _under_way(self) -> int:
        """How many messages are being handled, or are about to."""
        return len(self._in_flight) - len(self._put_off)

    def _again(self, turns: Sequence[DeliveryTurn]) -> None:
        """Let these delayed turns run again."""
        for turn in turns:
            was_tried = turn.ending is not None and turn.ending.counted is Counted.RETRIED
            turn.deliveries += was_tried
            self.report.received += was_tried
            turn.begins_anew()
            if turn.has_handler:
                self._prepare(turn)
                self._ready.append(turn)
            else:
                turn.ended_as(GIVEN_BACK)
                self._answered.append(turn)

    def _begin_gathered(self) -> bool:
        """Begin the turns that have arrived or are ready, unless they wait for more."""
        if not (self._arrived or self._ready):
            return False
        is_full = self._pace.room(self._under_way) <= len(self._arrived)
        is_idle = self._under_way == len(self._ready)
        is_early = self._executor.is_behind or monotonic() < self._begin_at
        if is_early and not (is_full or is_idle):
            return False
        self._begin()
        self._begin_at = monotonic() + _GATHER_S
        return True

    def _is_drained(self) -> bool:
        if self._in_flight or (self._sending is not None and self._sending.is_unsent):
            return False
        self._to_acknowledge.wait()
        if self._retries is not None and not self._retries.are_none():
            return False
        try:
            return self._transport.is_drained(self._settings.queue)
        except TransportError as error:
            self._broker.met(error)
            return False

    def _wait_for_the_rest(self) -> None:
        """Let running handlers end, within the grace time."""
        self._executor.stop()
        middlewares: Iterable[Any] = (*self._settings.outer, *self._settings.inner)
        for middleware in middlewares:
            if isinstance(middleware, Stoppable):
                middleware.stop()
        left_s = self._settings.grace_s
        until = monotonic() + left_s
        while self._under_way and left_s > 0:
            self._begin()
            self._end(self._executor.collect(0.0 if self._answered else min(left_s, _IDLE_S)))
            left_s = until - monotonic()
        self._end(self._executor.collect(0.0))
        self._conclude(self._to_store.wait())
        if self._sending is not None:
            self._sending.close(max(0.0, until - monotonic()))
            self.report.deferred_sent = self._sending.sent

    # ---- Beginning -----------------------------------------------------------------------------

    def _begin(self) -> None:
        handlers = self._settings.handlers
        turns = [DeliveryTurn(each, handlers.of(each.message.type)) for each in self._arrived]
        for turn in turns:
            self._prepare(turn)
        self._arrived.clear()
        self.report.received += len(turns)
        self._in_flight.update(turns)
        ready, self._ready = [*self._ready, *self._lanes.enter(turns)], []
        self._answered += self._start(ready)

    def _prepare(self, turn: DeliveryTurn) -> None:
        """Find out what is known of a message before it is claimed."""
        if turn.delivery.problem is not None:
            turn.refused(MessageError(turn.delivery.problem))
            return
        if self._claims is not None:
            self._claims.prepare(turn)
        if self._serializers and turn.has_handler:
            turn.serializer = self._serializers[id(turn.handler)]
        if not turn.has_handler and turn.refusal is None:
            self._wait_for_a_handler(turn)
        elif self._claims is None:
            turn.runs_untracked()

    def _wait_for_a_handler(self, turn: DeliveryTurn) -> None:
        """Let a message wait whose type no handler here takes: another worker may take it."""
        error = UnhandledError(f"nothing here takes messages of the type {turn.message.type!r}")
        now = monotonic()
        while len(self._unknown) > _MOST_UNKNOWN:
            del self._unknown[next(iter(self._unknown))]
        waited_s = now - self._unknown.setdefault(turn.message.id, now)
        if turn.taken is not None:
            waited_s = (turn.taken.due or 0.0) - (turn.taken.since or 0.0)
        ending = after_unknown(self._settings.policy, error, waited_s, drains=self._drains)
        if isinstance(ending.verdict, DeadLetter):
            turn.refused(error)
        else:
            turn.ended_as(ending)
            turn.waits = self._retries is not None

    def _start(self, turns: Sequence[DeliveryTurn]) -> Sequence[DeliveryTurn]:
        """Claim these turns, and run those that are granted; return those whose handler does not
        run.
        """
        if self._executor.is_stopped:
            return turns
        if self._retries is not None:
            new = [turn for turn in turns if turn.taken is None and turn.ending is None]
            self._retries.keep_order(new)
        asking = [turn for turn in turns if turn.ending is None and turn.refusal is None]
        if self._claims is not None and self._settings.begins is None and asking:
            self._claims.begin(asking)
        running = []
        for turn in asking:
            if turn.refusal is not None or turn.is_duplicate:
                is_to_run = bool(self._settings.outer)
            else:
                is_to_run = turn.is_to_run or self._settings.begins is not None
            if is_to_run:
                running.append(turn)
        if running:
            self._executor.start(running)
        if len(running) == len(turns):
            return []
        started = set(running)
        return [turn for turn in turns if turn not in started]

    # ---- Ending --------------------------------------------------------------------------------

    def _end(self, turns: Sequence[DeliveryTurn]) -> bool:
        """Have the ends of these turns and of others stored, and conclude those that are stored;
        return whether there were any.
        """
        ended, self._answered = [*self._answered, *turns], []
        if ended:
            self._pace.learn(ended)
            self._to_store.put(ended)
        stored = self._to_store.collect()
        self._conclude(stored)
        return bool(ended or stored)

    def _store(self, turns: Sequence[DeliveryTurn]) -> None:
        if self._claims is not None:
            self._claims.end(turns)

    def _conclude(self, turns: Sequence[DeliveryTurn]) -> None:
        """Settle these turns, and make ready those behind them."""
        if not turns:
            return
        for turn in turns:
            ending = turn.ending or turn.ended(
                self._settings.policy, is_stopping=self._stop.is_set()
            )
            tell(turn, ending, self._settings, self.report)
        self._send_deferred(turns)
        reached("before_acknowledge")
        put_off = [turn for turn in turns if self._acknowledger.is_put_off(turn)]
        done = [turn for turn in turns if turn not in put_off] if put_off else turns
        now = monotonic()
        for turn in put_off:
            delay_s = turn.verdict.delay_s if isinstance(turn.verdict, Delay) else 0.0
            self._put_off.add(now + delay_s, turn)
        self._to_acknowledge.put(done)
        self._to_acknowledge.collect()
        self._in_flight.difference_update(done)
        self._ready += self._lanes.leave(done)
        if self._retries is not None:
            self._retries.expect(done)
        self._on_progress(self.report)

    def _send_deferred(self, turns: Sequence[DeliveryTurn]) -> None:
        queue = self._settings.retry_queue
        if self._sending is None or queue is None:
            return
        self.report.deferred_sent = self._sending.sent
        if keys := [key for turn in turns if (key := queue.sent_by(turn)) is not None]:
            self._sending.send(keys)


def _executor(settings: ConsumerSettings) -> Executor[DeliveryTurn]:
    if settings.are_async:
        return LoopExecutor(AsyncRunning(settings).run, settings.concurrency)
    running = RunningTogether(settings) if settings.is_together else Running(settings)
    joins = settings.begins is not None and settings.lifecycle is not None
    return ThreadExecutor(
        running.run, settings.concurrency, running.run_together if joins else None
    )
