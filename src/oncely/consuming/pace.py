"""Pace: how many messages a consumer takes, by how long messages have taken lately."""

import math
from collections.abc import Sequence

from oncely._util.clock import monotonic
from oncely.consuming.turn import DeliveryTurn
from oncely.core.turn import Progress

_LEARNS = 0.3
"""The weight of the last observation in the moving average."""
_GROWS = 4
_UNTRIED = 64
"""The largest window after only duplicates were seen: a new message may take long."""
_QUICK_S = 0.2
"""A handler faster than this is quick: messages may wait for it, and need no other worker."""
_WINDOW_S = 0.1
"""A window is handled in about this time: a killed process leaves no more than that in doubt, and
other workers find work while a slow handler runs."""


class Pace:
    """How many turns to take if so many handlers run at a time, at most `most` together."""

    def __init__(self, concurrency: int, most: int) -> None:
        self._concurrency = concurrency
        self._most = most
        self._turn_s: float | None = None
        """Seconds that one turn takes."""
        self._window = concurrency
        """How many turns are claimed together."""
        self._ended_at = -math.inf
        """`clock.monotonic()` when the last quick turn ended."""

    def learn(self, turns: Sequence[DeliveryTurn]) -> None:
        """Learn from the time that these turns have taken."""
        if any(turn.took_s < _QUICK_S for turn in turns):
            self._ended_at = monotonic()
        took = [turn.took_s for turn in turns if turn.progress > Progress.WAITING]
        if not took:
            self._widen(min(self._most, _UNTRIED))
            return
        mean_s = sum(took) / len(took)
        before_s = mean_s if self._turn_s is None else self._turn_s
        self._turn_s = before_s + _LEARNS * (mean_s - before_s)
        fitting = math.ceil(self._concurrency * _WINDOW_S / max(self._turn_s, 1e-6))
        if fitting > self._window:
            self._widen(min(self._most, fitting))
        else:
            self._window = max(self._concurrency, fitting)

    def _widen(self, most: int) -> None:
        # Slowly: the first turns may differ from the others.
        self._window = max(self._window, min(most, _GROWS * self._window))

    def free(self, in_flight: int) -> int:
        """How many more turns would begin soon: as many as there are idle handlers; any number, if
        handlers end quickly.
        """
        are_quick = monotonic() - self._ended_at < _QUICK_S
        return self._most if are_quick else self._concurrency - in_flight

    def room(self, in_flight: int) -> int:
        """How many more turns may be taken."""
        return min(self._window, 2 * self._window - in_flight)
