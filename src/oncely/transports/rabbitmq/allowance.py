"""How many messages the broker may send before any is settled, in all and by their bytes."""

from typing import NamedTuple

_LEARNS = 1 / 32
"""How much of what is known of sizes gives way to the one that was seen last."""
_GROWS = 8
"""By how much at once, at most: it is tried on what few messages have shown."""
_AROUND_BYTES = 500
"""What a message takes here besides what was sent."""


class Bounds(NamedTuple):
    """What may be here unsettled."""

    prefetch: int
    """Messages."""
    prefetch_bytes: int
    max_bytes: int
    """Of one message, as a rule."""


class Allowance:
    """The shares of the consumers of a channel: each is sent so many messages before it settles.

    RabbitMQ bounds messages and not bytes, and the share of a consumer stays as it is. So the first
    is so small that messages of the largest size fit. Another is added when all have been sent, by
    what the sizes seen allow; when messages grow, the last ones are taken back.
    """

    def __init__(self, bounds: Bounds) -> None:
        first = max(1, bounds.prefetch_bytes // bounds.max_bytes)
        self.shares: list[int] = [min(bounds.prefetch, first)]
        self.total = sum(self.shares)
        """How many messages it is in all."""
        self._bounds = bounds
        self._size = float(bounds.max_bytes)
        self._seen = 0

    def see(self, size: int) -> bool:
        """Learn of a message that came; whether it is larger than those before it."""
        self._seen += 1
        above = size + _AROUND_BYTES - self._size
        # The mean of the first ones, and then one that forgets.
        self._size += above * max(_LEARNS, 1 / self._seen)
        return above > 0

    def add(self) -> int:
        """Add a share, where it is worth it; return it, or 0."""
        fitting = self._fitting()
        if fitting < min(2 * self.total, self._bounds.prefetch) or fitting <= self.total:
            return 0
        self.shares.append(min(fitting, _GROWS * self.total) - self.total)
        self.total += self.shares[-1]
        return self.shares[-1]

    def take_back(self) -> list[int]:
        """Take shares away where all are too many by far; return the places of these."""
        fitting = self._fitting()
        places: list[int] = []
        if self.total >= 2 * fitting:
            while len(self.shares) > 1 and self.total > fitting:
                self.total -= self.shares.pop()
                places.append(len(self.shares))
        return places

    def _fitting(self) -> int:
        return max(1, min(self._bounds.prefetch, int(self._bounds.prefetch_bytes / self._size)))
