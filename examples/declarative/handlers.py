"""The handler: it runs in Spark's Python workers."""

import json
import os
from pathlib import Path

import oncely

SENT = Path(__file__).with_name("sent.jsonl")


def notify(message: oncely.Message) -> None:
    """Send one notification: here, write it down, with one call."""
    line = {"id": message.id, "to": message.get("to"), "text": message.get("text")}
    log = os.open(SENT, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(log, (json.dumps(line) + "\n").encode())
    finally:
        os.close(log)
