"""The process in which a Spark worker's handlers run, with the ledger's calls around them.

It lives as long as the worker, over all its tasks, so that the handlers' connections stay open.
When the worker is gone, the process stops its task: messages that were not begun are released.
"""

import os
import signal
import stat
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import invalidate_caches
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from oncely.spark.handler_process.link import DONE, RAISED, TaskLink, send
from oncely.spark.handler_process.task_context import enter_task
from oncely.spark.modes.open_task import run_task
from oncely.spark.modes.start import Journal, Start, TaskState
from oncely.spark.sink.channel import TaskChannel
from oncely.spark.sink.sink_options import SinkOptions

_LOOK_S = 0.2
_BURY_S = 5.0
_GRACE_S = 60.0
"""How long a handler may go on after its worker is gone."""


class TaskOrder(NamedTuple):
    """A task, and where it begins."""

    name: str
    """The same for all attempts of the task."""
    options: SinkOptions
    context: Mapping[str, Any] | None
    path: Sequence[str]
    """The `sys.path` of Spark's worker."""
    state: TaskState


class HandlerProcess:
    """The worker's handle on the process. Raises OSError if a process cannot be created."""

    def __init__(self) -> None:
        self.journal = Journal()
        self.connection, others = Pipe()
        worker = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                _leave_worker(others)
                _serve(others, self.journal, worker)
            except BaseException:  # noqa: BLE001 - no other code can report it.
                traceback.print_exc()
            finally:
                os._exit(1)
        others.close()
        self._code: int | None = None

    def death(self) -> str | None:
        """How it died; None while it lives."""
        if self._code is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                # SIGCHLD is ignored in this process: the exit code is lost.
                return "ended"
            if pid == 0:
                return None
            self._code = os.waitstatus_to_exitcode(status)
        if self._code >= 0:
            return f"exited with {self._code}"
        names = {each.value: each.name for each in signal.Signals}
        return f"was killed by {names.get(-self._code, f'signal {-self._code}')}"

    def leave(self) -> None:
        """Close the connection, so that the process stops its task, and ends."""
        if not self.connection.closed:
            self.connection.close()

    def buried(self) -> str:
        """Wait for its death, and return how it died; a process without a connection is killed."""
        self.leave()
        deadline = time.monotonic() + _BURY_S
        while (death := self.death()) is None:
            if time.monotonic() > deadline:
                os.kill(self.pid, signal.SIGKILL)
            time.sleep(0.01)
        return death


def _leave_worker(own: Connection) -> None:
    """Close this process's copies of the worker's connections to Spark: while another process has
    them open, Spark does not notice when the worker dies.
    """
    # A signal that ends the worker must not end this process before it has released its claims.
    os.setpgrp()
    nothing = os.open(os.devnull, os.O_RDWR)
    for name in [*Path("/dev/fd").iterdir()]:
        file = int(name.name)
        with suppress(OSError):
            if file not in (own.fileno(), nothing) and stat.S_ISSOCK(os.fstat(file).st_mode):
                # Not closed: Python objects would later close another file of the same number.
                os.dup2(nothing, file)


def _serve(connection: Connection, journal: Journal, worker: int) -> None:
    # Closed in forked children: else the worker would not see this process die.
    os.register_at_fork(
        after_in_child=lambda: os.dup2(os.open(os.devnull, os.O_RDWR), connection.fileno())
    )
    channels: list[TaskChannel] = []
    threading.Thread(target=_watch, args=(worker, channels), daemon=True).start()
    with suppress(EOFError, OSError):
        while True:
            # Pickled, as Spark's own input is.
            order = connection.recv()
            send(connection, _run(order, TaskLink(connection), journal, channels))
    os._exit(0)


def _run(
    order: TaskOrder, link: TaskLink, journal: Journal, channels: list[TaskChannel]
) -> dict[str, Any]:
    """Run a task; return how it ended."""
    journal.clear()
    # For files that were added to the session after this process was forked.
    sys.path[:] = order.path
    invalidate_caches()
    enter_task(order.context)
    options = order.options
    try:
        channel = TaskChannel(options.channel, options.channel_token, order.name)
        channels.append(channel)
        start = Start(**vars(order.state), journal=journal, tell=link.tell, adopt=link.adopt)
        counts = run_task(options, link.add, channel, link.batches(), start)
        return {"is": DONE, "counts": vars(counts)}
    except BaseException as error:  # noqa: BLE001 - it is raised in Spark's worker.
        kind = type(error)
        return {
            "is": RAISED,
            "type": f"{kind.__module__}.{kind.__qualname__}",
            "text": str(error),
            "trace": traceback.format_exc(),
        }
    finally:
        channels.clear()


def _watch(worker: int, channels: Sequence[TaskChannel]) -> None:
    """Stop the running task, by its channel, when the worker is gone."""
    while os.getppid() == worker:
        time.sleep(_LOOK_S)
    deadline = time.monotonic() + _GRACE_S
    while time.monotonic() < deadline:
        for channel in channels:
            channel.stopping.set()
        time.sleep(_LOOK_S)
    os._exit(1)
