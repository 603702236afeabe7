"""What becomes of a delivery whose message was not handled."""

import pytest

from oncely.core.control import Reject, Retry
from oncely.core.errors import (
    BusyError,
    ContentionError,
    ExhaustedError,
    FencedError,
    InDoubtError,
    MessageError,
    MismatchError,
    StoreUnavailable,
    TooOldError,
)
from oncely.core.policy import Policy
from oncely.core.record import Key
from oncely.handling.verdicts import AGAIN_S, after_failure, after_refusal
from oncely.ledger import Ledger
from oncely.testing import granted
from oncely.transports.base import DeadLetter, Delay

POLICY = Policy(tries=3, backoff=["1s", "2s"])


@pytest.mark.parametrize("kind", [BusyError, FencedError, StoreUnavailable, ContentionError])
@pytest.mark.parametrize("is_begun", [False, True])
def test_no_fault_of_the_message(kind: type[Exception], is_begun: bool) -> None:
    """What another worker or the store is the cause of comes again soon."""
    assert after_refusal(kind("why"), is_begun=is_begun) == Delay(AGAIN_S)


@pytest.mark.parametrize(
    "kind", [ExhaustedError, InDoubtError, MessageError, MismatchError, TooOldError]
)
def test_refused(kind: type[Exception]) -> None:
    """What can never be handled is set aside, with the reason."""
    assert after_refusal(kind("why"), is_begun=False) == DeadLetter(f"{kind.__name__}: why")


def test_unusable_result() -> None:
    """Once the handler has run, an unusable message is a failure, which the ledger has recorded."""
    assert after_refusal(MessageError("no JSON"), is_begun=True) is None
    assert after_refusal(ValueError("why"), is_begun=False) is None


def test_failure_of_a_record(ledger: Ledger, key: Key) -> None:
    """The record tells how often the message was tried, and whether it has failed for good."""
    claim = granted(ledger.claim(key, policy=POLICY))
    error = ValueError("why")
    ledger.fail(claim, error)
    assert after_failure(POLICY, ledger.find(key), 9, error) == Delay(1.0)
    assert after_failure(POLICY, ledger.find(key), 9, Retry("why", "5s")) == Delay(5.0)
    claim = granted(ledger.claim(key, policy=POLICY))
    ledger.fail(claim, error, final=True)
    assert after_failure(POLICY, ledger.find(key), 1, error) == DeadLetter("ValueError: why")


def test_failure_without_a_record() -> None:
    """Of a message that is not tracked, the broker's count tells."""
    error = ValueError("why")
    assert after_failure(POLICY, None, 2, error) == Delay(2.0)
    assert after_failure(POLICY, None, 3, error) == DeadLetter("ValueError: why")
    assert after_failure(POLICY, None, 1, Reject("why")) == DeadLetter("Reject: why")
