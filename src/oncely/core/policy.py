"""Policy: every choice where users differ, with its default, and the presets. Durations."""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from functools import lru_cache
from typing import Any, Literal, get_args

from oncely.core.errors import ConfigError
from oncely.core.message import Message

Duration = timedelta | str
"""What users write for a span of time: a timedelta, or "250ms", "30s", "5m", "2h", "30d"."""

Finding = Literal["happened", "not_happened", "unknown"]
"""What a probe found out about the effect of a claim in doubt."""

Probe = Callable[[Message], Finding]

OnFailed = Literal["retry", "skip", "dead_letter"]
OnBusy = Literal["requeue", "discard"]
OnInDoubt = Literal["retry", "hold", "dead_letter"]
OnOutage = Literal["pause", "run"]
OnMismatch = Literal["dead_letter", "ignore"]
OnMissingId = Literal["dead_letter", "fingerprint", "untracked"]
OnTooOld = Literal["dead_letter", "run"]
Results = Literal["off", "keep"]

_LONGEST_LEASE_S = 1_000 * 366 * 86_400.0
"""Databases' calendars end in the year 9999."""
_UNIT_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?(?:ms|s|m|h|d))+")
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")


def seconds(duration: Duration, what: str = "duration") -> float:
    """The length of `duration` in seconds. Raises ConfigError, which names `what`."""
    length_s: float | None = None
    if isinstance(duration, timedelta):
        length_s = duration.total_seconds()
    elif isinstance(duration, str):
        length_s = _parsed(duration)
    if length_s is None:
        raise ConfigError(f'{what}: {duration!r} is no duration; write "30s", "5m", "2h" or "30d"')
    if length_s < 0:
        raise ConfigError(f"{what}: {duration!r} is negative")
    return length_s


@lru_cache
def _parsed(text: str) -> float | None:
    # Kept, since every claim has a lease.
    if not _DURATION.fullmatch(text):
        return None
    return sum(float(n) * _UNIT_S[unit] for n, unit in _PART.findall(text))


def lease_seconds(lease: Duration) -> float | None:
    """The length of a lease in seconds; None for "none", which never runs out."""
    if lease == "none":
        return None
    length_s = seconds(lease, "lease")
    if length_s > _LONGEST_LEASE_S:
        raise ConfigError(f'lease: {lease!r} is over a thousand years; write "none"')
    if length_s == 0:
        raise ConfigError('lease: a lease of zero runs out at once; write "5m", or "none"')
    return length_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What happens where there is a choice. Raises ConfigError, which names the wrong field."""

    on_failed: OnFailed = "retry"
    """What a redelivery of a failed message meets."""
    tries: int = 5
    """Attempts before a message is exhausted."""
    backoff: Sequence[Duration] | Duration = ("30s", "2m", "5m")
    """Delays between attempts; the last repeats."""
    on_busy: OnBusy = "requeue"
    """Another worker holds a live claim: come back later, or let the delivery go."""
    lease: Duration = "5m"
    """A claim's time limit, extended while the handler runs; "none" holds it for ever."""
    on_in_doubt: OnInDoubt | Probe = "retry"
    """What a claim whose lease ran out leads to; a probe is asked what happened."""
    on_outage: OnOutage = "pause"
    on_mismatch: OnMismatch = "dead_letter"
    """The same id with another payload."""
    on_missing_id: OnMissingId = "dead_letter"
    on_too_old: OnTooOld = "dead_letter"
    retention: Duration = "30d"
    """How long a record is kept after its message was last seen."""
    results: Results = "off"

    def __post_init__(self) -> None:
        _check_choices(self)
        if type(self.tries) is not int or self.tries < 1:
            raise ConfigError(f"tries: {self.tries!r} is no whole number of 1 or more")
        lease_seconds(self.lease)
        seconds(self.retention, "retention")
        if not isinstance(self.delays, Sequence) or not self.delays:
            raise ConfigError('backoff: give a list of delays, such as ["30s", "2m"]')
        for delay in self.delays:
            seconds(delay, "backoff")

    @property
    def lease_s(self) -> float | None:
        """The lease in seconds; None where it never runs out."""
        return lease_seconds(self.lease)

    @property
    def retention_s(self) -> float:
        """How long a record is kept after its message was last seen, in seconds."""
        return seconds(self.retention, "retention")

    @property
    def delays(self) -> Sequence[Duration]:
        """The backoff as a sequence."""
        return (self.backoff,) if isinstance(self.backoff, str | timedelta) else self.backoff

    @property
    def repeats_doubts(self) -> bool:
        """Whether an effect that may have happened is allowed to happen again."""
        return self.on_in_doubt == "retry"

    def is_spent(self, attempts: int) -> bool:
        """Whether no further attempt may follow that many."""
        return attempts >= self.tries

    def delay_s(self, attempts: int) -> float:
        """How long to wait after that many attempts, in seconds."""
        delays = self.delays
        return seconds(delays[min(attempts, len(delays)) - 1], "backoff")


_CHOICES: Mapping[str, tuple[str, ...]] = {
    "on_failed": get_args(OnFailed),
    "on_busy": get_args(OnBusy),
    "on_in_doubt": get_args(OnInDoubt),
    "on_outage": get_args(OnOutage),
    "on_mismatch": get_args(OnMismatch),
    "on_missing_id": get_args(OnMissingId),
    "on_too_old": get_args(OnTooOld),
    "results": get_args(Results),
}
POLICY_FIELDS = tuple(field.name for field in fields(Policy))


def _check_choices(policy: Policy) -> None:
    for name, choices in _CHOICES.items():
        value = getattr(policy, name)
        if value not in choices and not (name == "on_in_doubt" and callable(value)):
            raise ConfigError(f"{name}: {value!r} is none of {', '.join(choices)}")
    if inspect.iscoroutinefunction(policy.on_in_doubt):
        raise ConfigError("on_in_doubt: a probe is called, and not awaited; write it without async")


def at_most_once(**changes: Any) -> Policy:
    """For effects that must never repeat: what failed or is in doubt does not run again."""
    return replace(Policy(on_failed="skip", on_in_doubt="hold"), **changes)


def at_least_once(**changes: Any) -> Policy:
    """For effects that must not be lost: what failed or is in doubt runs again."""
    return replace(Policy(), **changes)


def effectively_once(**changes: Any) -> Policy:
    """For effects that commit together with the claim: failures run again, doubts wait."""
    return replace(Policy(on_in_doubt="hold"), **changes)
