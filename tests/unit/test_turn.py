"""A turn: every event in every state, and what follows from how its handling has ended."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from oncely.core.commands import Acquire, Duplicate, Granted, Handled, InDoubt
from oncely.core.control import EffectUnknown, Reject, Retry, Unrecoverable
from oncely.core.errors import (
    BusyError,
    ContentionError,
    DuplicateError,
    ExhaustedError,
    FencedError,
    InDoubtError,
    MessageError,
    MismatchError,
    StoreUnavailable,
    TooOldError,
)
from oncely.core.policy import Policy, at_most_once
from oncely.core.record import Claim, Key, Record, State
from oncely.core.turn import (
    AFTER_DOUBT,
    AFTER_OUTAGE,
    AGAIN_S,
    GIVEN_BACK,
    Progress,
    Turn,
    TurnState,
    Untracked,
    after_end,
    after_refusal,
)
from oncely.core.verdicts import Ack, Counted, DeadLetter, Delay, End, Requeue, Verdict

NEW, ASKED, HELD, UNTRACKED, ANSWERED, ENDED, STORED = TurnState
KEY = Key("billing", "1")
CLAIM = Claim(KEY, 1, 7, 1)
RECORD = Record(KEY, State.COMPLETED, 1, 1, 7, 0.0, 0.0, result=42)
POLICY = Policy()
ASK = Acquire(KEY, POLICY, 60.0, 7)

EVENTS: dict[str, Callable[[Turn], object]] = {
    "asks": lambda turn: turn.asks(ASK),
    "granted": lambda turn: turn.granted(CLAIM),
    "answered": lambda turn: turn.answered(Duplicate(RECORD)),
    "runs_untracked": lambda turn: turn.runs_untracked(),
    "refused": lambda turn: turn.refused(MessageError("no")),
    "ended": lambda turn: turn.ended(POLICY),
    "ended_as": lambda turn: turn.ended_as(GIVEN_BACK),
    "ended_by": lambda turn: turn.ended_by(MessageError("no")),
    "left_in_doubt": lambda turn: turn.left_in_doubt(),
    "stopped": lambda turn: turn.stopped(POLICY),
    "stored": lambda turn: turn.stored(),
    "fenced": lambda turn: turn.fenced(),
    "begins_anew": lambda turn: turn.begins_anew(),
}
WAYS: dict[TurnState, list[str]] = {
    NEW: [],
    ASKED: ["asks"],
    HELD: ["asks", "granted"],
    UNTRACKED: ["asks", "runs_untracked"],
    ANSWERED: ["asks", "answered"],
    ENDED: ["asks", "granted", "ended"],
    STORED: ["asks", "granted", "ended", "stored"],
}
____ = None
# fmt: off
FOLLOWS: dict[str, list[TurnState | None]] = {
    #                  NEW        ASKED      HELD   UNTRACKED  ANSWERED  ENDED   STORED
    "asks":           [ASKED,     ASKED,     ____,  ____,      ____,     ____,   ____],
    "granted":        [HELD,      HELD,      ____,  ____,      ____,     ____,   ____],
    "answered":       [____,      ANSWERED,  ____,  ____,      ____,     ____,   ____],
    "runs_untracked": [UNTRACKED, UNTRACKED, ____,  ____,      ____,     ____,   ____],
    "refused":        [ANSWERED,  ANSWERED,  HELD,  ANSWERED,  ANSWERED, ____,   ____],
    "ended":          [ENDED,     ENDED,     ENDED, ENDED,     ENDED,    ENDED,  ____],
    "ended_as":       [ENDED,     ENDED,     ENDED, ENDED,     ENDED,    ENDED,  ____],
    "ended_by":       [ENDED,     ENDED,     ENDED, ENDED,     ENDED,    ENDED,  ____],
    "left_in_doubt":  [ENDED,     ENDED,     ENDED, ENDED,     ENDED,    ENDED,  ____],
    "stopped":        [ENDED,     ENDED,     ENDED, ENDED,     ENDED,    ENDED,  ____],
    "stored":         [____,      ____,      ____,  ____,      ____,     STORED, ____],
    "fenced":         [____,      ____,      ____,  ____,      ____,     STORED, ____],
    "begins_anew":    [NEW,       NEW,       NEW,   NEW,       NEW,      NEW,    NEW],
}
# fmt: on


def turn_in(state: TurnState) -> Turn:
    """A turn that has come to that state."""
    turn = Turn("1")
    for event in WAYS[state]:
        EVENTS[event](turn)
    assert turn.state is state
    return turn


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("state", TurnState)
def test_every_event_in_every_state(state: TurnState, event: str) -> None:
    """What follows, or that the event cannot happen there."""
    turn, then = turn_in(state), FOLLOWS[event][state]
    if then is not None:
        EVENTS[event](turn)
        assert turn.state is then
    else:
        with pytest.raises(AssertionError, match=f"a turn that is {state.name} cannot be"):
            EVENTS[event](turn)
        assert turn.state is state


def test_answers() -> None:
    """A duplicate has what was kept; another answer is a refusal; a claim is not one."""
    turn = turn_in(ANSWERED)
    assert (turn.is_duplicate, turn.kept, turn.refusal, turn.is_to_run) == (True, 42, None, False)
    assert turn.ended(POLICY) == (End.LEFT, Ack(), Counted.DUPLICATE)
    turn = turn_in(ASKED)
    turn.answered(Handled(CLAIM, RECORD))
    assert turn.is_duplicate
    assert turn.may_have_sent
    turn = turn_in(ASKED)
    turn.answered(InDoubt(RECORD))
    assert isinstance(turn.refusal, InDoubtError)
    assert not turn.is_duplicate
    turn = turn_in(HELD)
    assert (turn.outcome, turn.claim, turn.is_to_run) == (Granted(CLAIM), CLAIM, True)


def test_refused_with_a_claim() -> None:
    """Where the handler must not run after all, its claim is given back."""
    turn = turn_in(HELD)
    turn.refused(FencedError("late"))
    assert not turn.is_to_run
    assert turn.ended(POLICY) == (End.RELEASED, Delay(1.0), Counted.GIVEN_BACK)


def test_failure_without_a_claim() -> None:
    """Nothing is stored of a message that has no claim: it is redelivered when it is due."""
    turn = turn_in(UNTRACKED)
    turn.called()
    turn.raised(ValueError("no"))
    assert turn.ended(POLICY) == (End.LEFT, Delay(30.0), Counted.RETRIED)


def test_failure_in_an_outage() -> None:
    """Nobody counts the attempts of what runs while the store is away."""
    turn = turn_in(ASKED)
    turn.runs_untracked(is_outage=True)
    turn.called()
    turn.raised(ValueError("no"))
    assert turn.ended(Policy(tries=1)) == AFTER_OUTAGE
    assert turn.outcome == Untracked(is_outage=True)


@pytest.mark.parametrize(
    ("policy", "event", "end", "verdict"),
    [
        (POLICY, None, End.RELEASED, Requeue()),
        (POLICY, Turn.called, End.RELEASED, Delay(1.0)),
        (at_most_once(), None, End.RELEASED, Requeue()),
        (at_most_once(), Turn.runs, End.RELEASED, Delay(1.0)),
        (at_most_once(), Turn.called, End.LEFT, Delay(1.0)),
    ],
)
def test_stopped(
    policy: Policy, event: Callable[[Turn], None] | None, end: End, verdict: Verdict
) -> None:
    """A handler that was stopped is given back, unless it was called and must not repeat."""
    turn = turn_in(HELD)
    if event is not None:
        event(turn)
    turn.stopped(policy)
    assert turn.ending == (end, verdict, Counted.GIVEN_BACK)


def test_stopped_in_a_second_run() -> None:
    """A middleware that lets the handler run again does not undo that it was called."""
    turn = turn_in(HELD)
    turn.called()
    turn.runs()
    turn.started()
    turn.stopped(at_most_once())
    assert turn.ending == (End.LEFT, Delay(1.0), Counted.GIVEN_BACK)


def test_called_while_it_is_stopped() -> None:
    """Whoever calls the handler after the stop sees that, and whoever stops it sees an earlier
    call: so that it does not run after its claim was given back.
    """
    turn = turn_in(HELD)
    seen: list[TurnState] = []
    turn.sent = lambda: seen.append(turn.state) or ()  # type: ignore[method-assign, func-returns-value]
    turn.stopped(at_most_once())
    assert seen == [ENDED]


def test_fenced() -> None:
    """Another worker has the message: this one's end is not stored."""
    turn = turn_in(ENDED)
    turn.fenced()
    assert isinstance(turn.refusal, FencedError)
    assert turn.ending == AFTER_DOUBT


def test_begins_anew() -> None:
    """All is as it was, but for the message; another token: what is stored after all must not be
    granted once more.
    """
    turn = turn_in(STORED)
    turn.token = 7
    turn.called()
    turn.begins_anew()
    assert vars(turn).items() >= vars(Turn("1")).items()
    known = {name for name in vars(turn) if getattr(turn, name) != getattr(Turn("1"), name)}
    assert known == {"key"}


# ---- What follows from an end ------------------------------------------------------------------

RETRY = Policy(tries=3, backoff=["1s", "2s"])
SKIP = replace(RETRY, on_failed="skip")
DEAD = replace(RETRY, on_failed="dead_letter")
HOLD = replace(RETRY, on_in_doubt="hold")
LATE = replace(HOLD, in_doubt_on=(TimeoutError,), tries=1)
ASIDE = replace(LATE, on_in_doubt="dead_letter")
PROBE = replace(LATE, on_in_doubt=lambda _: "unknown")
ANY = replace(LATE, in_doubt_on=(Exception,))
ENDLESS = replace(RETRY, tries=None)
WAITING, STARTED, RUNNING, CALLED = Progress
AGAIN = Delay(AGAIN_S)
NO = ValueError("no")
WHO = EffectUnknown("who")
OUT = TimeoutError("out")

# fmt: off
ENDS: list[tuple[Policy, int, BaseException | None, Progress, bool, End, Verdict, Counted]] = [
    # policy  attempt  error                     progress stopping  stored          verdict                           counted
    (RETRY,   1,       None,                     CALLED,  False,    End.COMPLETED,  Ack(),                            Counted.HANDLED),
    (RETRY,   1,       None,                     CALLED,  True,     End.COMPLETED,  Ack(),                            Counted.HANDLED),
    (RETRY,   1,       None,                     RUNNING, False,    End.COMPLETED,  Ack(),                            Counted.HANDLED),
    (RETRY,   1,       None,                     STARTED, False,    End.RELEASED,   Ack(),                            Counted.SKIPPED),
    (RETRY,   1,       None,                     WAITING, False,    End.RELEASED,   Requeue(),                        Counted.GIVEN_BACK),
    (RETRY,   1,       NO,                       CALLED,  False,    End.FAILED,     Delay(1.0),                       Counted.RETRIED),
    (RETRY,   2,       NO,                       CALLED,  False,    End.FAILED,     Delay(2.0),                       Counted.RETRIED),
    (RETRY,   3,       NO,                       CALLED,  False,    End.EXHAUSTED,  DeadLetter("ValueError: no"),     Counted.FAILED),
    (RETRY,   1,       NO,                       STARTED, False,    End.FAILED,     Delay(1.0),                       Counted.RETRIED),
    (RETRY,   1,       NO,                       CALLED,  True,     End.FAILED,     Delay(1.0),                       Counted.RETRIED),
    (ENDLESS, 99,      NO,                       CALLED,  False,    End.FAILED,     Delay(2.0),                       Counted.RETRIED),
    (SKIP,    1,       NO,                       CALLED,  False,    End.FAILED,     DeadLetter("ValueError: no"),     Counted.FAILED),
    (DEAD,    1,       NO,                       CALLED,  False,    End.EXHAUSTED,  DeadLetter("ValueError: no"),     Counted.FAILED),
    (RETRY,   1,       Retry("no", "9s"),        CALLED,  False,    End.FAILED,     Delay(9.0),                       Counted.RETRIED),
    (RETRY,   1,       Retry("no"),              CALLED,  False,    End.FAILED,     Delay(1.0),                       Counted.RETRIED),
    (RETRY,   3,       Retry("no", "9s"),        CALLED,  False,    End.EXHAUSTED,  DeadLetter("Retry: no"),          Counted.FAILED),
    (RETRY,   1,       Reject("no"),             CALLED,  False,    End.EXHAUSTED,  DeadLetter("Reject: no"),         Counted.REJECTED),
    (RETRY,   1,       MessageError("no"),       CALLED,  False,    End.EXHAUSTED,  DeadLetter("MessageError: no"),   Counted.REJECTED),
    (RETRY,   1,       Unrecoverable("no"),      CALLED,  False,    End.EXHAUSTED,  DeadLetter("Unrecoverable: no"),  Counted.FAILED),
    (RETRY,   1,       SystemExit(3),            CALLED,  False,    End.FAILED,     Delay(1.0),                       Counted.RETRIED),
    (RETRY,   3,       KeyboardInterrupt(),      CALLED,  False,    End.EXHAUSTED,  DeadLetter("KeyboardInterrupt"),  Counted.FAILED),
    (SKIP,    1,       asyncio.CancelledError(), CALLED,  False,    End.FAILED,     DeadLetter("CancelledError"),     Counted.FAILED),
    (RETRY,   1,       SystemExit(3),            CALLED,  True,     End.RELEASED,   AGAIN,                            Counted.GIVEN_BACK),
    (HOLD,    1,       SystemExit(3),            CALLED,  True,     End.LEFT,       AGAIN,                            Counted.GIVEN_BACK),
    (HOLD,    1,       SystemExit(3),            RUNNING, True,     End.RELEASED,   AGAIN,                            Counted.GIVEN_BACK),
    (HOLD,    1,       SystemExit(3),            CALLED,  False,    End.FAILED,     Delay(1.0),                       Counted.RETRIED),
    (RETRY,   1,       WHO,                      CALLED,  False,    End.FAILED,     Delay(1.0),                       Counted.RETRIED),
    (HOLD,    1,       WHO,                      CALLED,  False,    End.IN_DOUBT,   DeadLetter("EffectUnknown: who"), Counted.IN_DOUBT),
    (LATE,    9,       OUT,                      CALLED,  False,    End.IN_DOUBT,   DeadLetter("TimeoutError: out"),  Counted.IN_DOUBT),
    (LATE,    1,       OUT,                      RUNNING, False,    End.EXHAUSTED,  DeadLetter("TimeoutError: out"),  Counted.FAILED),
    (ANY,     1,       NO,                       CALLED,  False,    End.IN_DOUBT,   DeadLetter("ValueError: no"),     Counted.IN_DOUBT),
    (ANY,     1,       Retry("no"),              CALLED,  False,    End.EXHAUSTED,  DeadLetter("Retry: no"),          Counted.FAILED),
    (ASIDE,   1,       OUT,                      CALLED,  False,    End.EXHAUSTED,  DeadLetter("TimeoutError: out"),  Counted.FAILED),
    (PROBE,   2,       OUT,                      CALLED,  False,    End.IN_DOUBT,   Delay(2.0),                       Counted.IN_DOUBT),
    (PROBE,   2,       ExceptionGroup("", [NO, OUT]), CALLED, False, End.IN_DOUBT,  Delay(2.0),                       Counted.IN_DOUBT),
]
REFUSALS = [
    (BusyError("why"),        AGAIN,                              Counted.GIVEN_BACK),
    (FencedError("why"),      AGAIN,                              Counted.GIVEN_BACK),
    (StoreUnavailable("why"), AGAIN,                              Counted.GIVEN_BACK),
    (ContentionError("why"),  AGAIN,                              Counted.GIVEN_BACK),
    (OSError("why"),          AGAIN,                              Counted.GIVEN_BACK),
    (DuplicateError("why"),   Ack(),                              Counted.DUPLICATE),
    (MessageError("why"),     DeadLetter("MessageError: why"),    Counted.SET_ASIDE),
    (MismatchError("why"),    DeadLetter("MismatchError: why"),   Counted.SET_ASIDE),
    (InDoubtError("why"),     DeadLetter("InDoubtError: why"),    Counted.SET_ASIDE),
    (TooOldError("why"),      DeadLetter("TooOldError: why"),     Counted.SET_ASIDE),
    (ExhaustedError("why"),   DeadLetter("ExhaustedError: why"),  Counted.SET_ASIDE),
]
# fmt: on


@pytest.mark.parametrize(
    ("policy", "attempts", "error", "progress", "is_stopping", "end", "verdict", "counted"), ENDS
)
def test_end(
    policy: Policy,
    attempts: int,
    error: BaseException | None,
    progress: Progress,
    is_stopping: bool,
    end: End,
    verdict: Verdict,
    counted: Counted,
) -> None:
    """What the ledger is told, what becomes of the delivery, and as what it is counted."""
    assert after_end(policy, attempts, error, progress, is_stopping=is_stopping) == (
        end,
        verdict,
        counted,
    )


@pytest.mark.parametrize(("error", "verdict", "counted"), REFUSALS)
def test_refusal(error: Exception, verdict: Verdict, counted: Counted) -> None:
    """Where the handler does not run; the ledger is told nothing."""
    assert after_refusal(error) == (End.LEFT, verdict, counted)


def test_last_try_that_nobody_lived_to_tell() -> None:
    """What spent its tries by killing its workers is told, once, as a failure."""
    error = ExhaustedError("why")
    error.is_first = True
    assert after_refusal(error).counted is Counted.FAILED
