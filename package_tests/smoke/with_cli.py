"""The command: a first program, its ledger, tables, JSON, completion."""

import json
import subprocess
import sys
from pathlib import Path

COMMAND = Path(sys.executable).with_name("oncely")


def run(*arguments: str) -> str:
    """What the command prints."""
    return subprocess.run(
        [COMMAND, *arguments], check=True, capture_output=True, text=True, timeout=60
    ).stdout


run("init", "--delivery", "function", "--store", "sqlite", "first")
ledger = ("--ledger", "sqlite:///oncely.db")
run("migrate", *ledger)
assert json.loads(run("status", "--json", *ledger)) is not None
assert run("status", *ledger)
run("check", *ledger)
