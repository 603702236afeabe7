"""How many messages the broker may send before any is settled, in all and by their bytes."""

from oncely.transports.rabbitmq.url_options import RabbitSettings

_LEARNS = 1 / 32
"""How much of what is known of sizes gives way to the one that was seen last."""
_GROWS = 8
"""How many times as many at most: it is tried on what few messages have shown."""
_AROUND_BYTES = 500
"""What a message takes here besides what was sent."""


class Allowance:
    """How many messages a consumer is sent before it settles.

    RabbitMQ bounds messages and not bytes, and a consumer's share stays as it is. So the first is
    so small that messages of the largest size fit; the next, by the sizes seen, is another's.
    """

    def __init__(self, settings: RabbitSettings) -> None:
        self.share = min(settings.prefetch, max(1, settings.prefetch_bytes // settings.max_bytes))
        self._settings = settings
        self._size = float(settings.max_bytes)
        self._seen = 0

    @property
    def fitting(self) -> int:
        """How many messages of the size that is usual now may be here."""
        return max(1, min(self._settings.prefetch, int(self._settings.prefetch_bytes / self._size)))

    def see(self, size: int) -> bool:
        """Learn of a message that came; whether the share is too large by far since then."""
        self._seen += 1
        above = size + _AROUND_BYTES - self._size
        # The mean of the first ones, and then one that forgets.
        self._size += above * max(_LEARNS, 1 / self._seen)
        return above > 0 and self.share >= 2 * self.fitting and self.share > 1

    def grow(self, held: int, *, is_stuck: bool) -> bool:
        """Whether there is another share, besides those that are held, so large that it is worth
        it: a fourth of this one for who is stuck, as none of it can be sent again; else half more.
        """
        share = min(self.fitting, _GROWS * held) - held
        if share < max(1, self.share * (0.25 if is_stuck else 1.5)):
            return False
        self.share = share
        return True

    def shrink(self) -> None:
        """Make it fit."""
        self.share = self.fitting
