"""Supervising: what dead workers said counts, and that none outlives its supervisor."""

import fcntl
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.conditions import wait_until

from oncely._util import pauses
from oncely.consumer.report import ConsumerReport
from oncely.consumer.supervisor import Supervisor
from oncely.core.errors import StoreUnavailable

WORKER = """
import fcntl, os, signal, sys, threading, time
from pathlib import Path
from oncely.consumer.lifeline import Lifeline
from oncely.consumer.report import ConsumerReport

folder = Path(sys.argv[1])
line = Lifeline(int(sys.argv[-1]))
lock = os.open(folder / "lock", os.O_CREAT | os.O_RDWR)
fcntl.flock(lock, fcntl.LOCK_SH)
stop = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stop.set())
(folder / f"{os.getpid()}.started").touch()
starts = len(list(folder.glob("*.started")))
"""


class Workers:
    """A supervisor of small workers, each of which leaves a file where it was started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.told: list[dict[str, object]] = []
        self.stop = threading.Event()
        self.seen = ConsumerReport()

    def supervisor(
        self, script: str, workers: int = 1, *, drains: bool = True, grace_s: float = 60.0
    ) -> Supervisor:
        command = [sys.executable, "-c", WORKER + script, str(self.folder)]
        return Supervisor(command, workers, drains=drains, grace_s=grace_s, tell=self.tell)

    def tell(self, event: str, /, **details: object) -> None:
        self.told.append({"event": event, **details})

    def run(self, script: str, workers: int = 1, **how: object) -> ConsumerReport:
        """Supervise to the end."""
        return self.supervisor(script, workers, **how).run(self.stop, self.look)  # type: ignore[arg-type]

    def look(self, report: ConsumerReport) -> None:
        self.seen = report

    @property
    def pids(self) -> list[int]:
        return [int(file.stem) for file in self.folder.glob("*.started")]

    def all_gone(self) -> bool:
        """Whether none is left of those that hold the lock while they live."""
        with (self.folder / "lock").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        return True

    def stop_when(self, condition: Callable[[], bool]) -> threading.Thread:
        """Tell the supervisor to stop as soon as it is so."""

        def wait() -> None:
            try:
                wait_until(condition)
            finally:
                self.stop.set()

        thread = threading.Thread(target=wait)
        thread.start()
        return thread


@pytest.fixture
def workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workers:
    """Workers that are started again within a few milliseconds."""
    monkeypatch.setattr(pauses, "_FIRST_DELAY_S", 0.01)
    return Workers(tmp_path)


def test_what_the_killed_said_counts(workers: Workers) -> None:
    """What a worker said before it was killed is in the progress, and in the report."""
    script = (
        "if starts > 1:\n    line.end(ConsumerReport(handled=1))\n    sys.exit()\n"
        "line.show(ConsumerReport(handled=7))\nstop.wait()"
    )

    to_kill = [signal.SIGKILL]

    def kill_when_heard(report: ConsumerReport) -> None:
        if report.handled == 7 and to_kill:
            os.kill(workers.pids[0], to_kill.pop())

    report = workers.supervisor(script).run(workers.stop, kill_when_heard)
    assert report.handled == 8


def test_who_does_not_drain_is_started_again(workers: Workers) -> None:
    """A worker that ended though nobody told it to is started again, however it ended."""
    stopping = workers.stop_when(lambda: len(workers.pids) >= 4)
    script = "line.end(ConsumerReport(handled=1))\nif starts < 4: sys.exit(starts % 2)\nstop.wait()"
    report = workers.run(script, drains=False)
    stopping.join()
    assert report.handled == 4
    assert [told["reason"] for told in workers.told] == [
        "ended with exit code 1",
        "ended with exit code 0",
        "ended with exit code 1",
    ]


def test_who_cannot_drain(workers: Workers) -> None:
    """To drain what cannot be reached is a failure, and goes on no more than three times."""
    with pytest.raises(StoreUnavailable, match="the broker is away"):
        workers.run("line.fail('the broker is away')\nsys.exit(3)")
    assert len(workers.pids) == 3


def test_who_does_not_stop_is_killed(workers: Workers) -> None:
    """After the grace time there is no asking any more."""
    stopping = workers.stop_when(lambda: len(workers.pids) == 1)
    workers.run("while True: time.sleep(60)", drains=False, grace_s=0.1)
    stopping.join()
    [told] = workers.told
    assert told["event"] == "worker_killed"
    assert told["reason"] == "did not stop within its grace time"
    assert workers.all_gone()


SUPERVISOR = """
import sys, threading
from oncely.consumer.supervisor import Supervisor
supervisor = Supervisor(sys.argv[1:], 2, drains=False, grace_s=60, tell=print)
supervisor.run(threading.Event(), lambda report: None)
"""


@pytest.mark.parametrize("ending", ["stop.wait()", "while True: time.sleep(60)"])
def test_no_orphans(workers: Workers, ending: str) -> None:
    """A supervisor that is killed takes its workers with it: also those that do not listen."""
    command = [sys.executable, "-c", WORKER + "line.grace_s = 0.2\n" + ending, str(workers.folder)]
    with subprocess.Popen([sys.executable, "-c", SUPERVISOR, *command]) as supervisor:
        wait_until(lambda: len(workers.pids) == 2)
        assert not workers.all_gone()
        supervisor.kill()
    wait_until(workers.all_gone)
