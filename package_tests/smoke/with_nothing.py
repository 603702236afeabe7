"""The package alone: a ledger in a file, a consumer, and a command that says what it wants."""

import subprocess
import sys
from pathlib import Path

import oncely

ledger = oncely.open_ledger("sqlite:///oncely.db")
ledger.migrate()
transport = oncely.open_transport("sqlite:///oncely.db")
transport.publish("orders", [oncely.Message("order-17", b"{}")] * 2)
transport.close()
consumer = oncely.Consumer("sqlite:///oncely.db", "orders").idempotent(ledger, "billing")
report = consumer.consume(lambda message: None, drain=True)
assert (report.handled, report.duplicates) == (1, 1), report

# The command's own packages are an extra, and it says which.
oncely_command = Path(sys.executable).with_name("oncely")
ended = subprocess.run(
    [oncely_command, "status", "--ledger", "sqlite:///oncely.db"],
    capture_output=True,
    text=True,
    check=False,
)
assert ended.returncode == 2, ended
assert "pip install 'oncely[cli]'" in ended.stderr, ended
assert len(ended.stderr.splitlines()) == 1, ended
