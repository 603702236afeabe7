"""The allowance: how many messages, and bytes, the broker may send before one is acknowledged."""

from oncely.transports.rabbitmq.url_options import RabbitSettings

_LEARNS = 1 / 32
"""The weight of the last size in the moving average."""
_GROWS = 8
"""The largest factor of one increase, as few messages were seen so far."""
_AROUND_BYTES = 500
"""The memory that a message takes in this process in addition to its bytes."""


class Allowance:
    """How many messages the broker may send to a consumer before it acknowledges.

    RabbitMQ limits messages, not bytes, and the limit of a consumer cannot change. So the first
    limit allows for messages of the largest size; a new consumer gets a limit by the sizes seen.
    """

    def __init__(self, settings: RabbitSettings) -> None:
        self.share = min(settings.prefetch, max(1, settings.prefetch_bytes // settings.max_bytes))
        self._settings = settings
        self._size = float(settings.max_bytes)
        self._seen = 0

    @property
    def fitting(self) -> int:
        """How many messages of the current average size may be unacknowledged."""
        return max(1, min(self._settings.prefetch, int(self._settings.prefetch_bytes / self._size)))

    def see(self, size: int) -> bool:
        """Learn the size of a message; return whether the share is now far too large."""
        self._seen += 1
        above = size + _AROUND_BYTES - self._size
        # The mean of the first sizes, and then a moving average.
        self._size += above * max(_LEARNS, 1 / self._seen)
        return above > 0 and self.share >= 2 * self.fitting and self.share > 1

    def grow(self, held: int, *, is_stuck: bool) -> bool:
        """Set a new share, if it is worth it, in addition to the messages held; return whether it
        is set. A stuck consumer, which can be sent no more, needs a fourth of the present share;
        any other needs half more than the present one.
        """
        share = min(self.fitting, _GROWS * held) - held
        if share < max(1, self.share * (0.25 if is_stuck else 1.5)):
            return False
        self.share = share
        return True
