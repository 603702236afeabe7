"""Waiting for deferred messages: by looking now and then, and by being told."""

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import psycopg

_LOOK_S = 0.2
"""How often it is looked for what nobody has told."""


class Looking:
    """Looks at the newest number again and again. Its own process tells it at once."""

    def __init__(self, newest: Callable[[], int]) -> None:
        self._newest = newest
        self._seen = 0
        self._told = threading.Condition()

    def wait(self, timeout_s: float) -> None:
        """Return as soon as there is anything that was not there in the last wait."""
        deadline = time.monotonic() + timeout_s
        is_told = False
        while True:
            newest, seen = self._newest(), self._seen
            self._seen = newest
            left_s = deadline - time.monotonic()
            if newest > seen or is_told or left_s <= 0:
                return
            is_told = self._pause(min(left_s, _LOOK_S))

    def tell(self) -> None:
        """This process has deferred something."""
        with self._told:
            self._told.notify_all()

    def start_afresh(self) -> None:
        """Leave connections and locks to the parent: called in a forked child."""
        self._told = threading.Condition()

    def close(self) -> None:
        """Give back connections."""

    def _pause(self, pause_s: float) -> bool:
        """Whether something was told meanwhile."""
        with self._told:
            return self._told.wait(pause_s)


class Listening(Looking):
    """Listens to PostgreSQL as well, which tells what other processes have deferred.

    `listen` gives a connection that does. Each thread that waits has one; between waits they go
    on listening.
    """

    def __init__(
        self, newest: Callable[[], int], listen: Callable[[], "psycopg.Connection[Any]"]
    ) -> None:
        super().__init__(newest)
        self._listen = listen
        self._idle: list[psycopg.Connection[Any]] = []

    def start_afresh(self) -> None:
        super().start_afresh()
        self._idle = []

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    def _pause(self, pause_s: float) -> bool:
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = self._listen()
        try:
            told = list(connection.notifies(timeout=pause_s, stop_after=1))
        except connection.OperationalError:
            # The line is gone, and what was told meanwhile with it.
            connection.close()
            return True
        except BaseException:
            connection.close()
            raise
        self._idle.append(connection)
        return bool(told)
