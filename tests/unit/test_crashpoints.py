"""Named points in the code: they do nothing, unless a test arms them."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from oncely._util import crash_points as crashpoints
from oncely.core.record import Key, State
from oncely.ledger import Ledger, open_ledger
from oncely.once import once
from oncely.testing.crashes import killed_at

PROGRAM = """
import sys
import oncely

ledger = oncely.open_ledger(sys.argv[1])
ledger.migrate()

@oncely.once(ledger, consumer="billing", key=lambda number: str(number))
def handle(number):
    print(number, flush=True)

for number in range(5):
    handle(number)
"""


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    """No point stays armed."""
    yield
    crashpoints.disarm()


@pytest.fixture
def url(tmp_path: Path) -> str:
    """The URL of a ledger that processes can share."""
    return f"sqlite:///{tmp_path / 'ledger.db'}"


def _run(point: str, program: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """A program in whose environment the point is armed."""
    command = [sys.executable, "-c", program, *arguments]
    environment = {**os.environ, crashpoints.ENVIRONMENT: point}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def test_armed(ledger: Ledger) -> None:
    """An armed point does what it is armed with, each time, and no other point does."""
    seen: list[str] = []
    crashpoints.arm("after_claim", partial(seen.append, "after_claim"))

    @once(ledger, consumer="billing", key=lambda number: str(number))
    def handle(number: int) -> None:
        seen.append(f"handles {number}")

    handle(1)
    handle(2)
    crashpoints.disarm()
    handle(3)
    assert seen == ["after_claim", "handles 1", "after_claim", "handles 2", "handles 3"]


def test_armed_from_outside(url: str) -> None:
    """A program that knows nothing of it is killed where its environment says, the nth time."""
    ended = _run("after_claim:3", PROGRAM, url)
    assert (ended.returncode, ended.stdout) == (-signal.SIGKILL, "0\n1\n")
    with closing(open_ledger(url)) as ledger:
        counts = ledger.counts()
    assert counts == {("billing", State.COMPLETED): 2, ("billing", State.PROCESSING): 1}


@pytest.mark.parametrize("told", [":3", "after_claim:0", "after_claim:often"])
def test_no_point(told: str) -> None:
    """What names no point is told with what to write instead."""
    ended = _run(told, "import oncely._util.crash_points")
    assert ended.returncode == 1
    assert 'write "after_claim", or "after_claim:3"' in ended.stderr


def test_killed_at(url: str) -> None:
    """The work is done in a process of its own, as far as to the point and no further."""
    with closing(open_ledger(url)) as ledger:
        ledger.migrate()

        def work() -> None:
            for number in range(3):
                ledger.claim(Key("billing", str(number)))
                crashpoints.reached("claimed")

        assert killed_at("claimed", work, nth=2)
        assert ledger.counts() == {("billing", State.PROCESSING): 2}
        assert not killed_at("claimed", work, nth=4)
        assert ledger.counts() == {("billing", State.PROCESSING): 3}


def test_work_that_raises() -> None:
    """Who raises is not taken for done, nor for killed; the error shows where it did."""
    with pytest.raises(AssertionError, match="the work raised ZeroDivisionError") as raised:
        killed_at("claimed", lambda: 1 / 0)
    assert "lambda: 1 / 0" in raised.value.__notes__[0]


def test_watched() -> None:
    """A watcher is told of every point, before what is armed there; nobody is afterwards."""
    seen: list[str] = []
    crashpoints.arm("after_claim", partial(seen.append, "armed"))
    with crashpoints.watched_by(seen.append):
        crashpoints.reached("after_claim")
        crashpoints.reached("debited")
    crashpoints.reached("debited")
    assert seen == ["after_claim", "armed", "debited"]
