"""What a handler may raise to decide how its message goes on."""

from oncely.core.durations import Duration, seconds
from oncely.core.errors import OncelyError


class Retry(OncelyError):
    """Try this message again.

    `delay` replaces the policy's backoff this once. Raises ConfigError where it is not a duration.
    """

    def __init__(self, reason: str = "", delay: Duration | None = None) -> None:
        super().__init__(reason)
        self.delay_s = None if delay is None else seconds(delay, "delay")


class Reject(OncelyError):
    """This message can never be handled: set it aside with this reason."""


class Unrecoverable(OncelyError):
    """The message has failed, and no retry can help."""


class EffectUnknown(OncelyError):
    """Nobody knows whether the effect has happened: the message is in doubt."""
