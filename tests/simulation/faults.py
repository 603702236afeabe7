"""Weather: which calls over the wire go wrong, and when the store or the broker is away."""

import random
from dataclasses import dataclass
from enum import Enum, auto

SLOW_S = 0.1
"""A message that is longer on its way is slow."""


class Wire(Enum):
    """What becomes of one exchange with a server."""

    GOOD = auto()
    REFUSED = auto()
    """The server cannot be reached: nothing was sent."""
    CUT = auto()
    """The line broke before the server had all of it: nothing is done."""
    LATE = auto()
    """The line broke, and the server goes on with what it had: that is done a while later."""
    LOST = auto()
    """It is done, and its reply is lost."""


@dataclass(slots=True)
class Weather:
    """Faults of one kind of server, until they end."""

    draws: random.Random
    likely: float
    """How likely an exchange goes wrong."""
    slow: float
    """How likely it takes long."""
    away_until: float = 0.0
    is_over: bool = False

    def wire(self, now: float) -> Wire:
        """What becomes of the exchange that begins now."""
        if self.is_over:
            return Wire.GOOD
        if now < self.away_until:
            return Wire.REFUSED
        if self.draws.random() >= self.likely:
            return Wire.GOOD
        return self.draws.choice((Wire.REFUSED, Wire.CUT, Wire.LATE, Wire.LOST, Wire.LOST))

    def took_s(self) -> float:
        """How long a message is on its way, in seconds."""
        if not self.is_over and self.draws.random() < self.slow:
            return self.draws.uniform(SLOW_S, 3.0)
        return self.draws.uniform(0.0005, 0.003)

    def end(self) -> None:
        """From now on nothing goes wrong."""
        self.is_over = True
        self.away_until = 0.0
