"""Waits for what other threads, tasks and processes do: until a condition holds, never for a time.

The limit only ends a test that would wait for ever; it says nothing of how long something may take.
"""

import asyncio
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import pytest

T = TypeVar("T")

LIMIT_S = 120.0


def wait_until(
    holds: Callable[[], T | None],
    complaint: str | Callable[[], object] = "the condition never held",
    *,
    limit_s: float = LIMIT_S,
    pause_s: float = 0.01,
    programs: Sequence["subprocess.Popen[Any]"] = (),
) -> T:
    """What `holds` returns as soon as it is true. Fails the test with the complaint after the
    limit, and as soon as one of the programs ends on which the condition depends.
    """
    for _ in _pauses(limit_s, complaint):
        if result := holds():
            return result
        for program in programs:
            if program.poll() is not None:
                pytest.fail(f"{program.args!r} has ended: {_told(complaint)}")
        time.sleep(pause_s)
    raise AssertionError


async def wait_until_async(
    holds: Callable[[], T | None],
    complaint: str | Callable[[], object] = "the condition never held",
    *,
    limit_s: float = LIMIT_S,
    pause_s: float = 0.01,
) -> T:
    """The same beside other tasks."""
    for _ in _pauses(limit_s, complaint):
        if result := holds():
            return result
        await asyncio.sleep(pause_s)
    raise AssertionError


def ended_by(process: "subprocess.Popen[Any]", number: int) -> int:
    """The exit status of a process that is sent a signal until it has ended: one that comes while
    the one before is under way is lost.
    """

    def has_ended() -> bool:
        process.send_signal(number)
        return process.poll() is not None

    wait_until(has_ended, pause_s=0.1)
    return int(process.returncode)


def _pauses(limit_s: float, complaint: str | Callable[[], object]) -> Iterator[None]:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        yield
    pytest.fail(_told(complaint))


def _told(complaint: str | Callable[[], object]) -> str:
    return complaint if isinstance(complaint, str) else str(complaint())
