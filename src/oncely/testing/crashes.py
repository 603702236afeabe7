"""Crashes: work that is done in a process of its own, which kills itself at a named point."""

import os
import signal
import traceback
from collections.abc import Callable
from typing import Never

from oncely._util import crash_points as crashpoints


def killed_at(point: str, work: Callable[[], object], nth: int = 1) -> bool:
    """Whether a process that does `work` was killed where it reached `point` the nth time.

    Points are those of `oncely._util.crash_points`, and any that `work` reaches itself. The
    process is a fork of this one, which should have no other threads by then; nothing of it is
    cleaned up.
    Raises AssertionError where `work` raises: its traceback is on stderr.
    """
    pid = os.fork()
    if pid == 0:
        _do(point, work, nth)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status not in (0, -signal.SIGKILL):
        raise AssertionError(f"the work has ended with {status}; what it raised is on stderr")
    return status != 0


def _do(point: str, work: Callable[[], object], nth: int) -> Never:
    status = 1
    try:
        crashpoints.disarm()
        crashpoints.kill_at(point, nth)
        work()
        status = 0
    except BaseException:  # noqa: BLE001 - a fork never goes on as its parent.
        traceback.print_exc()
    finally:
        os._exit(status)
