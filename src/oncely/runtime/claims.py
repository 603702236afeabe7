"""Claims: those of a window of deliveries, asked for in one batch and ended in one batch."""

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from oncely.claiming.async_calls import AsyncCalls
from oncely.claiming.calls import Calls
from oncely.claiming.inline import InlineCalls, run_inline
from oncely.core.commands import (
    Busy,
    ClaimOutcome,
    Duplicate,
    Fenced,
    Granted,
    Handled,
    InDoubt,
    WriteOutcome,
)
from oncely.core.errors import (
    ContentionError,
    FencedError,
    MessageError,
    OncelyError,
    RefusedError,
    StoreError,
    StoreUnavailable,
)
from oncely.core.message import Message, check_message, fingerprint_of
from oncely.core.policy import Policy
from oncely.core.record import Claim, Key
from oncely.core.rules import is_final, is_too_old
from oncely.crashpoints import reached
from oncely.handling.around import Asked, Handling, Kept, refusal, seconds_since_1970
from oncely.handling.held_message import HeldMessage, Untracked
from oncely.runtime.turn import Turn

_log = logging.getLogger(__name__)

MetadataOf = Callable[[Message], Mapping[str, Any] | None]

_Write = Callable[[Sequence[Turn], Sequence[Claim]], list[WriteOutcome]]
_AWAY = (StoreUnavailable, ContentionError)
_WAIT_S = 0.2
_LONGEST_S = 60.0
"""How long the end of a handler is tried to be stored, where its lease lasts as long."""


class Claims:
    """Asks and ends for the turns of one consumer, as `handling` says.

    `calls` are what handlers ask for steps; `stop` is set when the consumer is to stop, and
    `grace_s` is how long it may take then.
    """

    def __init__(
        self,
        handling: Handling,
        metadata_of: MetadataOf | None,
        calls: AsyncCalls,
        stop: threading.Event,
        grace_s: float,
    ) -> None:
        self.handling = handling
        self._ledger = handling.ledger
        self._metadata_of = metadata_of
        self._calls = calls
        self._stop = stop
        self._grace_s = grace_s
        self._stopped_by = math.inf
        """`time.monotonic()` when the grace is over."""

    # ---- Before --------------------------------------------------------------------------------

    def prepare(self, turn: Turn) -> None:
        """Find out what the ledger knows the message by; a bad one is refused."""
        message = turn.message
        try:
            check_message(message, needs_id=False)
            turn.asked = Asked(message.id, fingerprint_of(message.body), message)
            if self._metadata_of is not None:
                turn.asked.metadata = self._metadata(self._metadata_of, message)
            turn.key = self.handling.key_of(turn.asked)
        except MessageError as error:
            turn.refusal = error
            return
        sent_at = seconds_since_1970(message.time)
        turn.is_alone = is_too_old(self.handling.policy, sent_at, time.time())

    def _metadata(self, metadata_of: MetadataOf, message: Message) -> Mapping[str, Any] | None:
        try:
            return metadata_of(message)
        except Exception as error:
            raise MessageError(f"its metadata cannot be told: {error!r}") from error

    def begin(self, turns: Sequence[Turn]) -> None:
        """Ask for all, until the store answers. Where it is to stop before that, they are left
        without an answer.
        """
        self._run_untracked([turn for turn in turns if turn.key is None])
        alone = [turn for turn in turns if turn.is_alone]
        asking = [turn for turn in turns if turn.key is not None and not turn.is_alone]
        if asking:
            alone += self._begin_together(asking)
        for turn in alone:
            self._begin_one(turn)

    def _run_untracked(self, turns: Sequence[Turn]) -> None:
        for turn in turns:
            self._ledger.count_untracked(self.handling.consumer)
            turn.begun = Untracked(turn.message)

    def _begin_together(self, turns: Sequence[Turn]) -> Sequence[Turn]:
        """Ask for these in one batch; return those that are to be asked for alone."""
        while not self._stop.is_set():
            try:
                return self._begin_many(turns)
            except MessageError:
                # Of one of them; whose, is found out by asking for each.
                return turns
            except _AWAY as error:
                if self.handling.policy.on_outage == "run" and isinstance(error, StoreUnavailable):
                    self._run_untracked(turns)
                    return []
                _log.warning("store_is_away", extra={"consumer": self.handling.consumer})
                self._stop.wait(_WAIT_S)
        return []

    def _begin_many(self, turns: Sequence[Turn]) -> Sequence[Turn]:
        """Of these, what is in doubt and to be asked about."""
        asked_at = time.monotonic()
        outcomes = ask(turns, self.handling, self._ledger)
        granted, handled, doubtful = [], [], []
        for turn, outcome in zip(turns, outcomes, strict=True):
            if isinstance(outcome, Granted):
                granted.append(outcome.claim)
                turn.begun = self._held(outcome.claim, turn)
            elif isinstance(outcome, InDoubt) and callable(self.handling.policy.on_in_doubt):
                doubtful.append(turn)
            else:
                answer(turn, outcome, self.handling.policy)
                handled += [outcome.claim.key] if isinstance(outcome, Handled) else []
        self.handling.heartbeat.hold(granted, asked_at)
        if handled:
            self._finish(handled)
        return doubtful

    def _finish(self, keys: Sequence[Key]) -> None:
        try:
            self._ledger.finish(keys)
        except OncelyError:
            # A relay does it later.
            _log.warning("finishing_failed", exc_info=True)

    def _held(self, claim: Claim, turn: Turn) -> HeldMessage:
        is_good = self.handling.heartbeat.is_good
        return HeldMessage(claim, self._calls, turn.message, lambda: is_good(claim))

    def _begin_one(self, turn: Turn) -> None:
        """Of which more is to be asked than whether it is granted."""
        assert turn.asked is not None  # noqa: S101 - it was prepared.
        calls = InlineCalls(self._ledger)
        while not self._stop.is_set():
            try:
                turn.begun = run_inline(self.handling.begin(calls, turn.asked))
                if isinstance(turn.begun, HeldMessage):
                    turn.begun.calls = self._calls
                return
            except (RefusedError, MessageError) as error:
                turn.refusal = error
                return
            except _AWAY:
                self._stop.wait(_WAIT_S)

    # ---- After ---------------------------------------------------------------------------------

    def end(self, turns: Sequence[Turn]) -> None:
        """Store how handlers have ended. Where that could not be, `refusal` says so."""
        done: list[Turn] = []
        failed: list[Turn] = []
        left: list[Turn] = []
        for turn in turns:
            if isinstance(turn.begun, HeldMessage) and not turn.is_stored:
                if turn.error is None:
                    (done if turn.has_run else left).append(turn)
                else:
                    (failed if isinstance(turn.error, Exception) else left).append(turn)
        if done:
            reached("before_completed")
            self._end_well(done)
            reached("after_completed")
        self._end_badly(failed)
        self.give_back(left)

    def _end_well(self, turns: Sequence[Turn]) -> None:
        sending: list[Turn] = []
        plain: list[Turn] = []
        for turn in turns:
            (sending if _held_by(turn).end() else plain).append(turn)
        self._store(plain, self._complete)
        self._store(sending, self._mark_handled)

    def _complete(self, turns: Sequence[Turn], claims: Sequence[Claim]) -> list[WriteOutcome]:
        return self._ledger.complete_many(claims, self._results(turns))

    def _mark_handled(self, turns: Sequence[Turn], claims: Sequence[Claim]) -> list[WriteOutcome]:
        deferred = [_held_by(turn).end() for turn in turns]
        return self._ledger.handled_many(claims, self._results(turns), deferred)

    def _results(self, turns: Sequence[Turn]) -> Sequence[Any] | None:
        return [turn.result for turn in turns] if self.handling.keeps_result else None

    def _end_badly(self, turns: Sequence[Turn]) -> None:
        for turn in turns:
            _held_by(turn).end()
        self._store([turn for turn in turns if not self.is_final(turn)], self._fail)
        self._store([turn for turn in turns if self.is_final(turn)], self._fail_for_good)

    def _fail(self, turns: Sequence[Turn], claims: Sequence[Claim]) -> list[WriteOutcome]:
        return self._ledger.fail_many(claims, [_error_of(turn) for turn in turns])

    def _fail_for_good(self, turns: Sequence[Turn], claims: Sequence[Claim]) -> list[WriteOutcome]:
        return self._ledger.fail_many(claims, [_error_of(turn) for turn in turns], final=True)

    def is_final(self, turn: Turn) -> bool:
        """Whether no further try follows this failure."""
        return is_final(self.handling.policy, _held_by(turn).claim.attempts, _error_of(turn))

    def give_back(self, turns: Sequence[Turn]) -> None:
        """Release the claims of what has not run. Of what has begun to, only where it may be
        repeated: else nobody knows how far it came, and the claim runs out, to be in doubt then.
        """
        claims = []
        for turn in turns:
            if isinstance(turn.begun, HeldMessage):
                turn.begun.end()
                claim = self.handling.heartbeat.let_go(turn.begun.claim)
                if not turn.is_called or self.handling.policy.repeats_doubts:
                    claims.append(claim)
        try:
            if claims:
                self._ledger.release_many(claims)
        except OncelyError:
            _log.exception("releasing_failed", extra={"consumer": self.handling.consumer})

    def _store(self, turns: Sequence[Turn], write: _Write) -> None:
        """What cannot be stored leaves its claim to run out: the effect has happened all the same,
        and is in doubt then.
        """
        if not turns:
            return
        claims = self.handling.heartbeat.let_go_many([_held_by(turn).claim for turn in turns])
        until = time.monotonic() + min(self.handling.lease_s or _LONGEST_S, _LONGEST_S)
        while True:
            try:
                outcomes = write(turns, claims)
                break
            except _AWAY as error:
                if not self._has_waited(until):
                    self._give_up(turns, error)
                    return
            except StoreError as error:
                # Of one of them, perhaps: whose, is found out by storing each.
                if len(turns) == 1:
                    self._give_up(turns, error)
                for turn in turns if len(turns) > 1 else ():
                    self._store([turn], write)
                return
        for turn, outcome in zip(turns, outcomes, strict=True):
            if isinstance(outcome, Fenced):
                turn.refusal = FencedError("another worker has taken the message over")

    def _has_waited(self, until: float) -> bool:
        """Wait a little; whether there is time for that, which a stop shortens."""
        if self._stop.wait(_WAIT_S):
            self._stopped_by = min(self._stopped_by, time.monotonic() + self._grace_s)
            time.sleep(_WAIT_S)
        return time.monotonic() < min(until, self._stopped_by)

    def _give_up(self, turns: Sequence[Turn], error: Exception) -> None:
        _log.error(
            "completing_failed",
            exc_info=error,
            extra={"consumer": self.handling.consumer, "count": len(turns)},
        )
        for turn in turns:
            turn.refusal = error


def ask(turns: Sequence[Turn], handling: Handling, calls: Calls) -> list[ClaimOutcome]:
    """What the ledger answers for these, asked in one batch."""
    asked = [turn.asked for turn in turns if turn.asked is not None]
    metadata = [each.metadata for each in asked]
    outcomes = calls.claim_many(
        [turn.key for turn in turns if turn.key is not None],
        handling.lease,
        handling.policy,
        fingerprints=[each.fingerprint for each in asked],
        metadata=metadata if any(metadata) else None,
    )
    reached("after_claim")
    return outcomes


def answer(turn: Turn, outcome: ClaimOutcome, policy: Policy) -> None:
    """What follows where the message is not granted."""
    match outcome:
        case Duplicate(record):
            turn.begun = Kept(record.result)
        case Handled(claim):
            turn.begun, turn.may_send = Kept(claim.record.result), True
        case Busy() if policy.on_busy == "discard":
            turn.begun = Kept(None)
        case _:
            turn.refusal = refusal(outcome)


def _error_of(turn: Turn) -> Exception:
    assert isinstance(turn.error, Exception)  # noqa: S101 - what else ends it is given back.
    return turn.error


def _held_by(turn: Turn) -> HeldMessage:
    assert isinstance(turn.begun, HeldMessage)  # noqa: S101 - only such are ended.
    return turn.begun
