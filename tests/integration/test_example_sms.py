"""The example of an SMS: its program on RabbitMQ, with a ledger on PostgreSQL."""

import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "sms"


def test_one_sms(rabbitmq_url: str, postgresql_url: str, tmp_path: Path) -> None:
    """As with files: without a ledger four messages leave twice, with it eight leave once."""
    program = Path(shutil.copy(EXAMPLE / "sms.py", tmp_path))
    urls = ["--transport", rabbitmq_url, "--ledger", postgresql_url]
    done = subprocess.run(
        [sys.executable, program, *urls], capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    assert f"```text\n{done.stdout}```" in (EXAMPLE / "README.md").read_text()
    asked = (tmp_path / "out" / "gateway.jsonl").read_text().splitlines()
    times = Counter(json.loads(line)["message"] for line in asked)
    assert sorted(times.values()) == 8 * [1] + 4 * [2]
