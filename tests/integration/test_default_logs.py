"""What a program logs that has not set up oncely's log: what happened to which message, and why."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
from oncely import Consumer, Message, open_ledger, open_transport
from oncely.http import github, webhook

ledger = open_ledger("memory://")
receive = webhook(ledger, queue="hooks", verify=github("s" * 20)).receive
receive("POST", {"x-github-delivery": "o-2", "x-hub-signature-256": "sha256=00"}, b"{}")
open_transport("memory://orders").publish("orders", [
    Message("o-1", b"one"), Message("o-1", b"one"), Message("o-1", b"two"), Message("", b"{}"),
    Message("bad", b"{}"),
])

def handle(message):
    if message.id == "bad":
        raise ValueError("the bank said no")

consumer = Consumer("memory://orders", queue="orders").idempotent(ledger, "billing")
consumer.tries(2).backoff("10ms").consume(handler=handle, drain=True)
"""
SET_UP = {
    "nothing": "",
    "plain": "import logging; logging.basicConfig()",
    "uvicorn": "import uvicorn; uvicorn.Config('app')",
    "celery": "from celery import Celery; Celery('shop').log.setup(loglevel='INFO')",
}
SENTENCES = (
    "delivery 'o-2' for queue 'hooks' was refused with 401: ",
    "message 'o-1' is refused: 'o-1' was seen before with other content; it becomes a dead letter",
    "message '' is refused: empty id; it becomes a dead letter",
    "the handler of message 'bad' failed: ValueError: the bank said no; it is tried again in ",
    "the handler of message 'bad' failed: ValueError: the bank said no; it becomes a dead letter",
)


@pytest.mark.parametrize("name", SET_UP)
def test_defaults(name: str, tmp_path: Path) -> None:
    """A line says what happened and why, and has no bare name; only what a handler has raised has
    its traceback, each time once.
    """
    program = f"{SET_UP[name]}\n{PROGRAM}"
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=True, text=True, cwd=tmp_path
    )
    lines = ran.stderr.splitlines()
    for sentence in SENTENCES:
        assert len([line for line in lines if sentence in line]) == 1, (sentence, ran.stderr)
    assert lines.count("ValueError: the bank said no") == 2
    assert ran.stderr.count("Traceback") == 2
