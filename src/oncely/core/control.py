"""What a handler may raise to say what is to become of its message."""

from oncely.core.errors import OncelyError
from oncely.core.policy import Duration, seconds


class Retry(OncelyError):
    """Try this message again.

    `delay` replaces the policy's backoff for this once. Raises ConfigError where it is no duration.
    """

    def __init__(self, reason: str = "", delay: Duration | None = None) -> None:
        super().__init__(reason)
        self.delay_s = None if delay is None else seconds(delay, "delay")


class Reject(OncelyError):
    """This message can never be handled: set it aside with this reason."""


class Unrecoverable(OncelyError):
    """Failed, and no further try can help."""
