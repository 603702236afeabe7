"""Handlers for the tests: they run in Spark's Python workers, and write down what they do."""

import json
import os
import signal
import sys
import time
from pathlib import Path

from pyspark import TaskContext

import oncely


def work(message: oncely.Message) -> int:
    """The effect: one line, written with one call."""
    claim = message.claim
    assert claim is not None
    line = {
        "id": message.id,
        "fence": claim.fence,
        "attempt": claim.attempts,
        "pid": os.getpid(),
        "key": message.idempotency_key,
    }
    log = os.open(message.source, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(log, (json.dumps(line) + "\n").encode())
    finally:
        os.close(log)
    return claim.attempts


def slowly(message: oncely.Message) -> None:
    """An effect that takes a while."""
    work(message)
    time.sleep(0.002)


def fail_first(message: oncely.Message) -> None:
    """Fail at the first attempt of every message."""
    assert message.claim is not None
    if message.claim.attempts == 1:
        raise ValueError("not yet")
    work(message)


def fail_bad(message: oncely.Message) -> None:
    """Fail whenever the body says so."""
    if message.get("bad"):
        raise ValueError("password=hunter2 is bad")
    work(message)


def reject_bad(message: oncely.Message) -> None:
    """Reject whenever the body says so."""
    if message.get("bad"):
        raise oncely.Reject("nobody to send to")
    work(message)


def give_up(message: oncely.Message) -> None:
    """Fail for good, at once."""
    raise oncely.Unrecoverable("no such account")


def break_down(message: oncely.Message) -> None:
    """Let the first attempt of the task break down at one message, by what is no failure of it."""
    if message.get("breaks") and _first_attempt():
        sys.exit("the disk is gone")
    work(message)


def be_killed(message: oncely.Message) -> None:
    """Let the first attempt of the task be killed at one message."""
    if message.get("breaks") and _first_attempt():
        os.kill(os.getpid(), signal.SIGKILL)
    work(message)


def wait_for_go(message: oncely.Message) -> None:
    """Take as long as it takes for a file to appear."""
    work(message)
    go = Path(message.source).with_name("go")
    deadline = time.monotonic() + 60
    while not go.exists() and time.monotonic() < deadline:
        time.sleep(0.01)


def happened(message: oncely.Message) -> str:
    """A probe."""
    return str(message.get("finding"))


def _first_attempt() -> bool:
    context = TaskContext.get()
    return context is not None and context.attemptNumber() == 0
