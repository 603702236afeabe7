"""The connection breaks while something is written: the caller is told what is stored."""

from collections.abc import Callable
from typing import TypeVar

import pytest
from tests.integration.lines import KEY, MESSAGE_ID, REFUSES, Line
from tests.records import granted, record_of

from oncely.core.commands import Duplicate
from oncely.core.errors import StoreUnavailable
from oncely.core.record import Claim, Key, Record, State
from oncely.ledger.arguments import new_token
from oncely.ledger.ledger import Ledger

T = TypeVar("T")

_WORD = MESSAGE_ID.encode()
_CHANGE = b"last_processed_at = "
"""Of the three requests of a claim that meets a record, only the last has it."""

pytestmark = pytest.mark.usefixtures("hurried")

# ---- Claims ------------------------------------------------------------------------------------


def test_first_claim(line: Line, delivers: bool) -> None:
    """A first claim is granted, and the claim in hand is the one that is stored."""
    line.proxy.cut(_WORD, delivers=delivers)
    claim = granted(line.ledger.claim(KEY, "60s"))
    _check_is_stored(line, claim, attempts=1)


def test_later_claim(line: Line, delivers: bool) -> None:
    """A claim after a failure is granted, as one more attempt and not as two."""
    line.other.fail(granted(line.other.claim(KEY)), "no credit")
    line.proxy.cut(_CHANGE, delivers=delivers)
    claim = granted(line.ledger.claim(KEY, "60s"))
    _check_is_stored(line, claim, attempts=2)


def test_claims_of_many(line: Line, delivers: bool) -> None:
    """Of many at once each that was free is granted, and stored as it is in hand."""
    keys = [Key("billing", f"message-{n}") for n in range(200)]
    line.other.complete(granted(line.other.claim(keys[7])))
    line.proxy.cut(b"message-100", delivers=delivers)
    outcomes = [*line.ledger.claim_many(keys, "60s")]
    assert isinstance(outcomes.pop(7), Duplicate)
    for claim in map(granted, outcomes):
        assert _same(line.stored(claim.key), claim)
    line.ledger.complete_many([granted(outcome) for outcome in outcomes])
    assert line.other.counts() == {("billing", State.COMPLETED): len(keys)}


def test_later_claim_while_the_server_is_away(line: Line, delivers: bool) -> None:
    """The same for a claim after a failure, which can be given back."""
    line.other.fail(granted(line.other.claim(KEY)), "no credit")
    line.proxy.cut(_CHANGE, delivers=delivers, refuses=REFUSES)
    token = new_token()
    claim = granted(_until_back(lambda: line.ledger.claim(KEY, "60s", token=token)))
    assert (claim.fence, claim.attempts) == (2, 2)
    line.ledger.release(claim)
    record = line.stored()
    assert (record.attempts, record.fence) == (1, 2)
    assert granted(line.other.claim(KEY)).attempts == 2


def test_duplicate(line: Line, delivers: bool) -> None:
    """A duplicate is one, and counted at most once."""
    line.other.complete(granted(line.other.claim(KEY)), "kept")
    line.proxy.cut(_CHANGE, delivers=delivers)
    outcome = line.ledger.claim(KEY)
    assert isinstance(outcome, Duplicate)
    assert outcome.record.result == "kept"
    assert line.stored().duplicates <= 1


# ---- With a claim ------------------------------------------------------------------------------

WRITES: dict[str, tuple[Callable[[Ledger, Claim], object], State]] = {
    "handled": (lambda ledger, claim: ledger.handled(claim), State.HANDLED),
    "complete": (lambda ledger, claim: ledger.complete(claim, {"total": 3}), State.COMPLETED),
    "fail": (lambda ledger, claim: ledger.fail(claim, "no"), State.FAILED),
    "extend": (lambda ledger, claim: ledger.extend(claim, "90s"), State.PROCESSING),
}


@pytest.mark.parametrize(("write", "state"), WRITES.values(), ids=WRITES)
def test_write(
    line: Line, delivers: bool, write: Callable[[Ledger, Claim], object], state: State
) -> None:
    """What a holder writes is written once, and the holder is told so."""
    claim = granted(line.ledger.claim(KEY, "60s"))
    line.proxy.cut(_WORD, delivers=delivers)
    write(line.ledger, claim)
    record = line.stored()
    assert (record.state, record.fence, record.attempts) == (state, 1, 1)
    # To extend a lease twice is to extend it.
    most = 2 if state is State.PROCESSING else 1
    assert 1 <= record.version - claim.version <= most
    assert record.result == ({"total": 3} if state is State.COMPLETED else None)
    assert record.error == ("no" if state is State.FAILED else None)


def test_release_of_the_first_claim(line: Line, delivers: bool) -> None:
    """A first claim that is released is gone."""
    claim = granted(line.ledger.claim(KEY))
    line.proxy.cut(_WORD, delivers=delivers)
    line.ledger.release(claim)
    assert line.other.find(KEY) is None
    granted(line.ledger.claim(KEY))


def test_release_of_a_later_claim(line: Line, delivers: bool) -> None:
    """A later claim that is released leaves what was before."""
    line.other.fail(granted(line.other.claim(KEY)), "no")
    claim = granted(line.ledger.claim(KEY))
    line.proxy.cut(_WORD, delivers=delivers)
    line.ledger.release(claim)
    record = line.stored()
    assert (record.state, record.attempts, record.fence) == (State.FAILED, 1, 2)
    assert granted(line.ledger.claim(KEY)).fence == 3


# ---- Looking, and operators --------------------------------------------------------------------


def test_reading(line: Line, delivers: bool) -> None:
    """What is only read is read again, and nobody notices."""
    line.other.complete(granted(line.other.claim(KEY)), 17)
    line.proxy.cut(_WORD, delivers=delivers)
    assert record_of(line.ledger, KEY).result == 17


def _check_is_stored(line: Line, claim: Claim, attempts: int) -> None:
    """The claim is the newest of its record, and its holder can complete it."""
    record = line.stored()
    assert _same(record, claim)
    assert (record.state, record.attempts) == (State.PROCESSING, attempts)
    assert record.lease_until == pytest.approx(line.other.now() + 60, abs=30)
    line.ledger.complete(claim)


def _until_back(call: Callable[[], T]) -> T:
    """What `call` returns once the server can be reached; it was away, or the test says nothing."""
    failures = 0
    while True:
        try:
            done = call()
        except StoreUnavailable:
            failures += 1
        else:
            assert failures
            return done


def _same(record: Record | None, claim: Claim) -> bool:
    return record is not None and (record.version, record.fence) == (claim.version, claim.fence)
