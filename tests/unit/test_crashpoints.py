"""Named points in the code: they do nothing, unless a test arms them."""

import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from oncely._util import crash_points as crashpoints
from oncely.core.record import State
from oncely.ledger.ledger import open_ledger

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


def _run(point: str, program: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """A program in whose environment the point is armed."""
    command = [sys.executable, "-c", program, *arguments]
    environment = {**os.environ, crashpoints.ENVIRONMENT: point}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def test_armed_from_outside(tmp_path: Path) -> None:
    """A program that knows nothing of it is killed where its environment says, the nth time."""
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
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
