"""The example of a frozen executor: its program run as a user would run it."""

import shutil
import sys
from collections import Counter
from pathlib import Path

import pytest
from tests.spark_faults.processes import ROOT, Programs

EXAMPLE = ROOT / "examples" / "frozen_executor" / "frozen_executor.py"
MESSAGES = 10


@pytest.mark.in_turn("a Spark of its own")
@pytest.mark.timeout(1800)
def test_what_is_sent_twice(tmp_path: Path, postgresql_url: str) -> None:
    """One partition is sent twice without oncely, nothing with it; and the table says so."""
    program = Path(shutil.copy(EXAMPLE, tmp_path))
    table = tmp_path / "table"
    with Programs(tmp_path) as programs, table.open("wb") as out:
        process = programs.start(sys.executable, program, postgresql_url, str(MESSAGES), stdout=out)
        programs.wait_for(lambda: process.poll() is not None, "the example does not end")
        assert process.returncode == 0, programs.last_words()
    _, without, with_ = (line.split()[2:] for line in table.read_text().splitlines())
    assert without == ["10", "15", "5"]
    assert with_ == ["10", "10", "0"]
    sent = {
        name: Counter(
            line.split()[0] for line in (tmp_path / "out" / name).read_text().splitlines()
        )
        for name in ("without-oncely.log", "with-oncely.log")
    }
    assert sorted(sent["without-oncely.log"].values()) == [1] * 5 + [2] * 5
    assert sorted(sent["with-oncely.log"].values()) == [1] * 10
