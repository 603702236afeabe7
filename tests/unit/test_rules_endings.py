"""What follows an end, as a table: how far a message has come, what ended it, under which policy."""

import asyncio
from dataclasses import replace

import pytest

from oncely.core.control import Reject, Retry, Unrecoverable
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
from oncely.core.policy import Policy
from oncely.core.turn import AGAIN_S, Progress, after_end, after_refusal, after_stop
from oncely.core.verdicts import Ack, Counted, DeadLetter, Delay, End, Requeue, Verdict

RETRY = Policy(tries=3, backoff=["1s", "2s"])
SKIP = replace(RETRY, on_failed="skip")
DEAD = replace(RETRY, on_failed="dead_letter")
HOLD = replace(RETRY, on_in_doubt="hold")
ENDLESS = replace(RETRY, tries=None)
WAITING, STARTED, RUNNING, CALLED = Progress
AGAIN = Delay(AGAIN_S)
NO = ValueError("no")

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


@pytest.mark.parametrize(
    ("policy", "progress", "end", "verdict"),
    [
        (RETRY, WAITING, End.RELEASED, Requeue()),
        (HOLD, WAITING, End.RELEASED, Requeue()),
        (HOLD, RUNNING, End.RELEASED, AGAIN),
        (RETRY, CALLED, End.RELEASED, AGAIN),
        (HOLD, CALLED, End.LEFT, AGAIN),
    ],
)
def test_stop(policy: Policy, progress: Progress, end: End, verdict: Verdict) -> None:
    """What runs when its process stops is given back, unless it may not run twice."""
    assert after_stop(policy, progress) == (end, verdict, Counted.GIVEN_BACK)
