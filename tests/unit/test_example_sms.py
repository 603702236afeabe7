"""The example of an SMS: its program run as a user would run it, with all in files."""

import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "sms"


def test_one_sms(tmp_path: Path) -> None:
    """Without a ledger each of four messages leaves twice, with it once, as the README shows."""
    program = Path(shutil.copy(EXAMPLE / "sms.py", tmp_path))
    for _ in range(2):
        done = subprocess.run([sys.executable, program], capture_output=True, text=True, check=True)
        assert done.stderr == ""
        assert f"```text\n{done.stdout}```" in (EXAMPLE / "README.md").read_text()
        customers = [line.split() for line in done.stdout.splitlines()[2:]]
        assert [row[3:] for row in customers] == [
            ["SMS", "SMS", "event", "SMS", "SMS", "event"],
        ] * 4
    asked = (tmp_path / "out" / "gateway.jsonl").read_text().splitlines()
    times = Counter(json.loads(line)["message"] for line in asked)
    assert sorted(times.values()) == 2 * 8 * [1] + 2 * 4 * [2]
