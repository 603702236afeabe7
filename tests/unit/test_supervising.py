"""Supervising: when a dead worker is started again, when not, and that none outlives the other."""

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
from oncely._util.pauses import Backoff
from oncely.consuming.consumer_report import ConsumerReport
from oncely.consuming.supervising import Supervisor
from oncely.core.errors import ConfigError, OncelyError
from oncely.testing import ManualClock

# ---- How long to wait --------------------------------------------------------------------------


@pytest.fixture
def clock() -> ManualClock:
    """The time by which a Backoff counts."""
    return ManualClock()


def short_life(backoff: Backoff, clock: ManualClock) -> float:
    """Let a worker live for a second, and die."""
    backoff.started()
    clock.advance(1)
    return backoff.died()


def test_twice_as_long_each_time(clock: ManualClock) -> None:
    """A worker that dies again and again, for ever, is started ever more rarely, up to a bound."""
    backoff = Backoff(clock, jitter=lambda: 1.0)
    delays = [short_life(backoff, clock) for _ in range(3_000)]
    assert delays == [0.5, 1, 2, 4, 8, 16] + [30] * 2_994


def test_jitter(clock: ManualClock) -> None:
    """Chance takes away up to half of the delay, so that workers do not come back together."""
    least = Backoff(clock, jitter=lambda: 0.0)
    assert [short_life(least, clock) for _ in range(3)] == [0.25, 0.5, 1]
    some = [short_life(Backoff(clock), clock) for _ in range(50)]
    assert len(set(some)) > 1
    assert all(0.25 <= delay <= 0.5 for delay in some)


def test_a_long_life_counts(clock: ManualClock) -> None:
    """Whoever lived for a while is started again as soon as after its first death."""
    backoff = Backoff(clock, jitter=lambda: 1.0)
    delays = [short_life(backoff, clock) for _ in range(4)]
    backoff.started()
    clock.advance(60)
    assert delays[-1] == 4
    assert [backoff.died(), short_life(backoff, clock)] == [0.5, 1]


# ---- Real workers ------------------------------------------------------------------------------

WORKER = """
import fcntl, os, signal, sys, threading, time
from pathlib import Path
from oncely.consuming.lifeline import Lifeline
from oncely.consuming.consumer_report import ConsumerReport

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


def test_reports_are_added_up(workers: Workers) -> None:
    """Workers that end in good order are done, and what they did is added up."""
    report = workers.run("line.end(ConsumerReport(received=3, handled=2, failed=1))", workers=2)
    assert report == ConsumerReport(received=6, handled=4, failed=2)
    assert len(workers.pids) == 2
    assert workers.told == []


def test_the_killed_are_replaced(workers: Workers) -> None:
    """A worker that dies is started again, and people are told; the other is left alone."""
    script = (
        "if starts < 3: os.kill(os.getpid(), signal.SIGKILL)\nline.end(ConsumerReport(handled=1))"
    )
    assert workers.run(script).handled == 1
    assert len(workers.pids) == 3
    assert len(workers.told) == 2
    for told in workers.told:
        assert told.pop("again_in_s") in (0.0, 0.1)
        assert told.pop("pid") in workers.pids
        died = {"event": "worker_died", "worker": 1, "reason": "died of signal 9 (Killed)"}
        assert told == died


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


@pytest.mark.parametrize("drains", [True, False])
def test_a_users_mistake_ends_it(workers: Workers, drains: bool) -> None:
    """A worker that says three times in a row what is set wrong is believed; none is left over."""
    script = "line.fail('the queue has no name')\nsys.exit(2)"
    with pytest.raises(ConfigError, match="the queue has no name"):
        workers.run(script, drains=drains)
    assert len(workers.pids) == 3
    assert workers.all_gone()


def test_who_cannot_drain(workers: Workers) -> None:
    """To drain what cannot be reached is a failure, and goes on no more than three times."""
    with pytest.raises(OncelyError, match="the broker is away") as raised:
        workers.run("line.fail('the broker is away')\nsys.exit(1)")
    assert not isinstance(raised.value, ConfigError)
    assert len(workers.pids) == 3


def test_stop_is_passed_on(workers: Workers) -> None:
    """Told to stop, workers end in good order, and their last words count."""
    stopping = workers.stop_when(lambda: len(workers.pids) == 2)
    report = workers.run(
        "stop.wait()\nline.end(ConsumerReport(handled=5))", workers=2, drains=False
    )
    stopping.join()
    assert report.handled == 10
    assert workers.told == []


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
from oncely.consuming.supervising import Supervisor
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
