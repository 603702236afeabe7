"""TimeLimit: cancels an async handler that takes too long; the attempt has failed."""

import asyncio
from collections.abc import Callable
from typing import Any

from oncely.core.durations import Duration, seconds
from oncely.core.errors import ConfigError
from oncely.core.message import Message
from oncely.lifecycle.wrapping import is_async, name_of
from oncely.middleware.chain import CallNext


class TimeLimit:
    """Cancels a handler after `limit`, and raises TimeoutError: a failed attempt.

    Raises ConfigError for a wrong duration and, when its chain is made, around a handler that is
    not async.
    """

    def __init__(self, limit: Duration) -> None:
        self._limit = limit
        self._limit_s = seconds(limit, "limit")
        if self._limit_s == 0:
            raise ConfigError('limit: a limit of zero stops every handler; write "30s"')

    def check_handler(self, handler: Callable[..., Any]) -> None:
        """Refuse a handler that runs in a thread."""
        if not is_async(handler):
            raise ConfigError(
                f"TimeLimit: {name_of(handler)} is not async, and a thread cannot be stopped: it "
                "would go on beside its next attempt; write it as `async def`, or give what it "
                "calls a timeout"
            )

    async def __call__(self, message: Message, call_next: CallNext) -> Any:
        """Call the rest of the chain, for at most `limit`."""
        try:
            async with asyncio.timeout(self._limit_s) as timing:
                return await call_next(message)
        except TimeoutError as error:
            if not timing.expired():
                raise
            raise TimeoutError(f"the handler took longer than {self._limit}") from error
