"""Health: whether a loop moves, and whether it reaches what it needs."""

import logging
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from oncely.core.errors import describe
from oncely.transports.transport import Clock

_log = logging.getLogger(__name__)

STUCK_S = 60.0
"""A loop that has not come around for so long is stuck. Whatever it waits for takes less."""


class Health(NamedTuple):
    """How one process is."""

    still_s: float
    """For how long its loop has not come around."""
    unready: str | None
    """Why it is not ready to work; None where it is."""

    @property
    def is_live(self) -> bool:
        """Whether the loop moves."""
        return self.still_s < STUCK_S


class Pulse:
    """Feels whether a loop moves, and whether its broker can be reached.

    The loop is that of the thread which makes it; `on_first` is called when it begins to move.
    """

    def __init__(
        self, on_first: Callable[[], object] = lambda: None, *, clock: Clock = time.monotonic
    ) -> None:
        self._on_first: Callable[[], object] | None = on_first
        self._clock = clock
        self._beat_at = clock()
        self._thread = threading.get_ident()
        self._unready: str | None = "the broker has not been reached yet"

    def beat(self) -> None:
        """The loop has come around; calls of other threads do not count."""
        if threading.get_ident() == self._thread:
            self._beat_at = self._clock()
            on_first, self._on_first = self._on_first, None
            if on_first is not None:
                on_first()

    def reached(self) -> None:
        """What the loop needs can be reached."""
        self._unready = None

    def missed(self, error: str) -> None:
        """What the loop needs cannot be reached."""
        self._unready = error

    def health(self) -> Health:
        """How the loop is."""
        return Health(self._clock() - self._beat_at, self._unready)


class Outage:
    """Whether `what`, a broker or a store, is away for the consumer of a queue: logged once, and
    when it is back. Where there is a `pulse`, it feels that.
    """

    def __init__(self, what: str, queue: str, pulse: Pulse | None = None) -> None:
        self._what = what
        self._queue = queue
        self._pulse = pulse
        self._since: float | None = None

    def met(self, error: Exception) -> None:
        """It cannot be reached."""
        if self._pulse is not None:
            self._pulse.missed(f"the {self._what} cannot be reached: {describe(error, 200)}")
        if self._since is None:
            self._since = time.monotonic()
            told = {"queue": self._queue, "error": describe(error, 300)}
            _log.warning(f"{self._what}_is_away", extra=told)

    def over(self) -> None:
        """It was reached."""
        if self._pulse is not None:
            self._pulse.reached()
        if self._since is not None:
            away_s = round(time.monotonic() - self._since, 1)
            self._since = None
            _log.info(f"{self._what}_is_back", extra={"queue": self._queue, "away_s": away_s})
