"""Handlers for the tests: they run in Spark's Python workers, and write down what they do."""

import asyncio
import json
import os
import signal
import time
from pathlib import Path
from threading import Barrier
from typing import Any

from pyspark import TaskContext
from sqlalchemy import text

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


def describe(message: oncely.Message) -> None:
    """The effect: what the handler was given."""
    assert message.time is not None
    line = {
        "id": message.id,
        "time": message.time.timestamp(),
        "headers": dict(message.headers),
        "body": message.body.hex(),
    }
    with Path(message.source).open("a") as log:
        log.write(json.dumps(line) + "\n")


def slowly(message: oncely.Message) -> None:
    work(message)
    time.sleep(0.002)


def very_slowly(message: oncely.Message) -> None:
    work(message)
    time.sleep(0.02)


def fail_slowly(message: oncely.Message) -> None:
    time.sleep(0.02)
    raise ValueError(f"password=hunter2 of {message.id} is bad")


def fail_first(message: oncely.Message) -> None:
    assert message.claim is not None
    if message.claim.attempts == 1:
        raise ValueError("not yet")
    work(message)


def fail_bad(message: oncely.Message) -> None:
    if message.get("bad"):
        raise ValueError("password=hunter2 is bad")
    work(message)


def reject_bad(message: oncely.Message) -> None:
    if message.get("bad"):
        raise oncely.Reject("nobody to send to")
    work(message)


def spoil_and_reject_bad(message: oncely.Message) -> None:
    """Put a file where the quarantine is; then the same."""
    folder = Path(message.source).with_name("quarantine")
    if folder.is_dir():
        folder.rmdir()
        folder.write_text("no folder")
    reject_bad(message)


def kill_at_bad(message: oncely.Message) -> None:
    work(message)
    if message.get("bad"):
        os.kill(os.getpid(), signal.SIGKILL)


def leave_at_bad(message: oncely.Message) -> None:
    work(message)
    if message.get("bad"):
        os._exit(0)


_MEETING = 8
_met = Barrier(_MEETING)
_waiting: list[asyncio.Event] = []


def meet(message: oncely.Message) -> None:
    """A handler that waits until eight are at work."""
    _met.wait(120)
    work(message)


async def meet_async(message: oncely.Message) -> None:
    _waiting.append(asyncio.Event())
    mine = _waiting[-1]
    if len(_waiting) == _MEETING:
        for event in _waiting:
            event.set()
        _waiting.clear()
    await asyncio.wait_for(mine.wait(), 120)
    work(message)


def sleep_a_while(message: oncely.Message) -> None:
    time.sleep(0.2)
    work(message)


def tell_of_task(message: oncely.Message) -> None:
    """Write down what Spark says of the task, and which process this is."""
    context = TaskContext.get()
    assert context is not None
    told = {
        "id": message.id,
        "partition": context.partitionId(),
        "attempt": context.attemptNumber(),
        "pid": os.getpid(),
        "worker": os.getppid(),
    }
    with Path(message.source).open("a") as log:
        log.write(json.dumps(told) + "\n")


def wait_for_go(message: oncely.Message) -> None:
    work(message)
    go = Path(message.source).with_name("go")
    deadline = time.monotonic() + 120
    while not go.exists() and time.monotonic() < deadline:
        time.sleep(0.01)


def very_slowly_and_wait_at_bad(message: oncely.Message) -> None:
    handle = wait_for_go if message.get("bad") else very_slowly
    handle(message)


class NoSuchAccount(Exception):
    """What is wrong, by its name alone."""


def retry_oddly(message: oncely.Message) -> None:
    if message.get("bad"):
        raise oncely.Retry(delay="soon")
    work(message)


def keep_nan(message: oncely.Message) -> float:
    work(message)
    return float("nan") if message.get("bad") else 1.0


def happened(message: oncely.Message) -> str:
    if message.id == "no answer":
        raise OSError(message.id)
    return str(message.get("finding"))


def batch_happened(batch_key: str) -> str:
    return "happened" if len(batch_key) == 32 else "no batch key"


def batch_down(batch_key: str) -> str:
    raise OSError("no answer")


def book(message: oncely.Message, session: Any) -> None:
    """An effect in the transaction of a session."""
    session.execute(text("INSERT INTO effects (name) VALUES (:name)"), {"name": message.id})
    message.send("receipts", {"for": message.id})


def book_and_kill_at_bad(message: oncely.Message, session: Any) -> None:
    book(message, session)
    if message.get("bad"):
        os.kill(os.getpid(), signal.SIGKILL)


async def book_async(message: oncely.Message, session: Any) -> None:
    await asyncio.sleep(0)
    book(message, session)


def book_and_be_killed(message: oncely.Message, session: Any) -> None:
    """The same; the first attempt of a message kills."""
    book(message, session)
    assert message.claim is not None
    if message.get("breaks") and message.claim.attempts == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def kill_at_bad_slowly(message: oncely.Message) -> None:
    time.sleep(0.01)
    kill_at_bad(message)


def fail_or_kill(message: oncely.Message) -> None:
    """The first attempt of each fails, the next of one kills."""
    assert message.claim is not None
    if message.claim.attempts == 1:
        raise ValueError("not yet")
    kill_at_bad(message)


def mixed(message: oncely.Message) -> None:
    if message.id.startswith("fails"):
        raise oncely.Unrecoverable("no such account")
    if message.id.startswith("waits"):
        raise ValueError("the bank is away")
