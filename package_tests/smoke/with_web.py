"""The dashboard: served by the command, read over HTTP."""

import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import oncely

ledger = oncely.open_ledger("sqlite:///oncely.db")
ledger.migrate()
outcome = ledger.claim(oncely.Key("billing", "order-17"), lease="1m")
assert isinstance(outcome, oncely.Granted)
command = Path(sys.executable).with_name("oncely")
arguments = ["web", "--ledger", "sqlite:///oncely.db", "--port", "0"]
token = "a-token-of-the-smoke-test"
environment = {**os.environ, "ONCELY_WEB_TOKEN": token}
with subprocess.Popen(
    [command, *arguments], stdout=subprocess.PIPE, text=True, env=environment
) as server:
    assert server.stdout is not None
    url = server.stdout.readline().split()[-1]
    request = urllib.request.Request(url, headers={"authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert b"billing" in answer.read()
    server.send_signal(signal.SIGTERM)
assert server.returncode == 0
