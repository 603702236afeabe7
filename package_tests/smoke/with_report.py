"""The pages of a ledger as one file."""

import subprocess
import sys
from pathlib import Path

import oncely

ledger = oncely.open_ledger("sqlite:///oncely.db")
ledger.migrate()
outcome = ledger.claim(oncely.Key("billing", "order-17"), lease="1m")
assert isinstance(outcome, oncely.Granted)
ledger.complete(outcome.claim)
command = Path(sys.executable).with_name("oncely")
arguments = ["report", "--ledger", "sqlite:///oncely.db", "--to", "report.html"]
subprocess.run([command, *arguments], check=True, timeout=60)
assert "billing" in Path("report.html").read_text(encoding="utf-8")
