"""The example of a debit: its program run as a user would run it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "debit" / "debit.py"


def _run(program: Path) -> list[str]:
    done = subprocess.run(
        [sys.executable, program], capture_output=True, text=True, check=True, env=os.environ
    )
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_one_debit(tmp_path: Path) -> None:
    """The log fails twice after the money was taken; the bank is asked once, by every run."""
    program = Path(shutil.copy(EXAMPLE, tmp_path))
    receipt = "{'receipt': 'alice-99'}"
    assert _run(program) == [
        "delivery 1: failed: No such file or directory",
        "delivery 2: failed: No such file or directory",
        f"delivery 3: {receipt}",
        f"delivery 4: {receipt}",
        "the bank was asked 1 time(s)",
    ]
    assert _run(program)[-1] == "the bank was asked 1 time(s)"
    bank = (tmp_path / "out" / "bank.jsonl").read_text()
    [asked] = [json.loads(line) for line in bank.splitlines()]
    assert asked["amount"] == 99
    assert len((tmp_path / "out" / "log" / "debits.txt").read_text().splitlines()) == 1
