"""The scheduler: one clock, many threads of which one runs, and a seed that says which is next."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush

from greenlet import getcurrent, greenlet

_FOREVER = float("inf")
_MOST_THROWS = 100
"""How often a killed thread may catch what ends it."""


class Killed(BaseException):
    """The process is dead: its threads are unwound, and none of their calls does anything."""


class Stuck(Exception):
    """Every thread waits for another."""


@dataclass(eq=False)
class SimulatedProcess:
    """A worker process: its threads share a clock of their own, and die together."""

    name: str
    wall_offset_s: float
    monotonic_offset_s: float
    is_dead: bool = False
    frozen_until: float = 0.0
    main: "SimulatedTask | None" = None
    strike: Callable[[], None] | None = None
    """What befalls it at one of its next calls."""
    strike_in: int = 0


class SimulatedTask:
    """A thread of a process."""

    def __init__(
        self,
        ident: int,
        name: str,
        process: SimulatedProcess,
        work: Callable[[], None],
        home: greenlet,
    ) -> None:
        self.ident = ident
        self.name = name
        self.process = process
        self.wake_at = 0.0
        self.is_ready: Callable[[], bool] | None = None
        """What it waits for, besides the time."""
        self.interrupt: BaseException | None = None
        self.is_over = False
        self.thread: object = None
        """What has started it."""
        self.ran_at = 0.0
        """When it last ran."""
        self.greenlet = greenlet(self._run, home)
        self._work = work

    def _run(self) -> None:
        try:
            self._work()
        except Killed:
            pass
        finally:
            self.is_over = True


class Scheduler:
    """Lets one thread run at a time, until it waits; which goes on is drawn from `draws`.

    Code that runs outside any of its threads never waits.
    """

    def __init__(self, draws: random.Random) -> None:
        self.draws = draws
        self.now = 0.0
        """Seconds since the simulation began."""
        self.current: SimulatedTask | None = None
        self._tasks: list[SimulatedTask] = []
        self._timers: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = 0
        self._home = getcurrent()

    # ---- For the world -------------------------------------------------------------------------

    def spawn(
        self, process: SimulatedProcess, work: Callable[[], None], name: str = ""
    ) -> SimulatedTask:
        """Begin a thread."""
        self._numbers += 1
        task = SimulatedTask(self._numbers, name, process, work, self._home)
        task.wake_at = self.now
        if process.main is None:
            process.main = task
        self._tasks.append(task)
        return task

    def later(self, delay_s: float, call: Callable[[], object]) -> None:
        """Call this after so many seconds, in no thread."""
        self._numbers += 1
        heappush(self._timers, (self.now + delay_s, self._numbers, call))

    def run(self, is_over: Callable[[], bool]) -> None:
        """Until `is_over`. Raises Stuck where nothing is left that could happen."""
        while not is_over():
            if not self._run_next():
                raise Stuck("every thread waits for another")

    def hangs(self, process: SimulatedProcess, since: float) -> bool:
        """Whether its main thread has waited since then, and would wait for ever."""
        main = process.main
        return main is not None and main.ran_at < since and main.wake_at == _FOREVER

    def kill(self, process: SimulatedProcess) -> None:
        """End a process: all its threads are unwound at once, and can do nothing else."""
        process.is_dead = True
        process.strike = None
        for task in [each for each in self._tasks if each.process is process]:
            self._unwind(task)
        self._tasks = [each for each in self._tasks if each.process is not process]

    def _unwind(self, task: SimulatedTask) -> None:
        for _ in range(_MOST_THROWS):
            if task.is_over or not task.greenlet:
                return
            former, self.current = self.current, task
            try:
                task.greenlet.throw(Killed())
            finally:
                self.current = former
        raise AssertionError(f"{task.name} of {task.process.name} does not let itself be killed")

    def _run_next(self) -> bool:
        """Whether anything has happened."""
        now = self.now
        ready = [
            task
            for task in self._tasks
            if (task.wake_at <= now or (task.is_ready is not None and task.is_ready()))
            and task.process.frozen_until <= now
        ]
        if not ready:
            return self._advance()
        task = ready[0] if len(ready) == 1 else ready[self.draws.randrange(len(ready))]
        self.current = task
        task.ran_at = now
        try:
            task.greenlet.switch()
        finally:
            self.current = None
        if task.is_over:
            self._tasks.remove(task)
        return True

    def _advance(self) -> bool:
        """Let time pass until the next thing happens; whether anything will."""
        at = self._timers[0][0] if self._timers else _FOREVER
        for task in self._tasks:
            frozen_until = task.process.frozen_until
            # One that is ready and frozen goes on when that is over.
            is_waiting = task.is_ready is not None and frozen_until > self.now
            at = min(at, frozen_until if is_waiting else max(task.wake_at, frozen_until))
        if at == _FOREVER:
            return False
        self.now = max(self.now, at)
        while self._timers and self._timers[0][0] <= self.now:
            heappop(self._timers)[2]()
        return True

    # ---- For threads ---------------------------------------------------------------------------

    def sleep(self, seconds: float) -> None:
        """Let others go on, for so long."""
        self.wait(None, seconds)

    def wait(self, is_ready: Callable[[], bool] | None, timeout_s: float | None) -> bool:
        """Until that is so, at most for so long (None: for ever); whether it is."""
        task = self.current
        if task is None:
            return is_ready is None or is_ready()
        self.check()
        if is_ready is not None and is_ready():
            return True
        task.wake_at = _FOREVER if timeout_s is None else self.now + max(timeout_s, 0.0)
        task.is_ready = is_ready
        self._home.switch()
        task.is_ready = None
        self.check()
        return is_ready is None or is_ready()

    def check(self) -> None:
        """Raise what befalls the thread that runs."""
        task = self.current
        if task is None:
            return
        if task.process.is_dead:
            raise Killed
        if task.interrupt is not None:
            interrupt, task.interrupt = task.interrupt, None
            raise interrupt

    def call(self, took_s: float) -> None:
        """A message goes over the wire, which takes so long: here the world may strike."""
        task = self.current
        if task is None:
            return
        process = task.process
        self.check()
        if process.strike is not None:
            process.strike_in -= 1
            if process.strike_in < 0:
                strike, process.strike = process.strike, None
                # In no thread: whoever is killed must not be its own executioner.
                self.later(0.0, strike)
        self.sleep(took_s)
