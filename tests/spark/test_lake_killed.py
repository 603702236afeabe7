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
    """Each row is in the table once, and none is missing; the ledger, the table and the reports
    agree. Where all is read again, it is known.
    """
    orders = Orders(kind, tmp_path).create()
    batches = BATCHES or 3
    server = () if BATCHES else (request.getfixturevalue("remote"),)
    told = [kind, str(tmp_path), str(batches), str(batches // 50), *server]
    command = [sys.executable, "-m", "tests.spark.lake_kills", *told]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[2], env=environment())
    assert Counter(orders.ids()) == dict.fromkeys(range(batches * ROWS), 1)
    ledger = open_ledger(f"sqlite:///{tmp_path}/ledger.db")
    counts = ledger.counts()
    ledger.close()
    assert counts[(CONSUMER, State.COMPLETED)] == batches * ROWS
    assert {state for _, state in counts} == {State.COMPLETED}
    end = json.loads((tmp_path / "told.json").read_text())
    reports, kills = end["reports"], end["kills"]
    for report in reports:
        counted = (*report["duplicates"].values(), *report["quarantined"].values())
        assert report["received"] == report["handled"] + sum(counted)
    # A program that is killed at some moment may have settled a batch, and not have told it.
    untold = batches * ROWS - sum(report["handled"] for report in reports)
    assert 0 <= untold <= ROWS * (kills.get("moment", 0) + kills.get("driver", 0))
    last = reports[end["last"] :]
    assert sum(report["received"] for report in last) == batches * (ROWS + 2)
    assert sum(sum(report["quarantined"].values()) for report in last) == batches
    assert not any(report["handled"] for report in last)
    assert kills.keys() >= ({"point", "worker", "driver"} if BATCHES else {"point"})
    assert sum(kills.values()) >= batches // 4
