"""The connection between a worker process and its supervisor: it carries reports, lines of the log
and the worker's health, and shows each side when the other is gone.

It is a socket pair. An end closes with its process, however the process dies.
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

from oncely._util.clock import monotonic
from oncely.consumer.health import Health
from oncely.consumer.report import ConsumerReport

_SEND_EVERY_S = 0.2
_LINES_BYTES = 1 << 16


class Lifeline:
    """The worker's end.

    When the supervisor is gone, this process gets SIGTERM, and is killed `grace_s` later: no
    worker outlives its supervisor for long.
    """

    def __init__(self, fd: int) -> None:
        self.grace_s = 0.0
        self._socket = socket.socket(fileno=fd)
        self._sending = threading.Lock()
        self._latest: ConsumerReport | None = None
        self._health: Callable[[], Health] | None = None
        threading.Thread(target=self._watch, name="oncely-lifeline", daemon=True).start()

    def show(self, report: ConsumerReport) -> None:
        """Send the report to the supervisor soon, without waiting for it."""
        self._latest = report

    def show_health(self, health: Callable[[], Health]) -> None:
        """From now on, send the result of `health` to the supervisor."""
        self._health = health

    def log(self, line: str) -> bool:
        """Send a line of the log to the supervisor; return whether there is a supervisor."""
        with self._sending:
            return self._send({"log": line})

    def end(self, report: ConsumerReport) -> None:
        """Send that the work has ended normally, with the final report."""
        self._say_last({"report": asdict(report), "has_ended": True})

    def fail(self, error: str) -> None:
        """Send why this worker cannot go on."""
        self._say_last({"error": error})

    def _say_last(self, words: Mapping[str, Any]) -> None:
        with self._sending:
            self._latest = None
            self._send(words)

    def _watch(self) -> None:
        # The supervisor never sends anything: the socket is readable only when it is gone.
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
        # If the supervisor is gone, `_watch` finds out.
        with suppress(OSError):
            self._socket.sendall(json.dumps(words).encode() + b"\n")
            return True
        return False


class Listener:
    """The supervisor's end: what its worker has sent so far."""

    def __init__(self, ours: socket.socket) -> None:
        ours.settimeout(0)
        self._socket = ours
        self._rest = b""
        self.report = ConsumerReport()
        self.has_ended = False
        """Whether the work has ended normally."""
        self.error: str | None = None
        """Why the worker cannot go on."""
        self.log: list[str] = []
        """Lines of the log that were not taken yet."""
        self._health: Health | None = None
        self._health_at = monotonic()

    @property
    def health(self) -> Health:
        """The worker's health. A worker that is silent for long counts as stuck."""
        silent_s = monotonic() - self._health_at
        if self._health is None:
            return Health(silent_s, "it has not begun yet")
        return self._health._replace(still_s=self._health.still_s + silent_s)

    def listen(self) -> None:
        """Read what the worker has sent since the last call, without waiting."""
        # OSError: there is nothing to read now, or the worker is gone.
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
                self._health, self._health_at = Health(**words["health"]), monotonic()
            self.has_ended = words.get("has_ended", self.has_ended)
            self.error = words.get("error", self.error)

    def close(self) -> None:
        """Close the connection; a worker that lives takes its supervisor for gone."""
        self._socket.close()
