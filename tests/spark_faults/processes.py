"""The processes of Spark programs: all that a program started, told by a mark that they inherit."""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Self, TypeVar

from tests.conditions import wait_until
from tests.spark_faults.check import LOG
from tests.spark_faults.handlers import LOG_VARIABLE

T = TypeVar("T")

ROOT = Path(__file__).parents[2]
DEADLINE_S = 600.0
"""For whatever is waited for: it takes seconds."""
_POLL_S = 0.1
_LOG_TAIL = 4000
_MARK = "ONCELY_TEST_PROGRAMS"
_DRIVER = "org.apache.spark.deploy.SparkSubmit"
_EXECUTOR = "CoarseGrainedExecutorBackend"
# Not those that plan and commit.
_PYTHON = "pyspark.worker"
# Not from here: whoever is frozen is to go on, and see that its driver is gone, even if the test
# dies meanwhile.
_FREEZE = 'seconds=$1; shift; kill -s STOP "$@"; sleep "$seconds"; kill -s CONT "$@"'


class Programs:
    """Programs whose whole offspring is known; none of it is left at the end of the block."""

    def __init__(self, folder: Path) -> None:
        self._mark = uuid.uuid4().hex
        self._environment = os.environ | {
            _MARK: self._mark,
            LOG_VARIABLE: str(folder / LOG),
            # What makes a driver's Java quick to start does so for masters, workers and executors.
            "JDK_JAVA_OPTIONS": os.environ.get("SPARK_SUBMIT_OPTS", ""),
            "PYSPARK_PYTHON": sys.executable,
            # Executors work in folders of their own.
            "PYTHONPATH": os.pathsep.join(
                [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
            ),
        }
        self._log = folder / "programs.err"
        self._started: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        while pids := self._pids(""):
            for pid in pids:
                _signal(pid, signal.SIGKILL)
            for process in self._started:
                process.wait()
            time.sleep(_POLL_S)

    def start(
        self, *command: str | Path, stdout: IO[bytes] | None = None
    ) -> "subprocess.Popen[bytes]":
        """Start one in a group of its own."""
        with self._log.open("ab") as log:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=stdout or log,
                stderr=log,
                start_new_session=True,
                env=self._environment,
            )
        self._started.append(process)
        return process

    def executors(self) -> list[int]:
        return self._pids(_EXECUTOR)

    def python_workers(self) -> list[int]:
        """The Python processes that run tasks, not the one from which they are forked."""
        forked = self._pids(_PYTHON)
        return [pid for pid in forked if _parent(pid) in forked]

    def busy_executor(self) -> int:
        """One that has a Python process for its task."""
        return self.wait_for(self._busy_executor, "no executor has a Python worker")

    def family(self, executor: int) -> list[int]:
        """An executor with its Python processes."""
        pythons = self._pids(_PYTHON)
        return [executor, *(pid for pid in pythons if executor in _ancestors(pid))]

    def kill_driver(self, process: "subprocess.Popen[bytes]") -> None:
        """Kill the program and its JVM, at one moment; its executors and workers are left alone."""
        jvms = [pid for pid in self._pids(_DRIVER) if process.pid in _ancestors(pid)]
        for pid in (*jvms, process.pid):
            _signal(pid, signal.SIGKILL)
        process.wait()

    def freeze(self, pids: Sequence[int], seconds: float) -> None:
        """Stop processes, and let them go on later; return at once."""
        self.start("/bin/sh", "-c", _FREEZE, "freeze", str(seconds), *map(str, pids))

    def wait_for(self, condition: Callable[[], T], complaint: str) -> T:
        """Ask until the answer is true. Fails the test where that takes too long."""
        return wait_until(
            condition,
            lambda: f"{complaint}:\n{self.last_words()}",
            limit_s=DEADLINE_S,
            pause_s=_POLL_S,
        )

    def last_words(self) -> str:
        return self._log.read_text(errors="replace")[-_LOG_TAIL:]

    def _busy_executor(self) -> int:
        executors = self.executors()
        found = [pid for worker in self.python_workers() for pid in _ancestors(worker)]
        return next((pid for pid in found if pid in executors), 0)

    def _pids(self, word: str) -> list[int]:
        """Those of our own whose command line has a word in it."""
        mark = f"{_MARK}={self._mark}".encode()
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            # It may end meanwhile.
            with suppress(OSError):
                if word.encode() in (folder / "cmdline").read_bytes() and mark in (
                    folder / "environ"
                ).read_bytes().split(b"\0"):
                    found.append(int(folder.name))
        return found


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _ancestors(pid: int) -> list[int]:
    found = []
    while pid := _parent(pid):
        found.append(pid)
    return found


def _parent(pid: int) -> int:
    """0 where it has ended."""
    try:
        # The name may hold anything, also a parenthesis.
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0
