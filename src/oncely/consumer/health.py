"""Health: whether a loop makes progress, and whether it reaches its broker and its store."""

import threading
from collections.abc import Callable
from typing import NamedTuple

from oncely._util.clock import monotonic
from oncely._util.event_log import EventLog
from oncely._util.outage import Outage
from oncely.core.errors import describe

_log = EventLog(__name__)

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

    def __init__(self, on_first: Callable[[], object] = lambda: None) -> None:
        self._on_first: Callable[[], object] | None = on_first
        self._beat_at = monotonic()
        self._thread = threading.get_ident()
        self._unready: str | None = "the broker has not been reached yet"

    def beat(self) -> None:
        """Record a round of the loop; calls from other threads do not count."""
        if threading.get_ident() == self._thread:
            self._beat_at = monotonic()
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
        return Health(monotonic() - self._beat_at, self._unready)


class BrokerOutage(Outage):
    """An outage of the broker that has `queue`; `pulse` records it, too."""

    def __init__(self, queue: str, pulse: Pulse | None = None) -> None:
        said = "the broker of queue '%(queue)s' can"
        super().__init__(
            _log,
            "broker_unavailable",
            f"{said}not be reached: %(reason)s; trying again",
            "broker_available",
            f"{said} be reached again after %(away_s)s s",
            queue=queue,
        )
        self._pulse = pulse

    def met(self, error: BaseException | str, by: str = "", **values: object) -> None:
        """Note that the broker cannot be reached."""
        if self._pulse is not None:
            self._pulse.missed(f"the broker cannot be reached: {describe(error, 200)}")
        super().met(error, by, **values)

    def over(self, by: str = "") -> None:
        """Note that the broker was reached."""
        if self._pulse is not None:
            self._pulse.reached()
        super().over(by)
