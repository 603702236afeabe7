"""Outages: that the broker or the store is away is logged once, and when it is back."""

import logging
import time

from oncely.core.errors import describe

_log = logging.getLogger(__name__)


class Outage:
    """Whether `what`, a broker or a store, is away for the consumer of a queue."""

    def __init__(self, what: str, queue: str) -> None:
        self._what = what
        self._queue = queue
        self._since: float | None = None

    def met(self, error: Exception) -> None:
        """It cannot be reached."""
        if self._since is None:
            self._since = time.monotonic()
            told = {"queue": self._queue, "error": describe(error, 300)}
            _log.warning(f"{self._what}_is_away", extra=told)

    def over(self) -> None:
        """It was reached."""
        if self._since is not None:
            away_s = round(time.monotonic() - self._since, 1)
            self._since = None
            _log.info(f"{self._what}_is_back", extra={"queue": self._queue, "away_s": away_s})
