"""A worker in a process of its own, whose machine's clock may be wrong."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from oncely.core.commands import Granted
from oncely.core.record import Claim, Key
from oncely.ledger.ledger import Ledger, open_ledger

ROOT = Path(__file__).parents[2]
CONSUMER = "clocks"


class Worker:
    """Asks for claims when it is told to."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def time(self) -> float:
        """What its machine's clock says."""
        return float(self._ask("time"))

    def claim(self, message_id: str, lease: str) -> str:
        """What its claim is answered with: the name of the outcome."""
        return self._ask(f"claim {message_id} {lease}")

    def extend(self, message_id: str, lease: str) -> str:
        """Extend the claim that it was granted."""
        return self._ask(f"extend {message_id} {lease}")

    def _ask(self, line: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().strip()


@contextmanager
def misled_worker(url: str, offset: str) -> Iterator[Worker]:
    """A worker whose clock is off by "+2h" or the like, for as long as the block."""
    environment = {
        **os.environ,
        "LD_PRELOAD": _library(),
        "FAKETIME": offset,
        # Timeouts go by this clock, which no wrong date changes.
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }
    with subprocess.Popen(
        [sys.executable, "-m", "tests.integration.misled", url],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield Worker(process)
        finally:
            process.kill()


def _library() -> str:
    """What misleads a process. Skips the test where it is missing, and fails it in CI."""
    for library in sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1")):
        return str(library)
    why = "libfaketime is not installed; type: apt-get install libfaketime"
    if os.environ.get("CI", "").lower() in {"1", "true"}:
        pytest.fail(why)
    pytest.skip(why)


def _answer(ledger: Ledger, line: str) -> str:
    match line.split():
        case ["claim", message_id, lease]:
            outcome = ledger.claim(Key(CONSUMER, message_id), lease)
            if isinstance(outcome, Granted):
                _claims[message_id] = outcome.claim
            return type(outcome).__name__
        case ["extend", message_id, lease]:
            ledger.extend(_claims[message_id], lease)
            return "extended"
        case _:
            return str(time.time())


_claims: dict[str, Claim] = {}

if __name__ == "__main__":
    _ledger = open_ledger(sys.argv[1])
    for _line in sys.stdin:
        sys.stdout.write(f"{_answer(_ledger, _line)}\n")
        sys.stdout.flush()
