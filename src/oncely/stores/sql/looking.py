"""Waiting for deferred messages, by looking now and then."""

import threading
import time
from collections.abc import Callable

_LOOK_S = 0.2
"""How often it is looked for what other processes have deferred."""


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

    def _pause(self, pause_s: float) -> bool:
        """Whether something was told meanwhile."""
        with self._told:
            return self._told.wait(pause_s)
