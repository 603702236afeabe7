"""The example of an SMS: its program run as a user would run it, with files and with servers."""

import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "sms"


def ran(folder: Path, *arguments: str, times: int = 1) -> tuple[str, list[int]]:
    """What the program prints there, as the README shows it, and how often each message leaves."""
    program = Path(shutil.copy(EXAMPLE / "sms.py", folder))
    for _ in range(times):
        done = subprocess.run(
            [sys.executable, program, *arguments], capture_output=True, text=True, check=True
        )
        assert done.stderr == ""
        assert f"```text\n{done.stdout}```" in (EXAMPLE / "README.md").read_text()
    asked = (folder / "out" / "gateway.jsonl").read_text().splitlines()
    return done.stdout, sorted(Counter(json.loads(line)["message"] for line in asked).values())


def test_in_files(tmp_path: Path) -> None:
    """Without a ledger each of four messages leaves twice, with it once; and so again."""
    out, left = ran(tmp_path, times=2)
    customers = [line.split()[3:] for line in out.splitlines()[2:]]
    assert customers == [["SMS", "SMS", "event", "SMS", "SMS", "event"]] * 4
    assert left == 2 * 8 * [1] + 2 * 4 * [2]


def test_on_servers(rabbitmq_url: str, postgresql_url: str, tmp_path: Path) -> None:
    """The same on RabbitMQ, with a ledger on PostgreSQL."""
    _, left = ran(tmp_path, "--transport", rabbitmq_url, "--ledger", postgresql_url)
    assert left == 8 * [1] + 4 * [2]
