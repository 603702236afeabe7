"""Spark is struck in the midst of work: each mode has the effects that it promises, none lost."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from tests.servers import Postgresql
from tests.spark_faults.check import MODES
from tests.spark_faults.processes import ROOT, Programs
from tests.spark_faults.run import Run
from tests.spark_faults.scenarios import SCENARIOS
from tests.turns import in_turn

MESSAGES = int(os.environ.get("ONCELY_TEST_SPARK_FAULTS", "0"))
"""In each mode, copies included. Not 0: every fault."""
SEED = int(os.environ.get("ONCELY_TEST_SPARK_FAULTS_SEED") or random.randrange(1 << 32))
_FEW = ["one_after_another"]
"""Four faults in one run: most of what a run costs is to start its drivers."""
_FEW_MESSAGES = 200
_MOST_SHOWN = 20


@pytest.mark.in_turn("a Spark of its own")
@pytest.mark.timeout(1800 + MESSAGES)
@pytest.mark.parametrize("scenario", SCENARIOS if MESSAGES else _FEW)
def test_faults(scenario: str, private_postgresql: Postgresql, tmp_path: Path) -> None:
    """Exactly one effect in modes transactional and rows; in mode leased none lost that is not
    told to be in doubt, and none twice that was not in doubt.
    """
    messages = MESSAGES or _FEW_MESSAGES
    with Programs(tmp_path) as programs:
        run = Run(programs, tmp_path, private_postgresql.url, messages, SEED)
        sys.stderr.write(f"{scenario}: ONCELY_TEST_SPARK_FAULTS_SEED={SEED}\n")
        run.tell(modes=in_turn("modes under faults", MODES, 2))
        run.publish()
        SCENARIOS[scenario](run, private_postgresql)
        found = run.faults()
        assert found == [], "\n".join([f"{len(found)} faults", *found[:_MOST_SHOWN]])


def test_checker_stands_alone() -> None:
    """Whoever judges has no part in what is judged."""
    told = "import sys, tests.spark_faults.check; sys.exit('oncely' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", told], cwd=ROOT, check=False).returncode == 0
