"""Named points in the code: they do nothing, unless a test arms them."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from oncely import crashpoints
from oncely.core.message import Message
from oncely.core.record import Key, State
from oncely.ledger import Ledger, open_ledger
from oncely.once import once
from oncely.testing import killed_at

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


def _armed_program(url: str, point: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", PROGRAM, url]
    environment = {**os.environ, crashpoints.ENVIRONMENT: point}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def test_armed(ledger: Ledger) -> None:
    """An armed point does what it is armed with, each time, and no other point does."""
    seen: list[str] = []
    crashpoints.arm("after_claim", partial(seen.append, "after_claim"))
    handle = once(ledger, consumer="billing", key=lambda message: message.id)(lambda _: None)
    for message_id in ("1", "2"):
        handle(Message(message_id))
    assert seen == ["after_claim"] * 2
    crashpoints.disarm()
    handle(Message("3"))
    assert len(seen) == 2


def test_armed_from_outside(url: str) -> None:
    """A program that knows nothing of it is killed where its environment says, the nth time."""
    ended = _armed_program(url, "after_claim:3")
    assert (ended.returncode, ended.stdout) == (-signal.SIGKILL, "0\n1\n")
    ledger = open_ledger(url)
    assert ledger.counts() == {("billing", State.COMPLETED): 2, ("billing", State.PROCESSING): 1}
    assert _armed_program(url, "before_completed").stdout == "3\n"


@pytest.mark.parametrize("told", ["", ":3", "after_claim:", "after_claim:0", "after_claim:often"])
def test_no_point(url: str, told: str) -> None:
    """What names no point is told with what to write instead."""
    ended = _armed_program(url, told)
    assert ended.returncode == 1
    assert 'write "after_claim", or "after_claim:3"' in ended.stderr


def test_killed_at(url: str) -> None:
    """The work is done in a process of its own, as far as to the point and no further."""
    ledger = open_ledger(url)
    ledger.migrate()

    def work() -> None:
        for number in range(3):
            ledger.claim(Key("billing", str(number)))
            crashpoints.reached("claimed")

    assert killed_at("claimed", work, nth=2)
    assert ledger.counts() == {("billing", State.PROCESSING): 2}
    assert not killed_at("claimed", work, nth=4)
    assert ledger.counts() == {("billing", State.PROCESSING): 3}


def test_work_that_raises(capfd: pytest.CaptureFixture[str]) -> None:
    """Who raises is not taken for done, nor for killed."""
    with pytest.raises(AssertionError, match="the work has raised"):
        killed_at("claimed", lambda: 1 / 0)
    assert "ZeroDivisionError" in capfd.readouterr().err
