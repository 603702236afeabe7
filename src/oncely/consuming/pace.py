"""Pace: how many messages a consumer takes on, by how long they have lately taken."""

import math
import time
from collections.abc import Sequence

from oncely.consuming.turn import DeliveryTurn
from oncely.core.verdicts import Phase

_LEARNS = 0.3
"""How much of what is known gives way to what was seen last."""
_GROWS = 4
_UNTRIED = 64
"""The largest window of whoever has seen only duplicates lately: what is new may take long."""
_QUICK_S = 0.2
"""A handler that takes less is not waited for by others that could begin elsewhere."""
_WINDOW_S = 0.1
"""What is claimed together is handled in about that time: a killed process leaves no more than that
in doubt, and others find work while a slow handler runs."""


class Pace:
    """How many turns to take on where so many handlers run at a time, at most `most` together."""

    def __init__(self, concurrency: int, most: int) -> None:
        self._concurrency = concurrency
        self._most = most
        self._turn_s: float | None = None
        """Of one turn."""
        self._window = concurrency
        """How many are claimed together."""
        self._ended_at = -math.inf
        """`time.monotonic()` when a quick one has ended last."""

    def learn(self, turns: Sequence[DeliveryTurn]) -> None:
        """What these have taken."""
        if any(turn.took_s < _QUICK_S for turn in turns):
            self._ended_at = time.monotonic()
        took = [turn.took_s for turn in turns if turn.phase > Phase.WAITING]
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
        # Slowly: the first may not be like the others.
        self._window = max(self._window, min(most, _GROWS * self._window))

    def free(self, in_flight: int) -> int:
        """How many more would begin soon: as many as handlers are idle; where they come to their
        ends quickly, any number.
        """
        are_quick = time.monotonic() - self._ended_at < _QUICK_S
        return self._most if are_quick else self._concurrency - in_flight

    def room(self, in_flight: int) -> int:
        """How many more may come."""
        return min(self._window, 2 * self._window - in_flight)
