"""A stream into a table of Delta or Iceberg is killed: program, tasks, driver, and checkpoint."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from tests.lake.tables import KEYS, Orders
from tests.spark.lake_kills import CONSUMER, ROWS
from tests.spark.programs import environment

from oncely import State, open_ledger

BATCHES = int(os.environ.get("ONCELY_TEST_LAKE_KILLS", "0"))


@pytest.mark.in_turn("lake streams are killed")
@pytest.mark.parametrize("kind", KEYS)
def test_killed_streams(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Each row is in the table once, and none is missing; ledger, table and reports agree."""
    orders = Orders(kind, tmp_path).create()
    ledger = open_ledger(f"sqlite:///{tmp_path}/ledger.db")
    ledger.migrate()
    (tmp_path / "input").mkdir()
    for name in ("kills", "reports"):
        (tmp_path / name).touch()
    server = () if BATCHES else (request.getfixturevalue("remote"),)
    told = [kind, str(tmp_path), str(BATCHES or 3), str(BATCHES // 50 or 1), *server]
    command = [sys.executable, "-m", "tests.spark.lake_kills", *told]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[2], env=environment())
    rows = (BATCHES or 3) * ROWS
    assert Counter(orders.ids()) == dict.fromkeys(range(rows), 1)
    assert ledger.counts()[(CONSUMER, State.COMPLETED)] == rows
    assert {state for _, state in ledger.counts()} == {State.COMPLETED}
    kills = Counter((tmp_path / "kills").read_text().split())
    assert kills["checkpoint"] >= (BATCHES // 50 or 1)
    assert not BATCHES or kills.keys() >= {"point", "worker", "moment", "driver"}
    reports = [json.loads(line) for line in (tmp_path / "reports").read_text().splitlines()]
    for report in reports:
        counted = (*report["duplicates"].values(), *report["quarantined"].values())
        assert report["received"] == report["handled"] + sum(counted)
    # A program that is killed at some moment may have settled a batch, and not have told it.
    untold = rows - sum(report["handled"] for report in reports)
    assert 0 <= untold <= ROWS * (kills["moment"] + kills["driver"])
