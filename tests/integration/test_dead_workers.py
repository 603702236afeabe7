"""A worker that was declared dead, and is not: it was frozen, and goes on."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from tests.conditions import LIMIT_S, wait_until
from tests.conformance.conftest import ledger_url_of
from tests.records import granted
from tests.turns import in_turn

from oncely import ops
from oncely.core.errors import RefusedError
from oncely.core.record import Key
from oncely.ledger.ledger import Ledger, open_ledger

KEY = Key("billing", "order-17")
PROGRAM = """
import sys, time
from pathlib import Path
from oncely import FencedError, open_ledger, once

ledger, here = open_ledger(sys.argv[1]), Path(sys.argv[2])
ledger.recorder.works_as("program", "billing")

@once(ledger, consumer="billing", key=str)
def charge(order):
    (here / "begun").touch()
    while not (here / "go on").exists():
        time.sleep(0.01)
    (here / "charged").touch()

try:
    charge("order-17")
except FencedError:
    print("fenced")
"""


@pytest.fixture(params=in_turn("dead workers", ["sqlite", "postgresql", "mysql"]))
def ledger(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ledger]:
    """The ledger of a program, which has claimed KEY, and is at work on it."""
    url = ledger_url_of(request.param, request)
    command = [sys.executable, "-c", PROGRAM, url, str(tmp_path)]
    with (
        closing(open_ledger(url)) as opened,
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program,
    ):
        try:
            wait_until((tmp_path / "begun").exists, programs=[program])
            wait_until(lambda: [each.pid for each in opened.operations.workers()])
            yield opened
            (tmp_path / "go on").touch()
            assert program.communicate(timeout=LIMIT_S)[0] == "fenced\n"
            assert (tmp_path / "charged").exists()
        finally:
            program.kill()


@pytest.mark.parametrize("is_taken", [True, False])
def test_frozen_worker(ledger: Ledger, is_taken: bool) -> None:
    """Its claim ends at once, another may take the message, and what the frozen one writes after
    all is refused. Nobody ends the claims of one that lives, unless he is sure.
    """
    [frozen] = ops.workers(ledger)
    os.kill(frozen.worker.pid, signal.SIGSTOP)
    name = frozen.worker.name
    with pytest.raises(RefusedError, match=f"{name} is alive: seen .* until 20.* UTC.* --yes"):
        ops.worker_dead(ledger, name, by="anna")
    ended = ops.worker_dead(ledger, name, is_sure=True, by="anna", why="it hangs")
    assert (ended.done, ended.refused) == ([KEY], [])
    assert ops.worker_dead(ledger, name, is_sure=True, by="ben").done == []
    [doubt] = ops.doubts(ledger, ops.select(ledger, ops.Selection(states=["in doubt"])).records)
    assert doubt.claimed_by == name
    if is_taken:
        claim = granted(ledger.claim(KEY))
        assert (claim.fence, claim.attempts) == (2, 2)
        ledger.complete(claim)
    os.kill(frozen.worker.pid, signal.SIGCONT)
