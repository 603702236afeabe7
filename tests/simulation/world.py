"""The world of a simulation: servers, workers that come and go, and what befalls them."""

import random
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

from tests.simulation.broker import Broker, FaultyTransport
from tests.simulation.faults import Weather
from tests.simulation.faulty_store import FaultyStore, WatchedStore
from tests.simulation.history import History
from tests.simulation.primitives import (
    EPOCH,
    SimulatedEvent,
    SimulatedThreads,
    SimulatedTime,
)
from tests.simulation.scenario import FAULTS_S, STRIKES, Scenario
from tests.simulation.scheduler import Killed, Scheduler, SimulatedProcess, Stuck
from tests.simulation.workers import (
    CONSUMER,
    QUEUE,
    CallerLoop,
    SimulatedHandler,
    answered_by_claimed,
    answered_by_once,
)

from oncely.consumer import Consumer
from oncely.core.errors import OncelyError, StoreError, TransportError
from oncely.core.message import Message
from oncely.core.policy import Finding
from oncely.core.record import Key, State
from oncely.ledger.ledger import Ledger
from oncely.outbox import Relay

_REST_S = 2.0
"""After all is settled, to see whether a worker hangs."""
_NO_MISTAKES = (StoreError, TransportError)
"""What may end a worker: it is started again."""


@dataclass(eq=False)
class _Worker:
    """A process, and how to stop it."""

    kind: str
    process: SimulatedProcess
    transport: FaultyTransport
    stop: Callable[[], None] = lambda: None


class World:
    """Everything that there is in one simulation."""

    def __init__(
        self,
        scenario: Scenario,
        draws: random.Random,
        handler: Callable[[Message], Any] | None,
    ) -> None:
        self.scenario = scenario
        self.draws = draws
        self.history = History()
        self.scheduler = Scheduler(draws)
        self.time = SimulatedTime(self.scheduler)
        self.threads = SimulatedThreads(self.scheduler, self._thread_died)
        self.random = random.Random(draws.random())
        self.settled_at: float | None = None
        self._store_weather = Weather(draws, scenario.store_faults, scenario.slow)
        self._broker_weather = Weather(draws, scenario.broker_faults, scenario.slow)
        self._users_handler = handler
        self._workers: list[_Worker] = []
        self._names = 0
        self._is_over = False

    # ---- From the beginning to the end ---------------------------------------------------------

    def run(self) -> None:
        """All of it; to be called while oncely's modules have this world's time and threads."""
        self.store = WatchedStore(self.scheduler, self.history)
        self.broker = Broker(self.scheduler, self.history, QUEUE)
        self._handler = SimulatedHandler(self.scheduler, self._note, self._users_handler)
        self._policy = self.scenario.policy(self._probe)
        self._plan()
        limit = FAULTS_S + self.scenario.limit_s
        try:
            self.scheduler.run(lambda: self._has_ended(limit))
        except Stuck as error:
            self._note("stuck", error=str(error))
        else:
            self._tell_who_hangs()
        finally:
            self._is_over = True
            for worker in self._workers:
                self.scheduler.kill(worker.process)

    def _tell_who_hangs(self) -> None:
        if self.settled_at is None:
            return
        for worker in self._workers:
            if self.scheduler.hangs(worker.process, self.settled_at):
                self._note("hangs", process=worker.process.name)

    def _plan(self) -> None:
        for message in self.scenario.messages:
            self._publish_later(message, self.draws.uniform(0.0, 10.0))
        for message in self.scenario.others:
            self._publish_later(message, self.draws.uniform(0.0, 20.0))
        for kind in self.scenario.workers:
            self._start(kind)
        for at, kind in self.scenario.blows:
            self.scheduler.later(at, lambda kind=kind: self._strike(kind))  # type: ignore[misc]
        self.scheduler.later(FAULTS_S, self._end_faults)

    def _publish_later(self, message: Message, delay_s: float) -> None:
        self.scheduler.later(delay_s, lambda: self.broker.put("producer", QUEUE, message))

    def _end_faults(self) -> None:
        self._store_weather.end()
        self._broker_weather.end()
        for worker in self._workers:
            worker.process.strike = None
            worker.process.frozen_until = min(worker.process.frozen_until, self.scheduler.now)
        self._note("faults_end")

    def _has_ended(self, limit: float) -> bool:
        now = self.scheduler.now
        if now <= FAULTS_S:
            return False
        if self.settled_at is not None:
            return now > self.settled_at + _REST_S
        if self.broker.is_empty and not self.store.some_wait and not self._unfinished(now):
            self.settled_at = now
        return now > limit

    def _unfinished(self, now: float) -> bool:
        """Whether a claim is held, or a record is handled and not completed. What is in doubt stays
        so once nothing is delivered any more: whether it may, the judges say.
        """
        return any(
            record.state is State.HANDLED
            or record.lease_until is None
            or record.lease_until > EPOCH + now
            for record in self.store.unfinished
        )

    # ---- Workers -------------------------------------------------------------------------------

    def _process(self, kind: str) -> SimulatedProcess:
        self._names += 1
        apart_s = self.scenario.clocks_apart_s
        return SimulatedProcess(
            f"{kind}-{self._names}",
            self.draws.uniform(-apart_s, apart_s),
            self.draws.uniform(0.0, 100_000.0),
        )

    def _start(self, kind: str) -> None:
        if self._is_over:
            return
        process = self._process(kind)
        ledger = Ledger(FaultyStore(self.store, self._store_weather, process.name))
        transport = FaultyTransport(
            self.broker,
            self.scheduler,
            self._broker_weather,
            self.scenario.refusing,
            process.name,
        )
        worker = _Worker(kind, process, transport)
        work = self._work(worker, ledger)
        self._workers.append(worker)
        self._note("starts", process=process.name)
        self.scheduler.spawn(process, lambda: self._live(worker, work), "main")

    def _work(self, worker: _Worker, ledger: Ledger) -> Callable[[], object]:
        transport, policy, scenario = worker.transport, self._policy, self.scenario
        if worker.kind == "consumer":
            consumer = Consumer(transport, queue=QUEUE).idempotent(ledger, CONSUMER, policy=policy)
            consumer.concurrency(scenario.concurrency).window(scenario.window).grace("2s")
            consumer.handler(self._handler)
            if scenario.is_ordered:
                consumer.ordered()
            worker.stop = consumer.stop
            return consumer.consume
        stop = SimulatedEvent(self.scheduler)
        worker.stop = stop.set
        if worker.kind == "relay":
            clock = self.time.monotonic
            relay = Relay(ledger, transport, visibility="5s", backoff="2s", tries=1000, clock=clock)
            return lambda: relay.run(cast(threading.Event, stop))
        by = answered_by_once if worker.kind == "once" else answered_by_claimed
        answer = by(ledger, self._handler, policy)
        return CallerLoop(transport, answer, stop, self._handler, self._note).run

    def _live(self, worker: _Worker, work: Callable[[], object]) -> None:
        try:
            work()
            self._note("ends")
        except _NO_MISTAKES as error:
            self._note("gives_up", error=f"{type(error).__name__}: {error}")
        except Killed:
            raise
        except BaseException as error:  # noqa: BLE001 - whoever judges is told.
            self._note("broke", error=f"{type(error).__name__}: {error}")
        self.scheduler.later(0.0, lambda: self._end(worker))

    def _end(self, worker: _Worker) -> None:
        """Threads and connections of a process end with it; another process takes its place."""
        if worker not in self._workers:
            return
        self._workers.remove(worker)
        self.scheduler.kill(worker.process)
        self.scheduler.later(
            self.draws.uniform(0.0, 2.0), lambda: self.broker.give_back(worker.transport.holder)
        )
        self.scheduler.later(self.draws.uniform(0.1, 2.0), lambda: self._start(worker.kind))

    # ---- What befalls them ---------------------------------------------------------------------

    def _strike(self, kind: str) -> None:
        if kind in STRIKES:
            living = [each for each in self._workers if each.process.strike is None]
            if living:
                worker = self.draws.choice(living)
                worker.process.strike_in = self.draws.randrange(10)
                worker.process.strike = lambda: self._strike_worker(kind, worker)
            return
        match kind:
            case "store_away" | "broker_away":
                is_store = kind == "store_away"
                weather = self._store_weather if is_store else self._broker_weather
                away_s = self.draws.choice((0.5, 4.0, self._lease_s * 1.2))
                weather.away_until = self.scheduler.now + away_s
                self._note(kind, until=weather.away_until)
            case "redeliver":
                self.broker.redeliver_some(self.draws.choice)
            case "copy":
                message = self.draws.choice(self.scenario.messages)
                self.broker.put("producer", QUEUE, message)
            case _:
                self._operate(kind)

    def _strike_worker(self, kind: str, worker: _Worker) -> None:
        if worker not in self._workers:
            return
        process, now = worker.process, self.scheduler.now
        self._note(kind, process=process.name)
        match kind:
            case "kill":
                self._end(worker)
            case "freeze":
                self._freeze(worker)
            case "interrupt" if worker.kind in ("once", "claimed") and process.main is not None:
                process.main.interrupt = KeyboardInterrupt()
                process.main.wake_at = now
            case _:
                worker.stop()

    def _freeze(self, worker: _Worker) -> None:
        """For less than a lease, or for more: then others take over what it holds."""
        lease_s, holder = self._lease_s, worker.transport.holder
        worker.process.frozen_until = self.scheduler.now + self.draws.uniform(0.3, 3.0) * lease_s
        if self.draws.random() < 0.7:
            self.scheduler.later(1.0, lambda: self.broker.give_back(holder))
        if self.draws.random() < 0.6:
            self.scheduler.later(1.1 * lease_s, lambda: self._operate("forget"))

    @property
    def _lease_s(self) -> float:
        lease_s = self._policy.lease_s
        return 5.0 if lease_s is None else lease_s

    def _operate(self, kind: str) -> None:
        process = self._process("operator")
        ledger = Ledger(FaultyStore(self.store, self._store_weather, process.name))
        key = self._key_for(kind)
        calls: dict[str, Callable[[], object]] = {
            "reset": lambda: ledger.reset(key),
            # What he says is true.
            "settle": lambda: (ledger.happened if self._has_happened(key) else ledger.reset)(key),
            "forget": lambda: ledger.forget(key),
            "purge": lambda: ledger.purge("2s"),
        }

        def operate() -> None:
            self._note(kind, key=tuple(key))
            with suppress(OncelyError):
                calls[kind]()

        self.scheduler.spawn(process, operate, "main")

    def _key_for(self, kind: str) -> Key:
        """What an operator looks at: what is in doubt, where he is to forget or to settle it, if
        anything is.
        """
        now = EPOCH + self.scheduler.now
        doubtful = [
            record.key
            for record in self.store.unfinished
            if record.lease_until is not None and record.lease_until <= now
        ]
        if kind in ("forget", "settle") and doubtful:
            return self.draws.choice(doubtful)
        return Key(CONSUMER, self.draws.choice(self.scenario.messages).id)

    # ---- What is told --------------------------------------------------------------------------

    def _note(self, what: str, **facts: Any) -> None:
        """What the thread that runs does to the world: nothing, where its process is dead."""
        self.scheduler.check()
        current = self.scheduler.current
        actor = "world" if current is None else current.process.name
        self.history.add(self.scheduler.now, actor, what, **facts)

    def _thread_died(self, name: str, error: BaseException) -> None:
        self._note("thread_died", thread=name, error=f"{type(error).__name__}: {error}")

    def _probe(self, message: Message) -> Finding:
        self.scheduler.sleep(self.draws.uniform(0.0, 0.2))
        has_happened = self._has_happened(Key(CONSUMER, message.id))
        return self.draws.choice(("unknown", "happened" if has_happened else "not_happened"))

    def _has_happened(self, key: Key) -> bool:
        return any(event.facts["key"] == key for event in self.history.of("effect"))
