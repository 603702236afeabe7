"""Turn: one message on its way, and what follows from how its handling has ended.

A turn is a state machine without any I/O: whoever drives it tells it what has happened. The table
at the end of this file is the specification: a row is an event, a column is the state in which it
happens, and the cell is the state that follows.

    state       the message
    NEW         was not asked for yet
    ASKED       was asked for, and the ledger has not answered
    HELD        is granted: it may run under a claim
    UNTRACKED   may run without a claim
    ANSWERED    does not run: it is a duplicate, or it is refused
    ENDED       has ended: `ending` says what follows
    STORED      has ended, and the ledger knows how

How far its handler has come is told apart from that (`Progress`): by the thread that runs it, while
another thread may end the turn.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from enum import IntEnum, auto
from typing import Any, NamedTuple, Protocol, cast

from oncely.core.commands import (
    Acquire,
    ClaimOutcome,
    Company,
    Duplicate,
    Exhausted,
    Granted,
    Handled,
    InDoubt,
    Suspect,
)
from oncely.core.control import EffectUnknown, Reject, Retry, Unrecoverable
from oncely.core.durations import seconds
from oncely.core.errors import (
    BusyError,
    DuplicateError,
    ExhaustedError,
    FencedError,
    MessageError,
    RefusedError,
    UnreadableRow,
    UnstorableMessage,
    WaitingError,
    describe,
    reason_of,
)
from oncely.core.message import Message, Processing
from oncely.core.policy import Policy
from oncely.core.record import Claim, Key
from oncely.core.refusals import refusal
from oncely.core.verdicts import Ack, Counted, DeadLetter, Delay, End, Ending, Requeue
from oncely.core.waiting import QueuedRow, WaitingMessage


class TurnState(IntEnum):
    """The columns of the table."""

    NEW = 0
    ASKED = 1
    HELD = 2
    UNTRACKED = 3
    ANSWERED = 4
    ENDED = 5
    STORED = 6


class Progress(IntEnum):
    """How far a message's handler has come."""

    WAITING = auto()
    STARTED = auto()
    """The outermost middleware has begun."""
    RUNNING = auto()
    """The middleware behind the claim, or the handler, has begun."""
    CALLED = auto()
    """The handler itself was called, so that it may have had an effect."""


class Untracked(NamedTuple):
    """The message runs without a claim, because the policy says so: nothing is remembered."""

    is_outage: bool = False
    """Whether that is because the store is away."""


class HandlerContext(Processing, Protocol):
    """What a handler may call while it runs."""

    def end(self) -> Sequence[WaitingMessage]:
        """The handler has ended: nothing more may be called. Returns what it has sent."""

    def check_awaited(self, error: BaseException | None = None) -> None:
        """Raise MessageError where a step was not awaited: it has not run. Not where the handler
        has raised `error`, which is what counts then.
        """


class Turn:
    """What is known of a message so far. Until a value is known, the class has its default.

    What concerns its way is changed by the events alone; the message itself is its maker's.
    """

    key: Key | None = None
    """The key of its record; None where it runs untracked."""
    token: int | None = None
    """The token to ask with, where another process may have to ask in place of this one."""
    company: Company = Company.NONE
    """What else is at risk while its handler runs."""
    claims_ahead: bool = False
    """Whether its claim is committed before the transaction of its handler begins, and stays where
    that is rolled back."""
    serializer: Any = None
    """What keeps its handler's result; None for plain JSON."""
    taken: WaitingMessage | None = None
    """The retry that was taken from the ledger, where it was one."""
    is_due: bool = False
    """Whether it is a retry that others have taken from the ledger for it."""
    queued: QueuedRow | None = None
    """The row that was taken from a queue in a store, where it was one."""
    deliveries: int = 1
    """How often the message was delivered: the attempts of one that is not tracked."""
    waits: bool = False
    """Whether it does not run now, but waits in the ledger: behind another message of its order,
    for a worker that takes its type, or as a dead letter for people."""
    took_s: float = 0.0
    """Seconds that its handler, with the middleware, has run."""

    state: TurnState = TurnState.NEW
    progress: Progress = Progress.WAITING
    command: Acquire | None = None
    """What the ledger is asked about it: the same in every repetition."""
    outcome: ClaimOutcome | Suspect | Untracked | None = None
    """What the ledger has answered; or that it runs without being asked for."""
    is_duplicate: bool = False
    """Whether its handler has succeeded before."""
    claim: Claim | None = None
    """The claim that was granted."""
    context: HandlerContext | None = None
    """What its handler may call, once it runs."""
    refusal: Exception | None = None
    """Why the handler does not run; or why its end is not stored."""
    result: Any = None
    """What is kept of its handler's result, as JSON."""
    error: BaseException | None = None
    """What the handler raised; or what a middleware raised, where the handler did not run."""
    ending: Ending | None = None
    """What follows, once the turn has ended."""

    def __init__(
        self,
        message_id: str | None,
        fingerprint: str | None = None,
        message: Message | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        self.message_id = message_id
        self.fingerprint = fingerprint
        """Compared with that of a later delivery under the same id, where both have one."""
        self.message = message
        """As the handler is given it; None where that is not known."""
        self.metadata = metadata
        """Kept with the record, where this creates it."""

    @property
    def sent_at(self) -> float | None:
        """When the message was sent, in seconds since 1970; None where that is not known."""
        return None if self.message is None else seconds_since_1970(self.message.time)

    def probed(self) -> Message | None:
        """The message to give to a probe, where it is known."""
        return self.message

    @property
    def attempts(self) -> int:
        """How often its handler was tried, this time included."""
        return self.deliveries if self.claim is None else self.claim.attempts

    @property
    def is_suspect(self) -> bool:
        """Whether it has to be asked for alone."""
        return isinstance(self.outcome, Suspect)

    @property
    def is_dead_unheard(self) -> bool:
        """Whether it is a dead letter that was not stored with its end."""
        is_dead = self.ending is not None and isinstance(self.ending.verdict, DeadLetter)
        return is_dead and self.claim is None

    @property
    def is_known_dead(self) -> bool:
        """Whether an earlier delivery may have left the dead letter, which has the error."""
        is_first = isinstance(self.outcome, Exhausted) and self.outcome.is_first
        is_kept = isinstance(self.outcome, Exhausted | InDoubt) and not is_first
        return is_kept and self.taken is None

    @property
    def is_to_run(self) -> bool:
        """Whether its handler may run."""
        return self.state in (TurnState.HELD, TurnState.UNTRACKED) and self.refusal is None

    @property
    def kept(self) -> Any:
        """What is kept of the result of a duplicate, as JSON."""
        return cast(Duplicate | Handled, self.outcome).record.result

    @property
    def may_have_sent(self) -> bool:
        """Whether its handler, in this run or an earlier one, may have left messages to be sent."""
        if self.is_duplicate:
            return isinstance(self.outcome, Handled)
        is_handled = self.ending is not None and self.ending.counted is Counted.HANDLED
        return is_handled and self.claim is not None and bool(self.sent())

    def sent(self) -> Sequence[WaitingMessage]:
        """What its handler has sent; it can send nothing more from now on."""
        return () if self.context is None else self.context.end()

    # ---- Its claim -----------------------------------------------------------------------------

    def asks(self, command: Acquire) -> None:
        """The ledger is asked for the message; a second time after a probe."""
        self.state = _ASKED[self.state]
        self.key, self.command = command.key, command

    def granted(self, claim: Claim) -> None:
        """The ledger has granted the message; or its claim is taken over from a dead process."""
        self.state = _GRANTED[self.state]
        self.claim, self.outcome = claim, Granted(claim)

    def answered(self, outcome: ClaimOutcome) -> None:
        """The ledger has not granted the message."""
        self.state = _ANSWERED[self.state]
        self.outcome, self.is_duplicate = outcome, isinstance(outcome, Duplicate | Handled)
        if not self.is_duplicate:
            self.refusal = refusal(outcome)

    def suspected(self, suspect: Suspect) -> None:
        """The ledger grants the message only to whoever asks for it alone."""
        self.state = _ANSWERED[self.state]
        self.outcome = suspect
        self.refusal = BusyError(f"{self.message_id!r} may have killed a worker: it runs alone")

    def runs_untracked(self, *, is_outage: bool = False) -> None:
        """The message runs without a claim."""
        self.state = _UNTRACKED[self.state]
        self.outcome = Untracked(is_outage)

    def refused(self, error: Exception) -> None:
        """The handler must not run. A claim that was granted is given back in the end."""
        self.state = _REFUSED[self.state]
        self.refusal = error

    # ---- Its handler, told by the thread that runs it -------------------------------------------

    def started(self) -> None:
        """The outermost middleware begins."""
        self.progress = max(self.progress, Progress.STARTED)

    def runs(self) -> None:
        """What stands behind the claim begins: a middleware may call it more than once."""
        # It may have been called before: the handler may have had its effect.
        self.progress, self.error = max(self.progress, Progress.RUNNING), None

    def called(self) -> None:
        """The handler is called."""
        self.progress = Progress.CALLED

    def raised(self, error: BaseException | None) -> None:
        """The handler, or something around it, has raised; None where that is not to count."""
        self.error = error

    def returned(self, result: Any) -> None:
        """The handler has succeeded; this is kept of its result, as JSON."""
        self.result = result

    # ---- Its end -------------------------------------------------------------------------------

    def ended(self, policy: Policy, *, is_stopping: bool = False) -> Ending:
        """The turn is over. Returns what follows, from how far its handler has come."""
        return self.ended_as(self._ending(policy, is_stopping=is_stopping))

    def ended_as(self, ending: Ending) -> Ending:
        """The turn is over, and this follows."""
        self.state = _ENDED[self.state]
        self.ending = ending
        return ending

    def ended_by(self, error: Exception) -> None:
        """The turn is over: this keeps its handler from running, or its end from being stored."""
        self.refusal = error
        self.ended_as(after_refusal(error))

    def left_in_doubt(self, error: Exception | None = None) -> None:
        """The turn is over, and nobody knows what of its end is stored."""
        self.refusal = error or self.refusal
        self.ended_as(AFTER_DOUBT)

    def stopped(self, policy: Policy) -> None:
        """This process stops before the handler has ended."""
        # In this order: whoever calls the handler first tells that, and then asks whether it may.
        self.state = _ENDED[self.state]
        self.sent()
        self.ending = after_stop(policy, self.progress)

    def stored(self) -> None:
        """The ledger knows how the turn has ended."""
        self.state = _STORED[self.state]

    def fenced(self) -> None:
        """The ledger does not take the end: another worker has taken the message over."""
        self.stored()
        self.refusal = FencedError("another worker has taken the message over")
        self.ending = after_refusal(self.refusal)

    def begins_anew(self) -> None:
        """All that has happened is forgotten: it was undone, or the message is tried again."""
        self.state = _ANEW[self.state]
        self.progress = Progress.WAITING
        # A new token: a claim that is stored after all must not be granted once more.
        self.command = self.outcome = self.claim = self.context = self.token = None
        self.is_duplicate = False
        self.refusal = self.result = self.error = self.ending = None

    def undone(self) -> None:
        """The transaction of its handler was rolled back, and its claim, unless it is older."""
        claim = self.claim if self.claims_ahead else None
        self.begins_anew()
        if claim is not None:
            self.granted(claim)

    def _ending(self, policy: Policy, *, is_stopping: bool) -> Ending:
        if self.refusal is not None:
            ending = after_refusal(self.refusal)
            # A claim whose handler then must not run is given back.
            return ending if self.claim is None else ending._replace(end=End.RELEASED)
        if self.is_duplicate:
            return AFTER_DUPLICATE
        if self.error is not None and self.outcome == Untracked(is_outage=True):
            return AFTER_OUTAGE
        ending = after_end(
            policy, self.attempts, self.error, self.progress, is_stopping=is_stopping
        )
        # Without a claim nothing is stored: a message that has failed is redelivered.
        return ending if self.claim is not None else ending._replace(end=End.LEFT)


def seconds_since_1970(time: datetime | None) -> float | None:
    """When a message was sent, where that is known."""
    if time is None:
        return None
    # Without a time zone it is what most producers write: UTC.
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()


# ---- What follows from an end ------------------------------------------------------------------

AFTER_DUPLICATE = Ending(End.LEFT, Ack(), Counted.DUPLICATE)
"""What follows where nothing is left to do."""
AGAIN_S = 1.0
"""Seconds until the redelivery of a message that was not handled, and has not failed."""
AFTER_DOUBT = Ending(End.LEFT, Delay(AGAIN_S), Counted.GIVEN_BACK)
"""What follows where nobody knows what of a handler's transaction is stored: its claim runs out."""
AFTER_OUTAGE = Ending(End.LEFT, Delay(AGAIN_S), Counted.RETRIED)
"""What follows where a handler fails that ran untracked, because the store was away: nobody counts
its attempts."""
BEHIND = Ending(End.LEFT, Delay(0.0), Counted.GIVEN_BACK)
"""What follows where a message has to wait behind another of its ordering key."""
GIVEN_BACK = Ending(End.LEFT, Requeue(), Counted.GIVEN_BACK)
"""What follows where a message is left to other workers."""
WITHDRAWN = Ending(End.RELEASED, Ack(), Counted.SKIPPED)
"""What follows where a handler refuses to do anything: its message counts as never seen."""
UNKNOWN_S = 2.0
"""Seconds until the redelivery of a message of a type that no handler here takes."""


def after_end(
    policy: Policy,
    attempts: int,
    error: BaseException | None,
    progress: Progress = Progress.CALLED,
    *,
    is_stopping: bool = False,
) -> Ending:
    """What follows where a message's handler has come so far in the attempt with that number, with
    `error` where something has failed.

    `is_stopping`: whether this process is being stopped. Only then is an error that is not an
    Exception (SystemExit, CancelledError) something other than a failed attempt.
    """
    if error is not None and not (is_stopping and not isinstance(error, Exception)):
        if leaves_doubt(policy, error, progress):
            return _after_unknown(policy, attempts, error)
        return _after_failure(policy, attempts, error)
    if error is not None or progress is Progress.WAITING:
        return after_stop(policy, progress)
    if progress is Progress.STARTED:
        return Ending(End.RELEASED, Ack(), Counted.SKIPPED)
    return _HANDLED


_HANDLED = Ending(End.COMPLETED, Ack(), Counted.HANDLED)


def leaves_doubt(
    policy: Policy, error: BaseException, progress: Progress = Progress.CALLED
) -> bool:
    """Whether nobody knows what a handler that came so far has done before it raised `error`, and
    the policy does not just retry.
    """
    if policy.on_in_doubt == "retry":
        return False
    if isinstance(error, BaseExceptionGroup):
        return any(leaves_doubt(policy, each, progress) for each in error.exceptions)
    is_said = isinstance(error, Retry | Reject | Unrecoverable | MessageError)
    is_listed = isinstance(error, policy.in_doubt_on) and progress is Progress.CALLED
    return isinstance(error, EffectUnknown) or (is_listed and not is_said)


def _after_unknown(policy: Policy, attempts: int, error: BaseException) -> Ending:
    match policy.on_in_doubt:
        case "hold":
            return Ending(End.IN_DOUBT, DeadLetter(describe(error)), Counted.IN_DOUBT)
        case "dead_letter":
            return Ending(End.EXHAUSTED, DeadLetter(describe(error)), Counted.FAILED)
        case _:
            # Not at once: what was asked for may still be happening, and the service be away.
            return Ending(End.IN_DOUBT, Delay(policy.delay_s(attempts)), Counted.IN_DOUBT)


def _after_failure(policy: Policy, attempts: int, error: BaseException) -> Ending:
    dead_letter = DeadLetter(describe(error))
    if isinstance(error, Reject | MessageError):
        return Ending(End.EXHAUSTED, dead_letter, Counted.REJECTED)
    if isinstance(error, Unrecoverable) or policy.is_spent(attempts):
        return Ending(End.EXHAUSTED, dead_letter, Counted.FAILED)
    match policy.on_failed:
        case "retry":
            delay_s = error.delay_s if isinstance(error, Retry) else None
            wait_s = policy.delay_s(attempts) if delay_s is None else delay_s
            return Ending(End.FAILED, Delay(wait_s), Counted.RETRIED)
        case "skip":
            return Ending(End.FAILED, dead_letter, Counted.FAILED)
        case "dead_letter":
            return Ending(End.EXHAUSTED, dead_letter, Counted.FAILED)


def after_stop(policy: Policy, progress: Progress) -> Ending:
    """What follows where this process stops before a handler has ended: that is not a failure."""
    may_run_again = progress < Progress.CALLED or policy.on_in_doubt == "retry"
    verdict = Requeue() if progress is Progress.WAITING else Delay(AGAIN_S)
    return Ending(End.RELEASED if may_run_again else End.LEFT, verdict, Counted.GIVEN_BACK)


def after_refusal(error: Exception) -> Ending:
    """What follows where a handler does not run, or the ledger does not take its end."""
    if isinstance(error, ExhaustedError) and error.is_first:
        # Its tries are spent, and the worker of the last try died before it could say so.
        return Ending(End.LEFT, DeadLetter(describe(error)), Counted.FAILED)
    if isinstance(error, DuplicateError | WaitingError):
        return AFTER_DUPLICATE
    if isinstance(error, RefusedError | MessageError | UnreadableRow | UnstorableMessage):
        return Ending(End.LEFT, DeadLetter(describe(error)), Counted.SET_ASIDE)
    return Ending(End.LEFT, Delay(AGAIN_S), Counted.GIVEN_BACK)


def after_unknown(policy: Policy, error: MessageError, waited_s: float, *, drains: bool) -> Ending:
    """What follows where no handler here takes messages of that type. `waited_s` is how long the
    message has waited for one; a consumer that `drains` does not wait.
    """
    may_wait = policy.on_unknown_type == "wait" and not drains
    if may_wait and waited_s < seconds(policy.wait_unknown):
        return Ending(End.LEFT, Delay(UNKNOWN_S), Counted.GIVEN_BACK)
    return after_refusal(error)


def fails_by_death(policy: Policy) -> bool:
    """Whether the death of a handler's process is a failure, as an exception is. Else the message
    is in doubt: the effect may have happened, and the policy may not allow a retry.
    """
    return policy.on_in_doubt == "retry"


def recorded(error: BaseException | None) -> str:
    """The error text that a failed record keeps. For an unusable message it begins with "Reject" or
    "MessageError", whatever subclass was raised: later deliveries recognize it by that word.
    """
    for kind in (Reject, MessageError):
        if isinstance(error, kind):
            return describe(kind(reason_of(error)))
    return describe(error or "")


# ---- The table ---------------------------------------------------------------------------------


class Event(dict[TurnState, TurnState]):
    """The state that follows an event, by the state in which it happens."""

    def __init__(self, name: str, *follows: TurnState | None) -> None:
        super().__init__(
            (state, then)
            for state, then in zip(TurnState, follows, strict=True)
            if then is not None
        )
        self.name = name

    def __missing__(self, state: TurnState) -> TurnState:
        raise AssertionError(f"a turn that is {state.name} cannot be {self.name}")


_NEW, _ASK, _HLD, _UNT, _ANS, _END, _STO = TurnState
____ = None
# fmt: off
#                                    NEW   ASKED HELD  UNTR. ANSW. ENDED STORED
_ASKED = Event("asked",              _ASK, _ASK, ____, ____, ____, ____, ____)
_GRANTED = Event("granted",          _HLD, _HLD, ____, ____, ____, ____, ____)
_ANSWERED = Event("answered",        ____, _ANS, ____, ____, ____, ____, ____)
_UNTRACKED = Event("untracked",      _UNT, _UNT, ____, ____, ____, ____, ____)
_REFUSED = Event("refused",          _ANS, _ANS, _HLD, _ANS, _ANS, ____, ____)
# Once more, where the transaction in which it had ended was undone, or its end is not stored.
_ENDED = Event("ended",              _END, _END, _END, _END, _END, _END, ____)
_STORED = Event("stored",            ____, ____, ____, ____, ____, _STO, ____)
_ANEW = Event("begun anew",          _NEW, _NEW, _NEW, _NEW, _NEW, _NEW, _NEW)
# fmt: on
