"""What receivers wait for."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Bell:
    """What the receivers of one queue wait for: it is rung when there is something to look at."""

    def __init__(self) -> None:
        self._rung = threading.Event()
        self._listeners = 0
        self._lock = threading.Lock()

    @property
    def is_heard(self) -> bool:
        """Whether anybody waits."""
        return self._listeners > 0

    def ring(self) -> None:
        """Have all look who wait."""
        if not self._rung.is_set():
            self._rung.set()

    def wait(self, rest_s: Callable[[], float]) -> None:
        """Wait until it is rung, or for the time that `rest_s` tells."""
        self._rung.clear()
        # What has come before it was cleared is seen by `rest_s`.
        self._rung.wait(rest_s())

    @contextmanager
    def heard(self) -> Iterator[None]:
        """While somebody waits."""
        with self._lock:
            self._listeners += 1
        try:
            yield
        finally:
            with self._lock:
                self._listeners -= 1
