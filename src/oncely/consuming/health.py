"""Health: whether a loop makes progress, and whether it reaches its broker and its store."""

import logging
import threading
from collections.abc import Callable
from typing import NamedTuple

from oncely._util.clock import monotonic
from oncely.core.errors import describe
from oncely.transports.transport import Clock

_log = logging.getLogger(__name__)

STUCK_S = 60.0
"""A loop without a round for so long is stuck. Every wait in the loop is shorter."""


class Health(NamedTuple):
    """The health of one process."""

    still_s: float
    """Seconds since the last round of its loop."""
    unready: str | None
    """Why it is not ready to work; None if it is ready."""

    @property
    def is_live(self) -> bool:
        """Whether the loop makes progress."""
        return self.still_s < STUCK_S


class Pulse:
    """Records whether a loop makes progress, and whether its broker can be reached.

    The loop runs in the thread that creates the Pulse; `on_first` is called at its first round.
    """

    def __init__(
        self, on_first: Callable[[], object] = lambda: None, *, clock: Clock = monotonic
    ) -> None:
        self._on_first: Callable[[], object] | None = on_first
        self._clock = clock
        self._beat_at = clock()
        self._thread = threading.get_ident()
        self._unready: str | None = "the broker has not been reached yet"

    def beat(self) -> None:
        """Record a round of the loop; calls from other threads do not count."""
        if threading.get_ident() == self._thread:
            self._beat_at = self._clock()
            on_first, self._on_first = self._on_first, None
            if on_first is not None:
                on_first()

    def reached(self) -> None:
        """Record that the loop's broker can be reached."""
        self._unready = None

    def missed(self, error: str) -> None:
        """Record that the loop's broker, or its store, cannot be reached."""
        self._unready = error

    def health(self) -> Health:
        """The health of the loop."""
        return Health(self._clock() - self._beat_at, self._unready)


class Outage:
    """Whether `what`, a broker or a store, is unavailable to the consumer of a queue: logged once,
    and once more when it is back. A `pulse` records it, too.
    """

    def __init__(self, what: str, queue: str, pulse: Pulse | None = None) -> None:
        self._what = what
        self._queue = queue
        self._pulse = pulse
        self._since: float | None = None

    def met(self, error: Exception) -> None:
        """Record that it cannot be reached."""
        if self._pulse is not None:
            self._pulse.missed(f"the {self._what} cannot be reached: {describe(error, 200)}")
        if self._since is None:
            self._since = monotonic()
            told = {"queue": self._queue, "error": describe(error, 300)}
            _log.warning(f"{self._what}_unavailable", extra=told)

    def over(self) -> None:
        """Record that it was reached."""
        if self._pulse is not None:
            self._pulse.reached()
        if self._since is not None:
            away_s = round(monotonic() - self._since, 1)
            self._since = None
            _log.info(f"{self._what}_available", extra={"queue": self._queue, "away_s": away_s})
