"""Writers are killed before, in and after their commits, and at random: each batch lands once."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from tests.lake.killed import POINTS, ROWS
from tests.lake.tables import KINDS, Orders

from oncely import lake, open_ledger

BATCHES = int(os.environ.get("ONCELY_TEST_LAKE_KILLS", "15"))
"""Every third of them meets a kill."""


def run(*arguments: object) -> None:
    """Run the program to its end."""
    command = [sys.executable, "-m", "tests.lake.killed", *map(str, arguments)]
    subprocess.run(command, check=True, timeout=120 + BATCHES * 10, cwd=Path(__file__).parents[2])


@pytest.mark.in_turn("writers of a lake are killed")
@pytest.mark.parametrize("kind", KINDS)
def test_killed_handlers(kind: str, tmp_path: Path) -> None:
    """Under `once`, with `lake.probe` for what is in doubt: a second worker does not write a batch
    that landed, and writes one that did not.
    """
    orders = Orders(kind, tmp_path).create()
    open_ledger(f"sqlite:///{tmp_path}/ledger.db").migrate()
    run(kind, tmp_path)
    assert Counter(orders.ids()) == dict.fromkeys(range(len(POINTS)), ROWS)
    calls = Counter(map(int, (tmp_path / "calls").read_text().split()))
    # In the commit of Delta the process dies before or after it takes effect.
    told = dict(zip(POINTS, (calls[number] for number in range(len(POINTS))), strict=True))
    assert told == {"before": 2, "in": told["in"], "after": 1, "before_completed": 1}
    assert kind == "delta" or told["in"] == 2


@pytest.mark.in_turn("writers of a lake are killed")
@pytest.mark.timeout(600 + BATCHES * 20)
@pytest.mark.parametrize("kind", KINDS)
def test_killed_writers(kind: str, tmp_path: Path) -> None:
    """Of two writers that both try all batches, killed at random, one commits each batch, once."""
    orders = Orders(kind, tmp_path).create()
    run(kind, tmp_path, BATCHES, BATCHES // 3)
    assert Counter(orders.ids()) == dict.fromkeys(range(BATCHES), ROWS)
    logs = [(tmp_path / f"writer{writer}").read_text().split() for writer in (0, 1)]
    assert all(told.count("True") <= 1 for told in zip(*logs, strict=True))
    table = orders.load()
    assert all(lake.landed(table, f"batch/{number}") for number in range(BATCHES))
    committed = [told.count("True") for told in logs]
    sys.stderr.write(f"{kind}: {BATCHES // 3} kills; committed by each writer: {committed}\n")
