"""The line between a worker process and its supervisor: it brings reports, lines of the log and how
the worker is, and tells who has gone.

A socket of which each has one end. It closes with its process, however that dies.
"""

import json
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from oncely.consuming.consumer_report import ConsumerReport
from oncely.consuming.health import Health

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
        self._health: Callable[[], Health] | None = None
        threading.Thread(target=self._watch, name="oncely-lifeline", daemon=True).start()

    def show(self, report: ConsumerReport) -> None:
        """Let the supervisor know soon; never waits for it."""
        self._latest = report

    def show_health(self, health: Callable[[], Health]) -> None:
        """From now on, let the supervisor know what `health` says."""
        self._health = health

    def log(self, line: str) -> bool:
        """Hand over a line of the log, for the supervisor to write; whether that is there."""
        with self._sending:
            return self._send({"log": line})

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
                if self._health is not None:
                    self._send({"health": self._health()._asdict()})
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(self.grace_s)
        os.kill(os.getpid(), signal.SIGKILL)

    def _send(self, words: Mapping[str, Any]) -> bool:
        # Where nobody listens any more, `_watch` finds out.
        with suppress(OSError):
            self._socket.sendall(json.dumps(words).encode() + b"\n")
            return True
        return False


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
        self.log: list[str] = []
        """Lines that nobody has taken from here yet."""
        self._health: Health | None = None
        self._health_at = time.monotonic()

    @property
    def health(self) -> Health:
        """How the worker is. One that says nothing for long moves no more."""
        silent_s = time.monotonic() - self._health_at
        if self._health is None:
            return Health(silent_s, "it has not begun yet")
        return self._health._replace(still_s=self._health.still_s + silent_s)

    def listen(self) -> None:
        """Take in what has been said since; waits for nothing."""
        # OSError: nothing more is there now, or the worker has gone.
        with suppress(OSError):
            while heard := self._socket.recv(_LINES_BYTES):
                self._rest += heard
        *lines, self._rest = self._rest.split(b"\n")
        for line in lines:
            words = json.loads(line)
            if "log" in words:
                self.log.append(words["log"])
            if "report" in words:
                self.report = ConsumerReport(**words["report"])
            if "health" in words:
                self._health, self._health_at = Health(**words["health"]), time.monotonic()
            self.has_ended = words.get("has_ended", self.has_ended)
            self.error = words.get("error", self.error)

    def close(self) -> None:
        """Let go of the line; a worker that lives takes it that its supervisor has gone."""
        self._socket.close()
