"""`once`: a function that runs once for each message id, as a decorator."""

import functools
import inspect
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

from oncely.async_ledger import SteadyLedger
from oncely.core.errors import (
    BusyError,
    ConfigError,
    ExhaustedError,
    InDoubtError,
    MessageError,
    MismatchError,
    OncelyError,
    StoreError,
)
from oncely.core.message import fingerprint_of
from oncely.core.policy import Duration, Policy, lease_seconds
from oncely.core.record import Claim, Key
from oncely.core.rules import (
    Busy,
    ClaimOutcome,
    Duplicate,
    Exhausted,
    Granted,
    Handled,
    InDoubt,
    Mismatch,
    is_final,
)
from oncely.heartbeat import Heartbeat
from oncely.ledger import Ledger

_log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


class _Kept(NamedTuple):
    """The answer to a duplicate."""

    result: Any


def once(
    ledger: Ledger,
    *,
    consumer: str,
    key: Callable[..., str],
    keep_result: bool = False,
    fingerprint: Callable[..., Any] | None = None,
    lease: Duration | None = None,
    policy: Policy = Policy(),
) -> Callable[[F], F]:
    """Run the decorated function, sync or async, once for each id that `key` gives.

    `key` and `fingerprint` are called with the function's own arguments. A duplicate does not run
    the function and returns the kept result, else None. `keep_result` keeps it, as JSON. An
    error of the function is recorded and raised as it was; what follows is the policy's.

    The call raises BusyError, MismatchError, ExhaustedError or InDoubtError where the ledger does
    not grant the message, MessageError for an id that cannot be one or a result that is no JSON,
    StoreUnavailable, before the function runs, when the ledger cannot be reached, and
    FencedError, after it ran, when another worker took the message over meanwhile.
    """
    guard = _Guard(ledger, policy, lease or policy.lease, keep_result or policy.results == "keep")

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise ConfigError(
                f"once: {function.__qualname__} is a generator, which runs after it has returned; "
                "decorate a function that does its work when it is called"
            )

        def asked(*args: P.args, **kwargs: P.kwargs) -> tuple[Key, str | None]:
            content = None if fingerprint is None else repr(fingerprint(*args, **kwargs))
            return Key(consumer, key(*args, **kwargs)), content

        if _is_async(function):
            return cast(Callable[P, R], _async_wrapper(cast(Any, function), asked, guard))
        return _sync_wrapper(function, asked, guard)

    return cast(Callable[[F], F], decorate)


def _is_async(function: Callable[..., Any]) -> bool:
    call = getattr(type(function), "__call__", None)  # noqa: B004 - an object may have it.
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def _sync_wrapper(
    function: Callable[P, R], asked: Callable[P, tuple[Key, str | None]], guard: "_Guard"
) -> Callable[P, R]:
    ledger = _InlineLedger(guard.ledger)

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        begun = _run(guard.begin(ledger, *asked(*args, **kwargs)))
        if isinstance(begun, _Kept):
            return cast(R, begun.result)
        try:
            result = function(*args, **kwargs)
        except BaseException as error:
            _run(guard.end_badly(ledger, begun, error))
            raise
        _run(guard.end_well(ledger, begun, result))
        return result

    return wrapper


def _async_wrapper(
    function: Callable[P, Awaitable[T]],
    asked: Callable[P, tuple[Key, str | None]],
    guard: "_Guard",
) -> Callable[P, Coroutine[Any, Any, T]]:
    ledger = SteadyLedger(guard.ledger)

    @functools.wraps(function)
    async def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        begun = await guard.begin(ledger, *asked(*args, **kwargs))
        if isinstance(begun, _Kept):
            return cast(T, begun.result)
        try:
            result = await function(*args, **kwargs)
        except BaseException as error:
            await guard.end_badly(ledger, begun, error)
            raise
        await guard.end_well(ledger, begun, result)
        return result

    return wrapper


class _InlineLedger:
    """A ledger's calls as coroutines that never wait, for functions that are not async."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    async def claim(
        self, key: Key, lease: Duration, policy: Policy, *, fingerprint: str | None
    ) -> ClaimOutcome:
        return self._ledger.claim(key, lease, policy, fingerprint=fingerprint)

    async def complete(self, claim: Claim, result: Any = None) -> None:
        self._ledger.complete(claim, result)

    async def fail(self, claim: Claim, error: BaseException, final: bool) -> None:
        self._ledger.fail(claim, error, final)

    async def release(self, claim: Claim) -> None:
        self._ledger.release(claim)


_Calls = _InlineLedger | SteadyLedger


def _run(steps: Coroutine[Any, Any, T]) -> T:
    """What `steps` return, which never wait."""
    try:
        steps.send(None)
    except StopIteration as end:
        return cast(T, end.value)
    raise AssertionError("steps that never wait have waited")


class _Guard:
    """What happens before and after the function, for every call of it."""

    def __init__(self, ledger: Ledger, policy: Policy, lease: Duration, keep_result: bool) -> None:
        if callable(policy.on_in_doubt):
            raise ConfigError(
                'on_in_doubt: a probe is asked with a message, and `once` has none; write "hold"'
            )
        self.ledger = ledger
        self._policy = policy
        self._lease = lease
        self._keep_result = keep_result
        self._heartbeat = Heartbeat(ledger, lease_seconds(lease))

    async def begin(self, ledger: _Calls, key: Key, content: str | None) -> Claim | _Kept:
        """The claim under which to run, or what a duplicate returns. Raises RefusedError."""
        asked_at = time.monotonic()
        fingerprint = None if content is None else fingerprint_of(content.encode())
        outcome = await ledger.claim(key, self._lease, self._policy, fingerprint=fingerprint)
        if isinstance(outcome, Handled):
            # Nothing of this function waits to be sent: the record lacks only its last mark.
            await ledger.complete(outcome.claim)
            return _Kept(outcome.claim.record.result)
        granted = _granted(outcome)
        if isinstance(granted, Claim):
            self._heartbeat.hold([granted], asked_at)
        return granted

    async def end_well(self, ledger: _Calls, claim: Claim, result: Any) -> None:
        """Complete. The function is not to run again because of a failure here."""
        claim = self._heartbeat.let_go(claim)
        try:
            await ledger.complete(claim, result if self._keep_result else None)
        except MessageError as error:
            await ledger.fail(claim, error, final=is_final(self._policy, claim, error))
            raise
        except StoreError:
            # The effect has happened. The claim runs out, and is in doubt then.
            _log.exception("completing_failed", extra={"consumer": claim.key.consumer})

    async def end_badly(self, ledger: _Calls, claim: Claim, error: BaseException) -> None:
        """Record the error, or release where the function was stopped and did not fail."""
        claim = self._heartbeat.let_go(claim)
        try:
            if isinstance(error, Exception):
                await ledger.fail(claim, error, final=is_final(self._policy, claim, error))
            elif self._policy.repeats_doubts:
                await ledger.release(claim)
            # Else nobody knows how far it came: the claim runs out, and is in doubt then.
        except OncelyError:
            _log.exception("recording_failed", extra={"consumer": claim.key.consumer})


def _granted(outcome: ClaimOutcome) -> Claim | _Kept:
    match outcome:
        case Granted(claim) | Handled(claim):
            return claim
        case Duplicate(record):
            return _Kept(record.result)
        case Busy(record):
            raise BusyError(f"{record.key.message_id!r} is being processed by another worker")
        case Mismatch(record):
            raise MismatchError(f"{record.key.message_id!r} was seen before with other content")
        case Exhausted(record):
            raise ExhaustedError(f"{record.key.message_id!r} has failed for good: {record.error}")
        case InDoubt(record):
            raise InDoubtError(f"{record.key.message_id!r} is in doubt: its claim ran out")
