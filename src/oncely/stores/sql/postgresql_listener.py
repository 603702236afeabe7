"""Listening: a separate connection on which PostgreSQL notifies that messages have come."""

import logging
import select
import socket
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from typing import Any

import psycopg

from oncely._util.clock import monotonic
from oncely._util.event_log import EventLog
from oncely._util.outage import Outage

_log = EventLog(__name__)

_IDLE_S = 30.0
"""Listening ends when nobody has waited for so long."""
_AGAIN_S = 5.0
"""How long after its last beginning listening may begin again."""

_Session = psycopg.Connection[tuple[Any, ...]]
Connect = Callable[[], AbstractContextManager[_Session]]


class PostgresqlListener:
    """Listens on a channel while somebody waits, and then calls `notify`."""

    def __init__(self, connect: Connect, channel: str, notify: Callable[[], None]) -> None:
        self._connect = connect
        self._channel = channel
        self._notify = notify
        self._outage = Outage(
            _log,
            "listening_ended",
            "PostgreSQL does not notify of messages: %(reason)s; the ledger is polled",
            "listening_resumed",
            "PostgreSQL notifies of messages again after %(away_s)s s",
            level=logging.INFO,
        )
        self.start_afresh()

    def start_afresh(self) -> None:
        """Leave the connection to the parent: called in a forked child."""
        self.is_listening = False
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._wake: socket.socket | None = None
        self._asked_at = 0.0
        self._begin_at = 0.0

    def begin(self) -> None:
        """Listen from now on, for as long as this is called now and then."""
        self._asked_at = monotonic()
        if self._thread is not None and self._thread.is_alive():
            return
        with self._lock:
            is_begun = self._thread is not None and self._thread.is_alive()
            if is_begun or monotonic() < self._begin_at:
                return
            self._begin_at = monotonic() + _AGAIN_S
            wake, woken = socket.socketpair()
            thread = threading.Thread(
                target=self._listen, args=(woken,), name="oncely-listening", daemon=True
            )
            try:
                thread.start()
            except RuntimeError:
                # Without one, messages are found by looking for them.
                wake.close()
                woken.close()
                return
            if self._wake is not None:
                self._wake.close()
            self._thread, self._wake = thread, wake

    def close(self) -> None:
        """Stop listening, until `begin` is called again."""
        with self._lock:
            thread, self._thread, self._begin_at = self._thread, None, 0.0
            if self._wake is not None:
                self._wake.close()
                self._wake = None
        if thread is not None:
            thread.join()

    def _listen(self, woken: socket.socket) -> None:
        try:
            with closing(woken), self._connect() as connection:
                found = connection.execute("SELECT pg_backend_pid()").fetchone()
                if found != (connection.info.backend_pid,):
                    # Behind a pooler no notification would come: the session has other users.
                    self._begin_at = float("inf")
                    return
                connection.execute(f'LISTEN "{self._channel}"')
                self.is_listening = True
                self._outage.over()
                # Notifications before the LISTEN are lost.
                self._notify()
                while monotonic() - self._asked_at < _IDLE_S:
                    those = [connection.fileno(), woken.fileno()]
                    readable, _, _ = select.select(those, [], [], _IDLE_S)
                    if woken.fileno() in readable:
                        return
                    for _ in connection.notifies(timeout=0):
                        self._notify()
        except (psycopg.Error, OSError) as error:
            self._outage.met(str(error).partition("\n")[0])
        finally:
            self.is_listening = False
