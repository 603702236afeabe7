"""Policy: every choice where users differ, with its default, and the presets."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, cast, get_args

from oncely.core.durations import Duration, lease_seconds, seconds
from oncely.core.errors import ConfigError
from oncely.core.message import Message
from oncely.core.unanswered import Unanswered

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
OnUnknownType = Literal["wait", "dead_letter"]
Results = Literal["off", "keep"]
CountDuplicates = Literal["each", "daily"]


class _UsualTries(int):
    """The default number of tries: its type says that nobody has set it."""


DEAD_RETENTION: Duration = "90d"
"""How long dead letters and entries of the audit are kept, of all consumers."""
_USUAL_BACKOFF: Sequence[Duration] = ("30s", "2m", "5m")


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What happens where there is a choice. Raises ConfigError, which names the wrong field."""

    on_failed: OnFailed = "retry"
    """What happens when a failed message is delivered again."""
    tries: int | None = _UsualTries(5)
    """Attempts before a message is exhausted; None: no limit. Where the caller itself retries, as
    with `once`, there is no limit unless one is set."""
    backoff: Sequence[Duration] | Duration = _USUAL_BACKOFF
    """Delays between attempts; the last repeats."""
    on_busy: OnBusy = "requeue"
    """Another worker holds a live claim: requeue the delivery, or acknowledge it."""
    lease: Duration = "5m"
    """A claim's time limit, extended while the handler runs; "none" holds it for ever."""
    on_in_doubt: OnInDoubt | Probe = "retry"
    """What happens to a message whose claim ran out. A probe is a function that finds out whether
    the effect happened."""
    in_doubt_on: tuple[type[BaseException], ...] = ()
    """Exceptions of a handler after which nobody knows whether the effect happened: `on_in_doubt`
    decides at once, instead of a retry. `EffectUnknown` is always one of them."""
    on_outage: OnOutage = "pause"
    """The ledger cannot be reached: wait for it, or run the handler without a claim."""
    on_mismatch: OnMismatch = "dead_letter"
    """The same id with another payload."""
    on_missing_id: OnMissingId = "dead_letter"
    """A message without an id: refuse it, identify it by its payload, or run it without a claim."""
    on_too_old: OnTooOld = "dead_letter"
    """A message without a record that was sent before the horizon: the ledger may have forgotten
    its record."""
    on_unknown_type: OnUnknownType = "wait"
    """No handler here takes messages of its type: another version may, while one is deployed."""
    wait_unknown: Duration = "15m"
    """How long a message of an unknown type waits before it becomes a dead letter."""
    retention: Duration = "30d"
    """How long a record is kept after its message was last seen; a purge removes older records."""
    results: Results = "off"
    """Whether a handler's result is kept, as JSON, and given to duplicates."""
    count_duplicates: CountDuplicates = "each"
    """Whether a completed record counts each duplicate, and when it came, or only the first of a
    day: then most duplicates cost no write."""

    def __post_init__(self) -> None:
        _check_choices(self)
        _check_tries(self.tries)
        kinds: Any = self.in_doubt_on
        if kinds != () and not (isinstance(kinds, tuple) and all(map(inspect.isclass, kinds))):
            raise ConfigError(f"in_doubt_on: {kinds!r} is not (TimeoutError,), or other exceptions")
        lease_seconds(self.lease)
        seconds(self.retention, "retention")
        seconds(self.wait_unknown, "wait_unknown")
        if not self.delays:
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
        if isinstance(self.backoff, str) or not isinstance(self.backoff, Sequence):
            return (self.backoff,)
        return self.backoff

    def is_spent(self, attempts: int) -> bool:
        """Whether no further attempt may follow that many."""
        return self.tries is not None and attempts >= self.tries

    @property
    def sets_retries(self) -> bool:
        """Whether somebody has set how often failures are retried, or after what delays."""
        is_set = not isinstance(self.tries, _UsualTries) or self.backoff is not _USUAL_BACKOFF
        return is_set and self.on_failed == "retry"

    def for_callers(self) -> "Policy":
        """The same policy where the caller itself retries: without a limit, unless one was set."""
        return replace(self, tries=None) if isinstance(self.tries, _UsualTries) else self

    def delay_s(self, attempts: int) -> float:
        """How long to wait after that many attempts, in seconds."""
        delays = self.delays
        return seconds(delays[min(attempts, len(delays)) - 1], "backoff")


def _check_tries(tries: object) -> None:
    is_whole = isinstance(tries, int) and not isinstance(tries, bool)
    if tries is not None and (not is_whole or cast(int, tries) < 1):
        raise ConfigError(f"tries: {tries!r} is not a whole number of 1 or more")


_CHOICES: Mapping[str, tuple[str, ...]] = {
    "on_failed": get_args(OnFailed),
    "on_busy": get_args(OnBusy),
    "on_in_doubt": get_args(OnInDoubt),
    "on_outage": get_args(OnOutage),
    "on_mismatch": get_args(OnMismatch),
    "on_missing_id": get_args(OnMissingId),
    "on_too_old": get_args(OnTooOld),
    "on_unknown_type": get_args(OnUnknownType),
    "results": get_args(Results),
    "count_duplicates": get_args(CountDuplicates),
}
POLICY_FIELDS = tuple(field.name for field in fields(Policy))


def _check_choices(policy: Policy) -> None:
    for name, choices in _CHOICES.items():
        value = getattr(policy, name)
        if value not in choices and not (name == "on_in_doubt" and callable(value)):
            raise ConfigError(f"{name}: {value!r} is none of {', '.join(choices)}")
    if inspect.iscoroutinefunction(policy.on_in_doubt):
        raise ConfigError("on_in_doubt: the probe is async; write it without async")


def at_most_once(**changes: Any) -> Policy:
    """For effects that must not repeat: what failed or is in doubt does not run again."""
    return replace(Policy(on_failed="skip", on_in_doubt="hold"), **changes)


def at_least_once(**changes: Any) -> Policy:
    """For effects that must not be lost: what failed or is in doubt runs again."""
    return replace(Policy(), **changes)


def effectively_once(**changes: Any) -> Policy:
    """For effects that are neither lost nor repeated: what is in doubt, or unanswered, is held."""
    return replace(Policy(on_in_doubt="hold", in_doubt_on=(Unanswered,)), **changes)
