"""An outage: a trouble that is met again and again, and told when it begins and when it ends."""

import logging
from typing import Any

from oncely._util.clock import monotonic
from oncely._util.event_log import EventLog
from oncely.core.errors import StoreError, TransportError, describe

_EXPECTED = (StoreError, TransportError)
"""Errors that have no place in the program which a traceback could show."""


class Outage:
    """Logs the event `begins` when it is first met, and `ends` when it is over, each with its
    sentence: `%(reason)s` is in the first, `%(away_s)s` in the last. Both have the `values`.

    May be used by several threads. There is no lock, which a signal handler or a fork could find
    taken: two threads that meet it at one moment may both log it.
    """

    def __init__(
        self,
        log: EventLog,
        begins: str,
        sentence: str,
        ends: str,
        last_sentence: str,
        *,
        level: int = logging.WARNING,
        **values: Any,
    ) -> None:
        self._log = log
        self._begins = begins, sentence
        self._ends = ends, last_sentence
        self._level = level
        self._values = values
        self._met_by: dict[str, float] = {}
        """Since when each of those that meet it has met it."""
        self._began_at = 0.0

    @property
    def goes_on(self) -> bool:
        """Whether it has begun, and is not over."""
        return bool(self._met_by)

    def met(self, error: BaseException | str, by: str = "", **values: object) -> None:
        """Note that it goes on. It is over when it is over for everyone that it was met `by`."""
        has_begun = self.goes_on
        now = self._met_by.setdefault(by, monotonic())
        if has_begun:
            return
        self._began_at = now
        event, sentence = self._begins
        told = {"event": event, **self._values, **values, "error": describe(error, 300)}
        is_expected = isinstance(error, (*_EXPECTED, str))
        trace = None if is_expected else error
        self._log.log(self._level, sentence, error=error, exc_info=trace, extra=told, stacklevel=2)

    def over(self, by: str = "") -> None:
        """Note that what has failed before succeeds."""
        if self._met_by.pop(by, None) is None or self._met_by:
            return
        event, sentence = self._ends
        away_s = round(monotonic() - self._began_at, 1)
        told = {"event": event, **self._values, "away_s": away_s}
        # Whoever is shown how it begins is shown how it ends: a program without a configuration of
        # its log, such as Spark's workers, shows warnings.
        self._log.log(min(self._level, logging.WARNING), sentence, extra=told, stacklevel=2)
