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
from oncely.core.rules import AGAIN_S, after_end, after_refusal, after_stop
from oncely.core.verdicts import Ack, Counted, DeadLetter, Delay, Phase, Requeue, Told, Verdict

RETRY = Policy(tries=3, backoff=["1s", "2s"])
SKIP = replace(RETRY, on_failed="skip")
DEAD = replace(RETRY, on_failed="dead_letter")
HOLD = replace(RETRY, on_in_doubt="hold")
ENDLESS = replace(RETRY, tries=None)
WAITING, STARTED, RUNNING, CALLED, _ = Phase
AGAIN = Delay(AGAIN_S)
NO = ValueError("no")

# fmt: off
ENDS: list[tuple[Policy, int, BaseException | None, Phase, bool, Told, Verdict, Counted]] = [
    # policy  attempt  error                     phase    stopping  told            verdict                           counted
    (RETRY,   1,       None,                     CALLED,  False,    Told.COMPLETED, Ack(),                            Counted.HANDLED),
    (RETRY,   1,       None,                     CALLED,  True,     Told.COMPLETED, Ack(),                            Counted.HANDLED),
    (RETRY,   1,       None,                     RUNNING, False,    Told.COMPLETED, Ack(),                            Counted.HANDLED),
    (RETRY,   1,       None,                     STARTED, False,    Told.RELEASED,  Ack(),                            Counted.SKIPPED),
    (RETRY,   1,       None,                     WAITING, False,    Told.RELEASED,  Requeue(),                        Counted.GIVEN_BACK),
    (RETRY,   1,       NO,                       CALLED,  False,    Told.FAILED,    Delay(1.0),                       Counted.RETRIED),
    (RETRY,   2,       NO,                       CALLED,  False,    Told.FAILED,    Delay(2.0),                       Counted.RETRIED),
    (RETRY,   3,       NO,                       CALLED,  False,    Told.EXHAUSTED, DeadLetter("ValueError: no"),     Counted.FAILED),
    (RETRY,   1,       NO,                       STARTED, False,    Told.FAILED,    Delay(1.0),                       Counted.RETRIED),
    (RETRY,   1,       NO,                       CALLED,  True,     Told.FAILED,    Delay(1.0),                       Counted.RETRIED),
    (ENDLESS, 99,      NO,                       CALLED,  False,    Told.FAILED,    Delay(2.0),                       Counted.RETRIED),
    (SKIP,    1,       NO,                       CALLED,  False,    Told.FAILED,    DeadLetter("ValueError: no"),     Counted.FAILED),
    (DEAD,    1,       NO,                       CALLED,  False,    Told.EXHAUSTED, DeadLetter("ValueError: no"),     Counted.FAILED),
    (RETRY,   1,       Retry("no", "9s"),        CALLED,  False,    Told.FAILED,    Delay(9.0),                       Counted.RETRIED),
    (RETRY,   1,       Retry("no"),              CALLED,  False,    Told.FAILED,    Delay(1.0),                       Counted.RETRIED),
    (RETRY,   3,       Retry("no", "9s"),        CALLED,  False,    Told.EXHAUSTED, DeadLetter("Retry: no"),          Counted.FAILED),
    (RETRY,   1,       Reject("no"),             CALLED,  False,    Told.EXHAUSTED, DeadLetter("Reject: no"),         Counted.REJECTED),
    (RETRY,   1,       MessageError("no"),       CALLED,  False,    Told.EXHAUSTED, DeadLetter("MessageError: no"),   Counted.REJECTED),
    (RETRY,   1,       Unrecoverable("no"),      CALLED,  False,    Told.EXHAUSTED, DeadLetter("Unrecoverable: no"),  Counted.FAILED),
    (RETRY,   1,       SystemExit(3),            CALLED,  False,    Told.FAILED,    Delay(1.0),                       Counted.RETRIED),
    (RETRY,   3,       KeyboardInterrupt(),      CALLED,  False,    Told.EXHAUSTED, DeadLetter("KeyboardInterrupt"),  Counted.FAILED),
    (SKIP,    1,       asyncio.CancelledError(), CALLED,  False,    Told.FAILED,    DeadLetter("CancelledError"),     Counted.FAILED),
    (RETRY,   1,       SystemExit(3),            CALLED,  True,     Told.RELEASED,  AGAIN,                            Counted.GIVEN_BACK),
    (HOLD,    1,       SystemExit(3),            CALLED,  True,     Told.NOTHING,   AGAIN,                            Counted.GIVEN_BACK),
    (HOLD,    1,       SystemExit(3),            RUNNING, True,     Told.RELEASED,  AGAIN,                            Counted.GIVEN_BACK),
    (HOLD,    1,       SystemExit(3),            CALLED,  False,    Told.FAILED,    Delay(1.0),                       Counted.RETRIED),
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
    ("policy", "attempts", "error", "phase", "is_stopping", "told", "verdict", "counted"), ENDS
)
def test_end(
    policy: Policy,
    attempts: int,
    error: BaseException | None,
    phase: Phase,
    is_stopping: bool,
    told: Told,
    verdict: Verdict,
    counted: Counted,
) -> None:
    """What the ledger is told, what becomes of the delivery, and as what it is counted."""
    assert after_end(policy, attempts, error, phase, is_stopping=is_stopping) == (
        told,
        verdict,
        counted,
    )


@pytest.mark.parametrize(("error", "verdict", "counted"), REFUSALS)
def test_refusal(error: Exception, verdict: Verdict, counted: Counted) -> None:
    """Where the handler does not run; the ledger is told nothing."""
    assert after_refusal(error) == (Told.NOTHING, verdict, counted)


def test_last_try_that_nobody_lived_to_tell() -> None:
    """What spent its tries by killing its workers is told, once, as a failure."""
    error = ExhaustedError("why")
    error.is_first = True
    assert after_refusal(error).counted is Counted.FAILED


@pytest.mark.parametrize(
    ("policy", "phase", "told", "verdict"),
    [
        (RETRY, WAITING, Told.RELEASED, Requeue()),
        (HOLD, WAITING, Told.RELEASED, Requeue()),
        (HOLD, RUNNING, Told.RELEASED, AGAIN),
        (RETRY, CALLED, Told.RELEASED, AGAIN),
        (HOLD, CALLED, Told.NOTHING, AGAIN),
    ],
)
def test_stop(policy: Policy, phase: Phase, told: Told, verdict: Verdict) -> None:
    """What runs when its process stops is given back, unless it may not run twice."""
    assert after_stop(policy, phase) == (told, verdict, Counted.GIVEN_BACK)
