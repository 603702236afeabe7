"""Supervising: worker processes, each started again when it dies; none outlives its supervisor.

A worker is a program of its own, started by its command line, and no child of `multiprocessing`:
nothing of this process is copied, pickled or run again in it, it can be started by hand just so,
and its death has an exit code. See `consuming/lifeline.py` for how the two hear of each other.
"""

import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Protocol

from oncely._util.pauses import Backoff
from oncely.consuming.consumer_report import ConsumerReport
from oncely.consuming.health import Health
from oncely.consuming.lifeline import Listener
from oncely.core.errors import ConfigError, OncelyError

_LOOK_EVERY_S = 0.05
_MISSTARTS = 3
"""So often in a row a worker may say that it cannot work, before it is believed."""
_WRONG = 2
"""The exit code for a user's mistake."""

OnProgress = Callable[[ConsumerReport], None]
OnLine = Callable[[str], object]


class Tell(Protocol):
    """Is told what a worker comes to."""

    def __call__(self, event: str, /, *, worker: int, **details: object) -> None:
        """`worker_died`, with `pid`, `reason` and `again_in_s`; `worker_killed`, with `reason`."""


class Supervisor:
    """Keeps so many workers running; `command` and the options --worker N --lifeline FD start one,
    in the environment `env` where one is given.

    Where `drains`, a worker that ends in good order is done. `tell` is told of each that dies,
    `on_line` is given each line of their logs. A worker that is told to stop is killed after
    `grace_s`.
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
        """How each worker is that is not done, by its name."""
        left = [worker for worker in self._workers if not worker.is_done]
        return {f"worker {worker.number}": worker.health for worker in left}

    def kill(self) -> None:
        """End all workers at once: from a signal's handler, where this process ends too."""
        for worker in self._workers:
            worker.kill_quietly()

    def run(self, stop: threading.Event, on_progress: OnProgress) -> ConsumerReport:
        """Go on until `stop` is set, or all workers are done; return their reports, added up.

        Of a worker that was killed, what it said last counts. Raises ConfigError, or where
        workers drain OncelyError, when one says again and again that it cannot work.
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
        return _sum(worker.report for worker in self._workers)

    def _end(self) -> None:
        for worker in self._workers:
            worker.terminate()
        until = time.monotonic() + self._grace_s
        while any(worker.is_running() for worker in self._workers):
            if time.monotonic() >= until:
                for worker in self._workers:
                    worker.kill()
            time.sleep(_LOOK_EVERY_S)
        for worker in self._workers:
            worker.bury()


class _WorkerProcess:
    """A process, and when that has died the one in its place."""

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
        """What all its processes have said, added up."""
        said = [] if self._process is None else [self._process.line.report]
        return _sum([self._before, *said])

    @property
    def health(self) -> Health:
        """How the process is; for as long as there is none, the supervisor's loop is what moves."""
        process = self._process
        return Health(0.0, "it is to be started") if process is None else process.line.health

    def look(self) -> None:
        """Start a process where it is time to; see whether the one that there is has died."""
        if self._process is not None:
            code = self._process.exit_code()
            if code is not None:
                self._died(self._process, code)
        elif not self.is_done and self._backoff.is_due():
            self._process = self._start()
            self._backoff.started()

    def is_running(self) -> bool:
        """Whether there is a process still; what it says is heard."""
        return self._process is not None and self._process.exit_code() is None

    def terminate(self) -> None:
        """Ask the process to end in good order."""
        if self._process is not None:
            # One that has ended is sent nothing.
            self._process.popen.terminate()

    def kill(self) -> None:
        """End the process at once."""
        if self.is_running():
            reason = "did not stop within its grace time"
            self._tell("worker_killed", worker=self.number, reason=reason)
            self.kill_quietly()

    def kill_quietly(self) -> None:
        """The same, and nothing else."""
        if self._process is not None:
            self._process.popen.kill()

    def bury(self) -> None:
        """Keep what the process has said, and nothing else of it."""
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
        how = line.error or _how(code)
        self._check_misstarts(how, code)
        delay_s = self._backoff.died()
        again_in_s = round(delay_s, 1)
        self._tell("worker_died", worker=self.number, pid=pid, reason=how, again_in_s=again_in_s)

    def _check_misstarts(self, how: str, code: int) -> None:
        """Raises what the worker says, where it would say so for ever."""
        cannot_work = code == _WRONG or (self._drains and code > 0)
        before = 0 if self._backoff.lived_long() else self._misstarts
        self._misstarts = before + 1 if cannot_work else 0
        if self._misstarts == _MISSTARTS:
            raise (ConfigError if code == _WRONG else OncelyError)(how)


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
                # A Ctrl-C on the terminal comes to the supervisor alone, which passes it on.
                process_group=0,
            )

    def exit_code(self) -> int | None:
        """None while it lives. What it has said is heard, its last words too."""
        code = self.popen.poll()
        self.line.listen()
        lines, self.line.log = self.line.log, []
        for line in lines:
            self._on_line(line)
        return code


def _sum(reports: Iterable[ConsumerReport]) -> ConsumerReport:
    total = ConsumerReport()
    for report in reports:
        total.add(report)
    return total


def _how(code: int) -> str:
    if code < 0:
        return f"died of signal {-code} ({signal.strsignal(-code)})"
    return f"ended with exit code {code}"
