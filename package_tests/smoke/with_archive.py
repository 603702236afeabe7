"""A record past its retention becomes a line of a Parquet file."""

import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as parquet

import oncely

ledger = oncely.open_ledger("sqlite:///oncely.db")
ledger.migrate()
outcome = ledger.claim(oncely.Key("billing", "order-17"), lease="1m")
assert isinstance(outcome, oncely.Granted)
ledger.complete(outcome.claim)
command = Path(sys.executable).with_name("oncely")
arguments = ["archive", "--ledger", "sqlite:///oncely.db", "--to", "archive", "--older-than", "0s"]
subprocess.run([command, *arguments], check=True, timeout=60)
[file] = Path("archive").rglob("*.parquet")
assert parquet.read_metadata(file).num_rows == 1
