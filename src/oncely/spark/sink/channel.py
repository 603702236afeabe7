"""The channel between a pipeline's driver and its tasks: progress up, the word to stop down.

Spark kills a task without a word; a task that holds claims wants to be asked. And the counts of
a batch are added up in a process of Spark's own, from where the pipeline has to hear of them.
"""

import contextlib
import hmac
import json
import logging
import secrets
import threading
import time
from collections.abc import Mapping
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

from oncely.core.errors import OncelyError
from oncely.spark.sink.counts import Counts

_log = logging.getLogger(__name__)

_GO, _STOP, _HEARD = b"go", b"stop", b"heard"
_BACKLOG = 128
_POLL_S = 0.1
_REPORT_EVERY_S = 0.25
_ANSWER_WITHIN_S = 30.0


class Stopped(OncelyError):
    """The task was told to stop. What was done is completed, what was not begun is released."""


class DriverChannel:
    """The driver's end. Counts what tasks report, and tells all of them to stop."""

    def __init__(self, host: str) -> None:
        self.token = secrets.token_hex(16)
        self._listener = Listener((host, 0), backlog=_BACKLOG)
        self._address: tuple[str, int] = self._listener.address
        self._lock = threading.Lock()
        self._open: set[Connection] = set()
        self._tasks: dict[Connection, Counts] = {}
        """What each task of the open batch has come to, also those that have ended."""
        self._committed = Counts()
        self._stopping = False
        self._closed = False
        threading.Thread(target=self._accept, name="oncely-channel", daemon=True).start()

    @property
    def address(self) -> str:
        """host:port, for the sink's option."""
        host, port = self._address
        return f"{host}:{port}"

    def committed(self) -> Counts:
        """What became of the deliveries of all batches that are committed."""
        with self._lock:
            return self._committed

    def progress(self) -> Counts:
        """The same, and what the open batch has come to so far."""
        with self._lock:
            return sum(self._tasks.values(), self._committed)

    def stop(self, grace_s: float) -> None:
        """Tell all tasks to stop; return when they have, or after `grace_s`."""
        with self._lock:
            self._stopping = True
            for connection in self._open:
                _send(connection, _STOP)
        deadline = time.monotonic() + grace_s
        while self._running() and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def close(self) -> None:
        """Accept no further task."""
        if not self._closed:
            self._closed = True
            # Closing alone does not wake the thread that accepts; a late task may have woken it.
            with contextlib.suppress(OSError):
                Client(self._address).close()

    def _running(self) -> int:
        with self._lock:
            return len(self._open)

    def _accept(self) -> None:
        while not self._closed:
            connection = self._listener.accept()
            threading.Thread(target=self._serve, args=[connection], daemon=True).start()
        self._listener.close()

    def _serve(self, connection: Connection) -> None:
        """Serve one task, or turn away who does not know the token. Nobody holds up the others."""
        with connection:
            try:
                if not self._closed and self._greet(connection):
                    self._listen(connection)
            except (EOFError, OSError, ValueError):
                _log.debug("channel_broken")

    def _greet(self, connection: Connection) -> bool:
        if not connection.poll(_ANSWER_WITHIN_S):
            return False
        if not hmac.compare_digest(connection.recv_bytes(), self.token.encode()):
            return False
        with self._lock:
            connection.send_bytes(_STOP if self._stopping else _GO)
            self._open.add(connection)
        return True

    def _listen(self, connection: Connection) -> None:
        try:
            while self._hear(connection, json.loads(connection.recv_bytes())):
                pass
        except (EOFError, OSError):
            with self._lock:
                # It did not come to its end: what it had counted, its next attempt counts.
                self._tasks.pop(connection, None)
            raise
        finally:
            with self._lock:
                self._open.discard(connection)

    def _hear(self, connection: Connection, said: Mapping[str, Any]) -> bool:
        """Take in what a task says; return whether it will say more."""
        counts = Counts(**said["counts"])
        with self._lock:
            if said["is"] == "batch":
                self._committed += counts
                self._tasks.clear()
                connection.send_bytes(_HEARD)
            else:
                self._tasks[connection] = counts
        return bool(said["is"] == "progress")


class TaskChannel:
    """A task's end. Without an address it reports to nobody and is never told to stop.

    Raises OncelyError where there is an address and nobody answers: the driver is gone.
    """

    def __init__(self, address: str | None, token: str) -> None:
        self.stopping = threading.Event()
        self._ended = threading.Event()
        self._connection: Connection | None = None
        self._thread: threading.Thread | None = None
        self._reported_at = 0.0
        if address is not None:
            self._connection, answer = _call(address, token)
            if answer == _STOP:
                self.stopping.set()
            self._thread = threading.Thread(
                target=self._listen, args=[self._connection], name="oncely-channel", daemon=True
            )
            self._thread.start()

    def report(self, counts: Counts) -> None:
        """Say how far the task has come; not more often than the driver looks."""
        now = time.monotonic()
        if self._connection is not None and now - self._reported_at >= _REPORT_EVERY_S:
            self._reported_at = now
            _send(self._connection, _said("progress", counts))

    def raise_if_stopping(self) -> None:
        """Raises Stopped where the task is told to stop."""
        if self.stopping.is_set():
            raise Stopped("the pipeline was told to stop")

    def wait(self, until: float, counts: Counts) -> None:
        """Say how far the task has come, and wait until that moment. Raises Stopped."""
        self.report(counts)
        self.stopping.wait(max(0.0, until - time.monotonic()))
        self.raise_if_stopping()

    def close(self, counts: Counts | None = None) -> None:
        """Hang up; with `counts` where the task has come to its end."""
        if self._connection is None or self._thread is None:
            return
        if counts is not None:
            _send(self._connection, _said("end", counts))
        self._ended.set()
        self._thread.join()
        self._connection.close()

    def _listen(self, connection: Connection) -> None:
        try:
            while not self._ended.is_set():
                if connection.poll(_POLL_S) and connection.recv_bytes() == _STOP:
                    self.stopping.set()
                    return
        except (EOFError, OSError):
            # The driver is gone: nobody will commit what this task still does.
            if not self._ended.is_set():
                self.stopping.set()


def report_batch(address: str, token: str, counts: Counts) -> None:
    """Tell the driver what a committed batch came to. Raises OncelyError when it cannot hear."""
    connection, _ = _call(address, token)
    with connection:
        connection.send_bytes(_said("batch", counts))
        # Once this returns Spark may end the query, and the pipeline reads what it has heard.
        if _answer(connection) != _HEARD:
            raise OncelyError("the pipeline's driver did not hear of a batch")


def _call(address: str, token: str) -> tuple[Connection, bytes]:
    """A connection to the driver, and how it greets."""
    host, _, port = address.rpartition(":")
    try:
        connection = Client((host, int(port)))
        connection.send_bytes(token.encode())
        return connection, _answer(connection)
    except (OSError, EOFError) as error:
        raise OncelyError("the pipeline's driver cannot be reached") from error


def _answer(connection: Connection) -> bytes:
    if not connection.poll(_ANSWER_WITHIN_S):
        raise OncelyError("the pipeline's driver does not answer")
    return connection.recv_bytes()


def _said(what: str, counts: Counts) -> bytes:
    return json.dumps({"is": what, "counts": vars(counts)}).encode()


def _send(connection: Connection, said: bytes) -> None:
    try:
        connection.send_bytes(said)
    except OSError:
        _log.debug("channel_broken")
