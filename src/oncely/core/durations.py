"""Durations, as users write them: a timedelta, a number of seconds, or "5m"."""

import re
from datetime import timedelta
from functools import lru_cache

from oncely.core.errors import ConfigError

Duration = timedelta | float | str
"""What users write for a span of time: a timedelta, a number of seconds, or "250ms", "30s", "5m",
"2h", "30d".
"""

_LONGEST_S = 1_000 * 366 * 86_400.0
"""Databases' calendars end in the year 9999: MariaDB stored no retry that was due after it, so that
its handler ran twice.
"""
_BEYOND_TIME_S = 1e12
_UNIT_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?(?:ms|s|m|h|d))+")
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")


def seconds(duration: Duration, what: str = "duration") -> float:
    """The length of `duration` in seconds. Raises ConfigError, which names `what`."""
    length_s = _parsed(duration) if isinstance(duration, str) else _counted(duration)
    if length_s is None:
        raise ConfigError(
            f'{what}: {duration!r} is not a duration: write "30s", "5m", "2h" or "30d"'
        )
    if length_s < 0:
        raise ConfigError(f"{what}: {duration!r} is negative")
    if length_s > _LONGEST_S:
        raise ConfigError(f'{what}: {duration!r} is over a thousand years; write "3650d", or less')
    return length_s


@lru_cache
def _parsed(text: str) -> float | None:
    # Kept, since every claim has a lease.
    if not _DURATION.fullmatch(text):
        return None
    return sum(float(n) * _UNIT_S[unit] for n, unit in _PART.findall(text))


def _counted(duration: object) -> float | None:
    if isinstance(duration, timedelta):
        return duration.total_seconds()
    if isinstance(duration, bool) or not isinstance(duration, int | float):
        return None
    return float(duration) if abs(duration) < _BEYOND_TIME_S else None


def positive_seconds(duration: Duration, what: str, harm: str) -> float:
    """As `seconds`, for a duration that must not be zero. `harm` says what zero would do, and what
    to write instead.
    """
    if length_s := seconds(duration, what):
        return length_s
    raise ConfigError(f"{what}: zero would {harm}")


def lease_seconds(lease: Duration) -> float | None:
    """The length of a lease in seconds; None for "none", which never runs out."""
    if lease == "none":
        return None
    length_s = seconds(lease, "lease")
    if length_s == 0:
        raise ConfigError('lease: a lease of zero runs out at once; write "5m", or "none"')
    return length_s
