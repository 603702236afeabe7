"""Pauses: how long to wait before what has failed is tried again."""

import math
import random
from collections.abc import Callable


def pause_s(
    failures: int,
    first_s: float,
    longest_s: float,
    jitter: Callable[[], float] | None = None,
) -> float:
    """Twice as long after each failure but the first, up to a bound.

    Chance takes away up to half of it: those who have failed together are not to come back
    together. `jitter` gives numbers from 0 to 1.
    """
    chance = random.random() if jitter is None else jitter()  # noqa: S311 - spreads, hides nothing.
    # Bounded, because a power of two soon is too large for a float.
    return min(math.ldexp(first_s, min(failures, 16)), longest_s) * (1 + chance) / 2
