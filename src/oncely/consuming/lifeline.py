"""The line between a worker process and its supervisor: it brings reports, and tells who has gone.

A socket of which each has one end. It closes with its process, however that dies.
"""

import json
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from oncely.consuming.consumer_report import ConsumerReport

_SEND_EVERY_S = 0.2
_LINES_BYTES = 1 << 16


class Lifeline:
    """A worker's end.

    When the supervisor has gone, this process is told to stop by SIGTERM, and `grace_s` later it
    is killed: no worker outlives its supervisor for long.
    """

    def __init__(self, fd: int) -> None:
        self.grace_s = 0.0
        self._socket = socket.socket(fileno=fd)
        self._sending = threading.Lock()
        self._latest: ConsumerReport | None = None
        threading.Thread(target=self._watch, name="oncely-lifeline", daemon=True).start()

    def show(self, report: ConsumerReport) -> None:
        """Let the supervisor know soon; never waits for it."""
        self._latest = report

    def end(self, report: ConsumerReport) -> None:
        """Say that the work has ended in good order, and the final report."""
        self._say_last({"report": asdict(report), "has_ended": True})

    def fail(self, error: str) -> None:
        """Say why this worker cannot go on."""
        self._say_last({"error": error})

    def _say_last(self, words: Mapping[str, Any]) -> None:
        with self._sending:
            self._latest = None
            self._send(words)

    def _watch(self) -> None:
        # The supervisor never says anything: what can be read is that it has gone.
        while not select.select([self._socket], [], [], _SEND_EVERY_S)[0]:
            with self._sending:
                latest, self._latest = self._latest, None
                if latest is not None:
                    self._send({"report": asdict(latest)})
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(self.grace_s)
        os.kill(os.getpid(), signal.SIGKILL)

    def _send(self, words: Mapping[str, Any]) -> None:
        # Where nobody listens any more, `_watch` finds out.
        with suppress(OSError):
            self._socket.sendall(json.dumps(words).encode() + b"\n")


class Listener:
    """A supervisor's end: what its worker has said so far."""

    def __init__(self, ours: socket.socket) -> None:
        ours.settimeout(0)
        self._socket = ours
        self._rest = b""
        self.report = ConsumerReport()
        self.has_ended = False
        """Whether the work has ended in good order."""
        self.error: str | None = None
        """Why the worker cannot go on."""

    def listen(self) -> None:
        """Take in what has been said since; waits for nothing."""
        # OSError: nothing more is there now, or the worker has gone.
        with suppress(OSError):
            while heard := self._socket.recv(_LINES_BYTES):
                self._rest += heard
        *lines, self._rest = self._rest.split(b"\n")
        for line in lines:
            words = json.loads(line)
            if "report" in words:
                self.report = ConsumerReport(**words["report"])
            self.has_ended = words.get("has_ended", self.has_ended)
            self.error = words.get("error", self.error)

    def close(self) -> None:
        """Let go of the line; a worker that lives takes it that its supervisor has gone."""
        self._socket.close()
