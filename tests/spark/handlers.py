"""Handlers for the tests: they run in Spark's Python workers, and write down what they do."""

import asyncio
import json
import os
import signal
import sys
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
    """An effect that takes a while."""
    work(message)
    time.sleep(0.002)


def very_slowly(message: oncely.Message) -> None:
    """An effect that takes longer still."""
    work(message)
    time.sleep(0.02)


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


def spoil_and_reject_bad(message: oncely.Message) -> None:
    """Put a file where the quarantine is; then the same."""
    folder = Path(message.source).with_name("quarantine")
    if folder.is_dir():
        folder.rmdir()
        folder.write_text("no folder")
    reject_bad(message)


def give_up(message: oncely.Message) -> None:
    """Fail for good, at once."""
    raise oncely.Unrecoverable("no such account")


def be_killed(message: oncely.Message) -> None:
    """Let the first attempt of the task be killed at one message."""
    if message.get("breaks") and _first_attempt():
        os.kill(os.getpid(), signal.SIGKILL)
    work(message)


def kill_at_bad(message: oncely.Message) -> None:
    """The effect, and then the end of the process, whenever the body says so."""
    work(message)
    if message.get("bad"):
        os.kill(os.getpid(), signal.SIGKILL)


def leave_at_bad(message: oncely.Message) -> None:
    """The same without a signal."""
    work(message)
    if message.get("bad"):
        os._exit(0)


def fork_and_exit(message: oncely.Message) -> None:
    """A child that leaves as if it was a program of its own."""
    if os.fork() == 0:
        sys.exit(0)
    work(message)


_MEETING = 8
_met = Barrier(_MEETING)
_waiting: list[asyncio.Event] = []


def meet(message: oncely.Message) -> None:
    """A handler that waits until eight are at work."""
    _met.wait(120)
    work(message)


async def meet_async(message: oncely.Message) -> None:
    """The same by a handler that is async."""
    _waiting.append(asyncio.Event())
    mine = _waiting[-1]
    if len(_waiting) == _MEETING:
        for event in _waiting:
            event.set()
        _waiting.clear()
    await asyncio.wait_for(mine.wait(), 120)
    work(message)


def sleep_a_while(message: oncely.Message) -> None:
    """A handler that waits."""
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
    """Take as long as it takes for a file to appear."""
    work(message)
    go = Path(message.source).with_name("go")
    deadline = time.monotonic() + 120
    while not go.exists() and time.monotonic() < deadline:
        time.sleep(0.01)


def very_slowly_and_wait_at_bad(message: oncely.Message) -> None:
    """An effect that takes long, or as long as it takes for a file to appear."""
    handle = wait_for_go if message.get("bad") else very_slowly
    handle(message)


class NoSuchAccount(Exception):
    """What is wrong, by its name alone."""


class NoRecipient(oncely.Reject):
    """A rejection with a type of its own."""


def reject_by_type(message: oncely.Message) -> None:
    """Reject in ways that say little."""
    raise NoRecipient("nobody") if message.id == "a" else oncely.Reject()


def nest(message: oncely.Message) -> None:
    """Meet a fence that is somebody else's."""
    if message.claim is not None and message.claim.attempts == 1:
        raise oncely.FencedError("an inner claim was lost")
    work(message)


def retry_oddly(message: oncely.Message) -> None:
    """Ask for a delay that is none."""
    if message.get("bad"):
        raise oncely.Retry(delay="soon")
    work(message)


def keep_nan(message: oncely.Message) -> float:
    """Give a result that no JSON holds."""
    work(message)
    return float("nan") if message.get("bad") else 1.0


def act_and_exit(message: oncely.Message) -> None:
    """Have the effect, and then end the process by a wrong way out."""
    work(message)
    if message.get("breaks"):
        sys.exit("done, I thought")


def probe_down(message: oncely.Message) -> str:
    """A probe whose service is away."""
    raise OSError("no answer")


def happened(message: oncely.Message) -> str:
    """A probe."""
    return str(message.get("finding"))


def batch_happened(batch_key: str) -> str:
    """A probe of a batch handler."""
    return "happened" if len(batch_key) == 32 else "no batch key"


def batch_down(batch_key: str) -> str:
    """One whose target is away."""
    raise OSError("no answer")


def _first_attempt() -> bool:
    context = TaskContext.get()
    return context is not None and context.attemptNumber() == 0


def book(message: oncely.Message, session: Any) -> None:
    """An effect in the transaction of a session."""
    session.execute(text("INSERT INTO effects (name) VALUES (:name)"), {"name": message.id})
    message.send("receipts", {"for": message.id})


def book_and_kill_at_bad(message: oncely.Message, session: Any) -> None:
    """The same; a message that kills does so whenever it runs."""
    book(message, session)
    if message.get("bad"):
        os.kill(os.getpid(), signal.SIGKILL)


async def book_async(message: oncely.Message, session: Any) -> None:
    """The same by a handler that is async."""
    await asyncio.sleep(0)
    book(message, session)


def book_and_be_killed(message: oncely.Message, session: Any) -> None:
    """The same; the first attempt of a message kills."""
    book(message, session)
    assert message.claim is not None
    if message.get("breaks") and message.claim.attempts == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def fork_and_be_killed(message: oncely.Message) -> None:
    """A child that lives on, and the end of this process."""
    if message.get("bad") and os.fork() == 0:
        wait_for_go(message)
        os._exit(0)
    work(message)
    if message.get("bad"):
        os.kill(os.getpid(), signal.SIGKILL)


def kill_at_bad_slowly(message: oncely.Message) -> None:
    """While others are at work."""
    time.sleep(0.01)
    kill_at_bad(message)


def fail_or_kill(message: oncely.Message) -> None:
    """The first attempt of each fails, the next of one kills."""
    assert message.claim is not None
    if message.claim.attempts == 1:
        raise ValueError("not yet")
    kill_at_bad(message)
