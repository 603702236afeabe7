"""The simulation finds bugs: each of those that are planted, within so many seeds."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.simulation import simulated
from tests.simulation.mutants import MUTANTS, SOURCES, Mutant
from tests.turns import is_whole_run

_SEEDS = 3_000


@pytest.mark.in_turn("planted bugs")
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_planted_bug_is_found(mutant: Mutant, tmp_path: Path) -> None:
    """Within 3,000 seeds one fails, by an error that the oracle tells."""
    # With what Python has compiled: else each bug would be looked for after compiling all again.
    shutil.copytree(SOURCES, tmp_path / "oncely", copy_function=os.symlink)
    (tmp_path / "oncely" / mutant.file).unlink()
    (tmp_path / "oncely" / mutant.file).write_text(mutant.text())
    first = 0 if is_whole_run() else mutant.seed
    command = [sys.executable, "-m", "tests.simulation"]
    run = subprocess.run(
        [*command, "--from", str(first), "--seeds", str(_SEEDS - first), "--most", "1"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    failing = [int(seed) for seed in re.findall(r"(?m)^seed (\d+) ", run.stdout)]
    # It is this bug that is found, and nothing else.
    assert any(not simulated(seed).wrongs for seed in failing), run.stdout + run.stderr
