"""The channel between a pipeline's driver and its tasks: progress up, the word to stop down.

Spark kills a task without a word; a task that holds claims wants to be asked. And the counts of
a batch are added up in a process of Spark's own, from where the pipeline has to hear of them.
"""

import json
import logging
import secrets
import threading
import time
from collections.abc import Mapping
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

from oncely.core.errors import OncelyError
from oncely.spark.counts import Counts

_log = logging.getLogger(__name__)

_STOP = b"stop"
_HEARD = b"heard"
_POLL_S = 0.1
_REPORT_EVERY_S = 0.25
_HEARD_WITHIN_S = 30.0


class DriverChannel:
    """The driver's end. Counts what tasks report, and tells all of them to stop."""

    def __init__(self, host: str) -> None:
        self.token = secrets.token_hex(16)
        self._listener = Listener((host, 0), authkey=self.token.encode())
        self._lock = threading.Lock()
        self._tasks: dict[Connection, Counts] = {}
        self._open = 0
        self._committed = Counts()
        self._stopping = False
        threading.Thread(target=self._accept, name="oncely-channel", daemon=True).start()

    @property
    def address(self) -> str:
        """host:port, for the sink's option."""
        host, port = self._listener.address
        return f"{host}:{port}"

    def committed(self) -> Counts:
        """What became of the deliveries of all batches that are committed."""
        with self._lock:
            return self._committed

    def progress(self) -> Counts:
        """The same, and what the open batch has come to so far."""
        with self._lock:
            total = Counts()
            total.add(self._committed)
            for counts in self._tasks.values():
                total.add(counts)
            return total

    def stop(self, grace_s: float) -> None:
        """Tell all tasks to stop; return when they have, or after `grace_s`."""
        with self._lock:
            self._stopping = True
            for connection in self._tasks:
                _send(connection, _STOP)
        deadline = time.monotonic() + grace_s
        while self._running() and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def close(self) -> None:
        """Accept no further task."""
        self._listener.close()

    def _running(self) -> int:
        with self._lock:
            return self._open

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
            except (AuthenticationError, EOFError, ConnectionError):
                continue
            except OSError:
                return  # closed
            with self._lock:
                self._open += 1
                self._tasks[connection] = Counts()
                if self._stopping:
                    _send(connection, _STOP)
            threading.Thread(target=self._listen, args=[connection], daemon=True).start()

    def _listen(self, connection: Connection) -> None:
        try:
            while True:
                self._hear(connection, json.loads(connection.recv_bytes()))
        except (EOFError, OSError):
            connection.close()
            with self._lock:
                self._open -= 1

    def _hear(self, connection: Connection, said: Mapping[str, Any]) -> None:
        counts = Counts.from_dict(said["counts"])
        with self._lock:
            if said["is"] == "progress":
                self._tasks[connection] = counts
            else:
                self._committed = _sum(self._committed, counts)
                self._tasks.clear()
                _send(connection, _HEARD)


class TaskChannel:
    """A task's end. Without an address it reports to nobody and is never told to stop."""

    def __init__(self, address: str | None, token: str) -> None:
        self.stopping = threading.Event()
        self._connection = _connect(address, token) if address else None
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._reported_at = 0.0
        if self._connection is not None:
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

    def close(self, counts: Counts) -> None:
        """Report a last time and hang up."""
        if self._connection is None or self._thread is None:
            return
        _send(self._connection, _said("progress", counts))
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
            self.stopping.set()


def report_batch(address: str, token: str, counts: Counts) -> None:
    """Tell the driver what a committed batch came to. Raises OncelyError when it cannot hear."""
    connection = _connect(address, token)
    if connection is None:
        raise OncelyError("the pipeline's driver cannot be reached to report a batch")
    with connection:
        _send(connection, _said("batch", counts))
        # Once this returns Spark may end the query, and the pipeline reads what it has heard.
        if not connection.poll(_HEARD_WITHIN_S) or connection.recv_bytes() != _HEARD:
            raise OncelyError("the pipeline's driver did not hear of a batch")


def _connect(address: str, token: str) -> Connection | None:
    host, _, port = address.rpartition(":")
    try:
        return Client((host, int(port)), authkey=token.encode())
    except (OSError, EOFError, AuthenticationError):
        _log.warning("channel_unreachable")
        return None


def _said(what: str, counts: Counts) -> bytes:
    return json.dumps({"is": what, "counts": counts.as_dict()}).encode()


def _send(connection: Connection, said: bytes) -> None:
    try:
        connection.send_bytes(said)
    except OSError:
        _log.debug("channel_broken")


def _sum(one: Counts, other: Counts) -> Counts:
    total = Counts()
    total.add(one)
    total.add(other)
    return total
