"""The model of the rules, run by spin."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.turns import in_turn

FORMAL = Path(__file__).parents[2] / "formal"
MUTANTS = sorted(set(re.findall(r"\bBUG_(\w+)", (FORMAL / "oncely.pml").read_text())))
MISSING_PROGRAM = 2


@pytest.mark.in_turn("long")
@pytest.mark.timeout(600)
def test_model() -> None:
    """Every mode holds in all that can happen with few faults, and the mutants are caught in one
    mode; `make model` looks at more faults, and at mutants in all their modes.
    """
    mutants = in_turn("mutants of the model", MUTANTS, count=5)
    command = [sys.executable, FORMAL / "check.py", "--small", "--mutants", *mutants]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == MISSING_PROGRAM:
        if os.environ.get("CI", "").lower() in {"1", "true"}:
            pytest.fail(done.stderr)
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stdout + done.stderr
