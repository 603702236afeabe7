"""A worker's memory stays as it is, however many messages it has processed."""

import subprocess
import sys
from pathlib import Path

import pytest

_GROWN_MB = 5.0
_PROGRAM = """
import sys, uuid
from pathlib import Path
from oncely import Key, open_ledger

def memory_mb():
    _, _, told = Path("/proc/self/status").read_text().partition("VmRSS:")
    return int(told.split()[0]) / 1024

ledger = open_ledger(sys.argv[1])
ledger.migrate()
for part in range(8):
    for _ in range(20):
        outcomes = ledger.claim_many([Key("billing", str(uuid.uuid4())) for _ in range(1_000)])
        ledger.complete_many([outcome.claim for outcome in outcomes])
    print(memory_mb())
"""


@pytest.mark.in_turn("long")
def test_memory_is_flat(tmp_path: Path) -> None:
    """With a ledger in a file, whose table grows by thirty megabytes meanwhile."""
    run = subprocess.run(
        [sys.executable, "-c", _PROGRAM, f"sqlite:///{tmp_path}/ledger.db"],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    _, first, *later = map(float, run.stdout.split())
    assert max(later) - first < _GROWN_MB
