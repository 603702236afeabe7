"""Pauses: how long to wait before a retry."""

import math
import time
from collections.abc import Callable

from oncely._util.chance import CHANCE

_LONG_LIFE_S = 60.0
_FIRST_DELAY_S = 0.5
_MOST_DELAY_S = 30.0


def pause_s(
    failures: int, first_s: float, longest_s: float, jitter: Callable[[], float] | None = None
) -> float:
    """Twice as long after each failure but the first, up to a bound.

    Up to half of it is taken away at random, so that those who failed together do not retry
    together. `jitter` gives numbers from 0 to 1.
    """
    chance = CHANCE.random() if jitter is None else jitter()
    # Bounded, because a power of two soon is too large for a float.
    return min(math.ldexp(first_s, min(failures, 16)), longest_s) * (1 + chance) / 2


class Backoff:
    """How long to wait before a process that died is started again.

    Twice as long after each short life; somewhat at random, by `jitter`.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, jitter: Callable[[], float] | None = None
    ) -> None:
        self._clock = clock
        self._jitter = jitter
        self._started_at = self._due_at = clock()
        self._short_lives = 0

    def is_due(self) -> bool:
        """Whether it may be started now."""
        return self._clock() >= self._due_at

    def lived_long(self) -> bool:
        """Whether it worked for a while, as if nothing were wrong with it."""
        return self._clock() - self._started_at >= _LONG_LIFE_S

    def started(self) -> None:
        """Note that it runs from now on."""
        self._started_at = self._clock()

    def died(self) -> float:
        """Note that it has died; return in how many seconds it is due again."""
        if self.lived_long():
            self._short_lives = 0
        delay_s = pause_s(self._short_lives, _FIRST_DELAY_S, _MOST_DELAY_S, self._jitter)
        self._short_lives += 1
        self._due_at = self._clock() + delay_s
        return delay_s
