"""Handling: what happens before and after a handler, for every message of one consumer."""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple, Self, get_args

from oncely.claiming.async_calls import AsyncCalls
from oncely.core.commands import (
    Busy,
    ClaimOutcome,
    Duplicate,
    Exhausted,
    Granted,
    Handled,
    InDoubt,
    Mismatch,
)
from oncely.core.errors import (
    BusyError,
    ConfigError,
    DuplicateError,
    ExhaustedError,
    FencedError,
    InDoubtError,
    MessageError,
    MismatchError,
    OncelyError,
    RefusedError,
    StoreError,
    StoreUnavailable,
    TooOldError,
    describe,
)
from oncely.core.message import Message, check_id
from oncely.core.policy import Duration, Finding, Policy, Probe, lease_seconds
from oncely.core.record import Claim, Key
from oncely.core.rules import is_final, is_too_old
from oncely.crashpoints import reached
from oncely.handling.heartbeat import shared_heartbeat
from oncely.handling.held_message import HeldMessage, Untracked
from oncely.ledger import Ledger

_log = logging.getLogger(__name__)


class Kept(NamedTuple):
    """The answer to a duplicate, whose handler does not run."""

    result: Any


Begun = HeldMessage | Untracked | Kept


@dataclass(slots=True)
class Asked:
    """What is to be handled."""

    message_id: str | None
    fingerprint: str | None = None
    """Of what a repetition under the same id is compared with, where anything is."""
    message: Message | None = None
    """For a probe, and for the time at which it was sent; None where there is none."""
    metadata: Mapping[str, Any] | None = None
    """Kept with a record that begins here."""
    asked_at: float = 0.0
    """`time.monotonic()` before the claim was asked for."""


@dataclass(kw_only=True)
class Handling:
    """What happens before and after the handler of one consumer's messages."""

    ledger: Ledger
    consumer: str
    policy: Policy
    lease_s: float | None
    keeps_result: bool = False
    forgets_failures: bool = False
    """A handler that fails leaves no record."""

    def __post_init__(self) -> None:
        self.heartbeat = shared_heartbeat(self.ledger, self.lease_s)

    @classmethod
    def under(
        cls,
        ledger: object,
        consumer: str,
        policy: object,
        lease: Duration | None = None,
        *,
        keep_result: bool = False,
    ) -> Self:
        """As users write it. Raises ConfigError, which says what to write instead."""
        if not isinstance(ledger, Ledger):
            kind = type(ledger).__name__
            raise ConfigError(f"ledger: {kind} is no Ledger; write open_ledger(...)")
        if not isinstance(policy, Policy):
            raise ConfigError(f"policy: {_no_policy(policy)}")
        try:
            check_id(consumer, "consumer")
        except MessageError as error:
            raise ConfigError(f'{error}; write consumer="billing"') from None
        return cls(
            ledger=ledger,
            consumer=consumer,
            policy=policy,
            lease_s=lease_seconds(policy.lease if lease is None else lease),
            keeps_result=keep_result or policy.results == "keep",
        )

    @property
    def lease(self) -> Duration:
        """The lease, as claims are asked for with it."""
        return "none" if self.lease_s is None else timedelta(seconds=self.lease_s)

    # ---- Before --------------------------------------------------------------------------------

    async def begin(self, calls: AsyncCalls, asked: Asked) -> Begun:
        """What the handler is to run under, its lease extended from now on; or what a duplicate
        gets.

        Raises RefusedError where the ledger does not grant the message, MessageError for an id
        that cannot be one.
        """
        outcome = await self.ask_or_run(calls, asked)
        if isinstance(outcome, Granted):
            try:
                self.heartbeat.hold([outcome.claim], asked.asked_at)
            except BaseException:
                await calls.release(outcome.claim)
                raise
        return await self._begun(calls, asked, outcome, self.heartbeat.is_good)

    async def begin_joined(self, calls: AsyncCalls, asked: Asked) -> Begun:
        """As `begin`, in a transaction: that, and no lease, keeps others away."""
        return await self._begun(calls, asked, await self.ask(calls, asked), lambda _: True)

    async def _begun(
        self,
        calls: AsyncCalls,
        asked: Asked,
        outcome: ClaimOutcome | None,
        is_good: Callable[[Claim], bool],
    ) -> Begun:
        if outcome is None:
            self.ledger.count_untracked(self.consumer)
            return Untracked(asked.message)
        if isinstance(outcome, Granted):
            claim = outcome.claim
            return HeldMessage(claim, calls, asked.message, lambda: is_good(claim))
        return Kept(await self._kept_result(calls, outcome))

    async def ask_or_run(self, calls: AsyncCalls, asked: Asked) -> ClaimOutcome | None:
        """As `ask`; None, too, where the policy lets messages run while the store is away."""
        try:
            return await self.ask(calls, asked)
        except StoreUnavailable:
            if self.policy.on_outage == "pause":
                raise
            return None

    async def ask(self, calls: AsyncCalls, asked: Asked) -> ClaimOutcome | None:
        """What the ledger answers; None where the policy lets the message run untracked.

        Raises TooOldError, and MessageError for an id that cannot be one.
        """
        key = self.key_of(asked)
        if key is None:
            return None
        await self._refuse_too_old(calls, key, asked)
        outcome = await self._claim(calls, key, asked)
        reached("after_claim")
        return outcome

    def key_of(self, asked: Asked) -> Key | None:
        """What the ledger knows the message by; None where it is to run untracked."""
        if asked.message_id or self.policy.on_missing_id == "dead_letter":
            return Key(self.consumer, check_id(asked.message_id))
        if self.policy.on_missing_id == "untracked":
            return None
        if asked.fingerprint is None:
            raise MessageError("missing id, and no content to tell the message by")
        return Key(self.consumer, f"content:{asked.fingerprint}")

    async def _refuse_too_old(self, calls: AsyncCalls, key: Key, asked: Asked) -> None:
        """Raise TooOldError for what the ledger may have known, and forgotten."""
        sent_at = None if asked.message is None else seconds_since_1970(asked.message.time)
        # The store's clock decides; it is asked where this machine's says so.
        if not is_too_old(self.policy, sent_at, time.time()):
            return
        is_known = await calls.find(key) is not None
        if not is_known and is_too_old(self.policy, sent_at, await calls.run(self.ledger.now)):
            raise TooOldError(
                f"{key.message_id!r} is older than the retention of {self.policy.retention}: "
                "it may have been handled before"
            )

    async def _claim(self, calls: AsyncCalls, key: Key, asked: Asked) -> ClaimOutcome:
        asked.asked_at = time.monotonic()
        outcome = await calls.claim(
            key, self.lease, self.policy, fingerprint=asked.fingerprint, metadata=asked.metadata
        )
        probe = self.policy.on_in_doubt
        if isinstance(outcome, InDoubt) and callable(probe):
            message = asked.message or Message(key.message_id)
            finding = await calls.run(asked_probe, probe, message)
            asked.asked_at = time.monotonic()
            return await calls.claim(
                key,
                self.lease,
                self.policy,
                fingerprint=asked.fingerprint,
                finding=finding,
                in_doubt=outcome.record,
            )
        return outcome

    async def _kept_result(self, calls: AsyncCalls, outcome: ClaimOutcome) -> Any:
        match outcome:
            case Duplicate(record):
                return record.result
            case Handled(claim):
                # The relay sends what was deferred; where nothing was, the last mark is missing.
                await calls.finish([claim.key])
                return claim.record.result
            case Busy() if self.policy.on_busy == "discard":
                return None
            case _:
                raise refusal(outcome)

    # ---- After ---------------------------------------------------------------------------------

    async def complete(self, held: HeldMessage, claim: Claim, result: Any) -> None:
        """The handler has succeeded: store that, with its result and what it has sent."""
        deferred = held.end()
        kept = result if self.keeps_result else None
        reached("before_completed")
        if deferred:
            await held.calls.handled(claim, kept, deferred)
        else:
            await held.calls.complete(claim, kept)
        reached("after_completed")

    async def end_well(self, held: HeldMessage, result: Any) -> bool:
        """As `complete`; whether it is stored.

        Where it is not, the effect has happened all the same: the claim runs out, and is in doubt
        then. Raises StoreError only where that keeps messages from being sent.
        """
        claim = self.heartbeat.let_go(held.claim)
        try:
            await self.complete(held, claim, result)
        except StoreError:
            _log.exception("completing_failed", extra={"consumer": self.consumer})
            if held.end():
                raise
            return False
        except FencedError:
            raise
        except Exception as error:
            await self.end_badly(held, error)
            raise
        return True

    async def end_badly(self, held: HeldMessage, error: BaseException) -> None:
        """Record the error, or release where the handler was stopped and did not fail."""
        held.end()
        claim = self.heartbeat.let_go(held.claim)
        try:
            if isinstance(error, Exception) and not self.forgets_failures:
                await held.calls.fail(
                    claim, error, final=is_final(self.policy, claim.attempts, error)
                )
            elif isinstance(error, Exception) or self.policy.repeats_doubts:
                await held.calls.release(claim)
            # Else nobody knows how far it came: the claim runs out, and is in doubt then.
        except OncelyError:
            _log.exception("recording_failed", extra={"consumer": self.consumer})

    async def record_rolled_back(self, calls: AsyncCalls, asked: Asked, error: Exception) -> None:
        """Record the error of a handler whose transaction, its claim included, is undone."""
        try:
            outcome = await self.ask(calls, asked)
            if isinstance(outcome, Granted):
                final = is_final(self.policy, outcome.claim.attempts, error)
                await calls.fail(outcome.claim, error, final)
        except OncelyError:
            _log.exception("recording_failed", extra={"consumer": self.consumer})


def refusal(outcome: ClaimOutcome) -> RefusedError:
    """Why the handler does not run, as an error."""
    match outcome:
        case Granted(claim) | Handled(claim):
            raise AssertionError(f"{claim.key} is granted")
        case Duplicate(record):
            return DuplicateError(f"{record.key.message_id!r} was processed before")
        case Busy(record):
            return BusyError(f"{record.key.message_id!r} is being processed by another worker")
        case Mismatch(record):
            return MismatchError(f"{record.key.message_id!r} was seen before with other content")
        case Exhausted(record, is_first):
            error = ExhaustedError(f"{record.key.message_id!r} has failed for good: {record.error}")
            error.is_first = is_first
            return error
        case InDoubt(record):
            return InDoubtError(f"{record.key.message_id!r} is in doubt: its claim ran out")


def _no_policy(value: Any) -> str:
    name = getattr(value, "__name__", None)
    if callable(value) and name is not None:
        return f"{name} is a function; write {name}()"
    return f"{type(value).__name__} is no Policy; write Policy(...), or at_most_once()"


def asked_probe(probe: Probe, message: Message) -> Finding:
    """What a user's probe says of a message; unknown where it cannot tell."""
    try:
        finding = probe(message)
    except Exception:  # noqa: BLE001 - what a user's probe may raise is not known.
        _log.exception("probe_failed")
        return "unknown"
    if finding not in get_args(Finding):
        _log.error("probe_answer_unusable", extra={"answer": describe(repr(finding), 200)})
        return "unknown"
    return finding


def seconds_since_1970(time_: datetime | None) -> float | None:
    """When a message was sent, where that is known."""
    if time_ is None:
        return None
    # Without a time zone it is what most producers write: UTC.
    return (time_ if time_.tzinfo else time_.replace(tzinfo=UTC)).timestamp()
