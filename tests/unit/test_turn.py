"""A turn as a state machine: every event in every state, and what stops a handler."""

from collections.abc import Callable

import pytest

from oncely.core.commands import Ask, Duplicate, Granted, Handled, InDoubt
from oncely.core.errors import FencedError, InDoubtError, MessageError
from oncely.core.policy import Policy, at_most_once
from oncely.core.record import Claim, Key, Record, State
from oncely.core.turn import AFTER_DOUBT, AFTER_OUTAGE, GIVEN_BACK, Turn, TurnState, Untracked
from oncely.core.verdicts import Ack, Counted, Delay, End, Requeue

NEW, ASKED, HELD, UNTRACKED, ANSWERED, ENDED, STORED = TurnState
KEY = Key("billing", "1")
CLAIM = Claim(KEY, 1, 7, 1)
RECORD = Record(KEY, State.COMPLETED, 1, 1, 7, 0.0, 0.0, result=42)
POLICY = Policy()
ASK = Ask(KEY, POLICY, 60.0, 7)

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
    ("policy", "is_called", "end"),
    [
        (POLICY, True, End.RELEASED),
        (at_most_once(), True, End.LEFT),
        (at_most_once(), False, End.RELEASED),
    ],
)
def test_stopped(policy: Policy, is_called: bool, end: End) -> None:
    """A handler that was stopped is given back, unless it was called and must not repeat."""
    turn = turn_in(HELD)
    if is_called:
        turn.called()
    turn.stopped(policy)
    verdict = Delay(1.0) if is_called else Requeue()
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
