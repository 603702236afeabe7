"""Supervisor: worker processes, restarted when they die; none outlives its supervisor.

A worker is a program of its own, started by its command line, not a child of `multiprocessing`:
nothing of this process is copied, pickled or run again in it, you can start it by hand in the same
way, and its death has an exit code. `consumer/lifeline.py` connects the two.
"""

import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import add
from typing import Protocol

from oncely._util.clock import monotonic
from oncely._util.pauses import Backoff
from oncely.consumer.health import Health
from oncely.consumer.lifeline import Listener
from oncely.consumer.report import ConsumerReport
from oncely.core.errors import ConfigError, OncelyError, StoreUnavailable
from oncely.core.errors_by_kind import both

_LOOK_EVERY_S = 0.05
_MISSTARTS = 3
"""How often in a row a worker may report that it cannot work, before the supervisor gives up."""
_WRONG, _AWAY = 2, 3
"""The exit codes for a user's mistake, and for a server that cannot be reached."""
_ERRORS: Mapping[int, type[OncelyError]] = {_WRONG: ConfigError, _AWAY: StoreUnavailable}

OnProgress = Callable[[ConsumerReport], None]
OnLine = Callable[[str], object]


class Tell(Protocol):
    """Called with the events of a worker."""

    def __call__(self, event: str, /, *, worker: int, **details: object) -> None:
        """`worker_died`, with `pid`, `reason` and `again_in_s`; `worker_killed`, with `reason`."""


class Supervisor:
    """Keeps so many workers running; `command` and the options --worker N --lifeline FD start one,
    in the environment `env` where one is given.

    With `drains`, a worker that ends normally is not restarted. `tell` is called for each worker
    that dies, `on_line` with each line of their logs. A worker that is told to stop is killed
    after `grace_s`.
    """

    def __init__(
        self,
        command: Sequence[str],
        workers: int,
        *,
        drains: bool,
        grace_s: float,
        tell: Tell,
        on_line: OnLine = print,
        env: Mapping[str, str] | None = None,
    ) -> None:
        start = partial(_Process, command, env, on_line)
        self._workers = [
            _WorkerProcess(partial(start, number), number, drains=drains, tell=tell)
            for number in range(1, workers + 1)
        ]
        self._grace_s = grace_s

    @property
    def health(self) -> Mapping[str, Health]:
        """The health of each worker that is not done, by its name."""
        left = [worker for worker in self._workers if not worker.is_done]
        return {f"worker {worker.number}": worker.health for worker in left}

    def kill(self) -> None:
        """Kill all workers at once: called in a signal handler, as this process ends, too."""
        for worker in self._workers:
            worker.kill_quietly()

    def run(self, stop: threading.Event, on_progress: OnProgress) -> ConsumerReport:
        """Run until `stop` is set, or all workers are done; return the sum of their reports.

        For a worker that was killed, its last report counts. If a worker reports again and again
        that it cannot work, raises ConfigError; if workers drain, the error of its exit code.
        """
        try:
            while not stop.is_set() and not all(worker.is_done for worker in self._workers):
                for worker in self._workers:
                    worker.look()
                on_progress(self._report())
                stop.wait(_LOOK_EVERY_S)
        finally:
            self._end()
        return self._report()

    def _report(self) -> ConsumerReport:
        return _sum([worker.report for worker in self._workers])

    def _end(self) -> None:
        for worker in self._workers:
            worker.terminate()
        until = monotonic() + self._grace_s
        while any(worker.is_running() for worker in self._workers):
            if monotonic() >= until:
                for worker in self._workers:
                    worker.kill()
            time.sleep(_LOOK_EVERY_S)
        for worker in self._workers:
            worker.bury()


class _WorkerProcess:
    """One worker: its process, and after that has died the next one."""

    def __init__(
        self, start: Callable[[], "_Process"], number: int, *, drains: bool, tell: Tell
    ) -> None:
        self.is_done = False
        self.number = number
        self._start = start
        self._drains = drains
        self._tell = tell
        self._backoff = Backoff()
        self._misstarts = 0
        self._before = ConsumerReport()
        self._process: _Process | None = None

    @property
    def report(self) -> ConsumerReport:
        """The sum of the reports of all its processes."""
        said = [] if self._process is None else [self._process.line.report]
        return _sum([self._before, *said])

    @property
    def health(self) -> Health:
        """The health of the process; while there is none, the supervisor's loop is what counts."""
        process = self._process
        return Health(0.0, "it is to be started") if process is None else process.line.health

    def look(self) -> None:
        """Start a process if it is time to; check whether the current one has died."""
        if self._process is not None:
            code = self._process.exit_code()
            if code is not None:
                self._died(self._process, code)
        elif not self.is_done and self._backoff.is_due():
            self._process = self._start()
            self._backoff.started()

    def is_running(self) -> bool:
        """Read what the process has sent; return whether it still runs."""
        return self._process is not None and self._process.exit_code() is None

    def terminate(self) -> None:
        """Ask the process to end normally."""
        if self._process is not None:
            # A process that has ended gets no signal.
            self._process.popen.terminate()

    def kill(self) -> None:
        """End the process at once."""
        if self.is_running():
            reason = "did not stop within its grace time"
            self._tell("worker_killed", worker=self.number, reason=reason)
            self.kill_quietly()

    def kill_quietly(self) -> None:
        """End the process at once, without an event."""
        if self._process is not None:
            self._process.popen.kill()

    def bury(self) -> None:
        """Keep the report of the process, and drop the process."""
        if self._process is not None:
            self._before = self.report
            self._process.line.close()
            self._process = None

    def _died(self, process: "_Process", code: int) -> None:
        line, pid = process.line, process.popen.pid
        self.bury()
        if self._drains and line.has_ended:
            self.is_done = True
            return
        how = f"ended with exit code {code}"
        if code < 0:
            how = f"died of signal {-code} ({signal.strsignal(-code)})"
        how = line.error or how
        # The worker's error is raised after too many starts in a row that ended with it.
        cannot_work = code == _WRONG or (self._drains and code > 0)
        before = 0 if self._backoff.lived_long() else self._misstarts
        self._misstarts = before + 1 if cannot_work else 0
        if self._misstarts == _MISSTARTS:
            raise _ERRORS.get(code, OncelyError)(how)
        delay_s = self._backoff.died()
        again_in_s = round(delay_s, 1)
        self._tell("worker_died", worker=self.number, pid=pid, reason=how, again_in_s=again_in_s)


class _Process:
    """One life of a worker."""

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str] | None, on_line: OnLine, number: int
    ) -> None:
        ours, theirs = socket.socketpair()
        self.line = Listener(ours)
        self._on_line = on_line
        with theirs:
            options = ["--worker", str(number), "--lifeline", str(theirs.fileno())]
            self.popen = subprocess.Popen(
                [*command, *options],
                stdin=subprocess.DEVNULL,
                env=env,
                pass_fds=[theirs.fileno()],
                # A Ctrl-C at the terminal reaches only the supervisor, which passes it on.
                process_group=0,
            )

    def exit_code(self) -> int | None:
        """None while it lives. Everything that it has sent is read, its last words too."""
        code = self.popen.poll()
        self.line.listen()
        lines, self.line.log = self.line.log, []
        for line in lines:
            self._on_line(line)
        return code


def _sum(reports: Sequence[ConsumerReport]) -> ConsumerReport:
    total = ConsumerReport()
    for each in reports:
        counts = map(add, total.counts().values(), each.counts().values())
        total = ConsumerReport(*counts, errors=both(total.errors, each.errors))  # type: ignore[misc]
    return total
