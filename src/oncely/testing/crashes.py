"""Crashes: runs work in a process of its own, which kills itself at a named point."""

import faulthandler
import json
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from tempfile import TemporaryFile
from typing import IO, Any, Never, ParamSpec

from oncely._util import crash_points
from oncely.core.errors import describe
from oncely.core.record import Key
from oncely.stores.memory_store import MemoryStore
from oncely.testing.calls import ASKED_NO_LEDGER, check_handler, result_of, shown_name
from oncely.testing.points import KNOWN, POINTS

P = ParamSpec("P")

_DEADLINE_S = 60.0
"""A process that hangs ends then, for example on a lock that another thread held at the fork."""


def kill_at(point: str, fn: Callable[P, object], /, *args: P.args, **kwargs: P.kwargs) -> None:
    """Call `fn` with the arguments in a process of its own, and kill the process at `point` by
    SIGKILL: the first time that it reaches the point, or with "after_claim:3" the third time.

    `point` is one of oncely's, or a name that `fn` passes to `reached`. `fn` may be async. The
    process is a fork of this one: changes that `fn` makes in memory are lost. Raises AssertionError
    if the process was not killed there: `fn` returned before, raised, or took a minute. Raises
    ConfigError for a text that is not a point.
    """
    __tracebackhide__ = True
    check_handler(fn, f"kill_at({POINTS[0]!r}, charge, message)")
    name, nth = crash_points.told_point(point, "kill_at")
    end = _Forked(name, nth).run(lambda: result_of(fn(*args, **kwargs), "kill_at"))
    if end.is_memory_used:
        raise AssertionError(
            f"kill_at: the ledger of {shown_name(fn)} is in memory, and gone with the process; use "
            'the fixture `ledger`, or a file: "sqlite:///ledger.db"'
        )
    if not end.is_killed:
        error = AssertionError(f"kill_at({point!r}): {_told(end, shown_name(fn))}")
        if end.raised is not None:
            error.add_note(end.raised[1])
        raise error


class _Forked:
    """A process that does work and is killed at a point, with its report to the parent."""

    def __init__(self, point: str, nth: int) -> None:
        self.point = point
        self.nth = nth
        self.status = 0
        """The exit code, or a signal's number, negative."""
        self.is_late = False
        """Whether it was ended because it took too long."""
        self.came_to: list[str] = []
        """The points that it reached, in order."""
        self.raised: Sequence[str] | None = None
        """Its error, as one line, and with the traceback."""
        self.is_memory_used = False
        """Whether a ledger in memory has created a record."""

    def run(self, work: Callable[[], object]) -> "_Forked":
        """Run `work` in the process, and wait for its end."""
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # Else both processes have the buffered output, and both write it.
        with TemporaryFile() as told:
            with warnings.catch_warnings():
                # Of other threads in this process: see the deadline.
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
            if pid == 0:
                self._do(work, told)
            begun = time.monotonic()
            self.status = _status_of(pid)
            self.is_late = time.monotonic() - begun >= _DEADLINE_S
            told.seek(0)
            for line in told:
                match json.loads(line):
                    case {"came_to": name}:
                        self.came_to.append(name)
                    case {"raised": raised}:
                        self.raised = raised
                    case _:
                        self.is_memory_used = True
        return self

    @property
    def is_killed(self) -> bool:
        """Whether it was killed at the point, and not by another signal."""
        return self.status == -signal.SIGKILL and self.came_to.count(self.point) >= self.nth

    def _do(self, work: Callable[[], object], told: IO[bytes]) -> Never:
        pid = os.getpid()

        def tell(**what: object) -> None:
            # A child that the work forks reports nothing, and ends at the end of the work.
            if os.getpid() == pid:
                os.write(told.fileno(), json.dumps(what).encode() + b"\n")

        try:
            faulthandler.dump_traceback_later(_DEADLINE_S, exit=True, file=2)
            insert = MemoryStore.insert

            def told_insert(*args: Any) -> set[Key]:
                tell(memory=True)
                return insert(*args)

            setattr(MemoryStore, "insert", told_insert)  # noqa: B010 - for this process, on purpose.
            crash_points.disarm()
            crash_points.kill_at(self.point, self.nth)
            with crash_points.watched_by(lambda name: tell(came_to=name)):
                work()
        except BaseException as error:  # noqa: BLE001 - a fork never goes on as its parent.
            tell(raised=[describe(error), "".join(traceback.format_exception(error))])
        finally:
            os._exit(0)


def _status_of(pid: int) -> int:
    """How the process has ended. It ends with whatever interrupts the wait for it."""
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise


def _told(end: _Forked, name: str) -> str:
    """Why the process was not killed at the point, in a line."""
    there = "there" if end.nth == 1 else f"there {end.nth} times"
    if end.raised is not None:
        return f"{name} raised {end.raised[0]} before it came {there}"
    if end.is_late:
        return f"{name} took {_DEADLINE_S:.0f} seconds and did not come {there}; see its stderr"
    if end.status < 0:
        return f"{name} was ended by {signal.Signals(-end.status).name}, and not at the point"
    if end.status > 0:
        return f"{name} ended its process with exit code {end.status} before it came {there}"
    passed = list(dict.fromkeys(end.came_to))
    near = get_close_matches(end.point, KNOWN.union(passed) - {end.point}, 1)
    hint = f"; it came to {', '.join(passed)}"
    if not passed:
        hint = f": it {ASKED_NO_LEDGER}"
    elif near and end.point not in KNOWN:
        hint = f"; did you mean {near[0]!r}?"
    elif passed == ["after_claim"]:
        hint = ": the ledger did not grant the message; give each test an id of its own"
    return f"{name} ended without coming {there}{hint}"
