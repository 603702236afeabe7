"""Writers are killed before, in and after their commits, and at random: each batch lands once."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from tests.lake.killed import POINTS, ROWS
from tests.lake.tables import KEYS, Orders

from oncely import open_ledger

BATCHES = int(os.environ.get("ONCELY_TEST_LAKE_KILLS", "15"))
pytestmark = [pytest.mark.in_turn("lake writers are killed"), pytest.mark.parametrize("kind", KEYS)]


def run(*arguments: object) -> None:
    command = [sys.executable, "-m", "tests.lake.killed", *map(str, arguments)]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[2])


def test_killed_handlers(kind: str, tmp_path: Path) -> None:
    """Under `once`, with `lake.probe` for what is in doubt: a second worker does not write a batch
    that landed, and writes one that did not.
    """
    orders = Orders(kind, tmp_path).create()
    open_ledger(f"sqlite:///{tmp_path}/ledger.db").migrate()
    run(kind, tmp_path)
    assert Counter(orders.ids()) == dict.fromkeys(range(len(POINTS)), ROWS)


def test_killed_writers(kind: str, tmp_path: Path) -> None:
    """Of two writers that both try all batches, killed at random, one commits each batch, once."""
    orders = Orders(kind, tmp_path).create()
    run(kind, tmp_path, BATCHES, BATCHES // 3)
    assert Counter(orders.ids()) == dict.fromkeys(range(BATCHES), ROWS)
    logs = [(tmp_path / f"writer{writer}").read_text().split() for writer in (0, 1)]
    assert all(told.count("True") <= 1 for told in zip(*logs, strict=True))
