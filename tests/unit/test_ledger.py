"""The ledger: its loop of deciding and swapping, what it keeps, and what operators may do."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest
from tests.meddling import MeddlingStore
from tests.records import granted, record_of
from tests.unit.conftest import Stall

from oncely.core.commands import Busy, Duplicate, Fail, Granted, Mismatch
from oncely.core.errors import ConfigError, ContentionError, FencedError, MessageError
from oncely.core.policy import Policy
from oncely.core.record import Claim, Key, State
from oncely.ledger import group_commit
from oncely.ledger.ledger import Ledger, open_ledger
from oncely.stores.memory_store import MemoryStore
from oncely.testing import ManualClock

# ---- Races -------------------------------------------------------------------------------------


def test_winner_gone_again(
    ledger: Ledger, rival: Ledger, meddling: MeddlingStore, claim: Claim, key: Key
) -> None:
    """A takeover whose record is gone when it writes starts over, and is a first claim."""
    rival.fail(claim, "no")
    meddling.once(lambda: meddling.once(lambda: rival.forget(key)))
    assert granted(ledger.claim(key)).attempts == 1


def test_complete_races_with_own_extend(
    ledger: Ledger, rival: Ledger, meddling: MeddlingStore, claim: Claim, key: Key
) -> None:
    """A complete that the holder's own extend overtakes is written all the same."""
    meddling.once(lambda: rival.extend(claim, "60s"))
    ledger.complete(claim, "done")
    assert record_of(ledger, key).result == "done"


def test_complete_races_with_forget(
    ledger: Ledger, rival: Ledger, meddling: MeddlingStore, clock: ManualClock, key: Key
) -> None:
    """A complete of a record that is forgotten meanwhile is fenced, and brings nothing back."""
    claim = granted(ledger.claim(key, "60s"))
    clock.advance(61)
    meddling.once(lambda: rival.forget(key))
    with pytest.raises(FencedError, match="gone"):
        ledger.complete(claim)
    assert ledger.find(key) is None


def test_duplicate_need_not_be_counted(
    ledger: Ledger, rival: Ledger, meddling: MeddlingStore, claim: Claim, key: Key
) -> None:
    """A duplicate is answered though counting it lost a race; it does not start over."""
    rival.complete(claim)
    meddling.calls.clear()
    meddling.once(lambda: meddling.once(lambda: rival.claim(key)))
    assert isinstance(ledger.claim(key), Duplicate)
    assert meddling.calls == ["insert", "load", "update"]
    assert record_of(ledger, key).duplicates == 1


def test_losing_for_ever(
    ledger: Ledger, rival: Ledger, meddling: MeddlingStore, claim: Claim, key: Key
) -> None:
    """A record that changes before every write ends in ContentionError, and is not written."""
    meddling.meddle = lambda: rival.extend(claim, "60s")
    with pytest.raises(ContentionError, match="1 records changed 50 times"):
        ledger.complete(claim)
    assert record_of(ledger, key).state is State.PROCESSING
    meddling.meddle = lambda: None
    ledger.complete(claim)


# ---- Exchanges with the store ------------------------------------------------------------------


def test_new_messages_cost_two_exchanges(ledger: Ledger, meddling: MeddlingStore) -> None:
    """A batch of new messages is one insert, and completing it one swap."""
    claims = [granted(o) for o in ledger.claim_many([Key("c", str(n)) for n in range(50)])]
    ledger.complete_many(claims)
    assert meddling.calls == ["insert", "update"]


def test_a_few_copies_change_nothing(ledger: Ledger, meddling: MeddlingStore) -> None:
    """Records are read first where most messages have one lately: not after a few copies."""
    keys = [Key("billing", str(number)) for number in range(400)]
    asked = [keys[:200], keys[:20], keys[200:], keys, keys]
    calls = []
    for each in asked:
        meddling.calls.clear()
        ledger.claim_many(each)
        calls.append([call for call in meddling.calls if call in ("insert", "load")])
    assert calls == [["insert"], ["insert", "load"], ["insert"], ["insert", "load"], ["load"]]


def test_renewed_claims_cost_one_exchange(
    ledger: Ledger, meddling: MeddlingStore, claim: Claim
) -> None:
    """With the claim as `extend` and `handled` return it the next write is one swap."""
    meddling.calls.clear()
    claim = ledger.extend(claim, "60s")
    claim = ledger.handled(claim)
    ledger.complete(claim)
    assert meddling.calls == ["update"] * 3


def test_ends_that_differ_cost_one_exchange(
    ledger: Ledger, meddling: MeddlingStore, clock: ManualClock
) -> None:
    """Claims that are given back over what stood before each, and failures with a delay of their
    own, go to the store together.
    """
    keys = [Key("billing", str(n)) for n in range(20)]
    ledger.claim_many(keys, "60s")
    clock.advance(61)
    again = [granted(outcome) for outcome in ledger.claim_many(keys, "60s")]
    meddling.calls.clear()
    ledger.release_many(again[:10])
    assert meddling.calls == ["update"]
    meddling.calls.clear()
    fails = [Fail(claim, "no", retry_s=float(n)) for n, claim in enumerate(again[10:])]
    ledger._settle(fails)
    assert meddling.calls == ["update"]
    dues = [ledger.find(key) for key in keys[10:]]
    assert [each and each.lease_until for each in dues] == [clock() + n for n in range(10)]


def test_nothing_costs_nothing(ledger: Ledger, meddling: MeddlingStore) -> None:
    """To ask for nothing asks the store for nothing."""
    assert ledger.claim_many([]) == []
    assert ledger.complete_many([]) == []
    assert meddling.calls == []


# ---- Copies ------------------------------------------------------------------------------------


def complete(ledger: Ledger, claim: Claim, _: ManualClock) -> None:
    """Leave the message completed."""
    ledger.complete(claim)


def fail(ledger: Ledger, claim: Claim, _: ManualClock) -> None:
    """Leave the message failed."""
    ledger.fail(claim, "no")


def leave_in_doubt(_: Ledger, __: Claim, clock: ManualClock) -> None:
    """Leave the message in doubt."""
    clock.advance(61)


HAPPENED: dict[str, Any] = {
    "policy": Policy(on_in_doubt=lambda message: "happened"),
    "finding": "happened",
}


@pytest.mark.parametrize(
    ("before", "asked", "first", "others"),
    [
        (Ledger.release, {}, Granted, Busy),
        (complete, {}, Duplicate, Duplicate),
        (fail, {}, Granted, Busy),
        (leave_in_doubt, HAPPENED, Duplicate, Duplicate),
    ],
    ids=["new", "completed", "failed", "found to have happened"],
)
def test_copies(
    ledger: Ledger,
    claim: Claim,
    clock: ManualClock,
    before: Callable[..., None],
    asked: dict[str, Any],
    first: type,
    others: type,
) -> None:
    """Of a thousand copies in a batch at most one is granted; the work is bounded."""
    before(*[ledger, claim, clock][: 2 if before is Ledger.release else 3])
    outcomes = ledger.claim_many([claim.key] * 1_000, **asked)
    assert [type(outcome) for outcome in outcomes] == [first] + [others] * 999


@pytest.mark.parametrize(
    "end",
    [
        Ledger.complete,
        lambda ledger, claim: ledger.fail(claim, "no"),
        lambda ledger, claim: ledger.extend(claim, "60s"),
        Ledger.release,
    ],
)
def test_a_worker_whose_effect_a_probe_has_found(
    ledger: Ledger, claim: Claim, clock: ManualClock, end: Callable[[Ledger, Claim], object]
) -> None:
    """It lives on, and is told that nothing of what it stores is kept."""
    leave_in_doubt(ledger, claim, clock)
    assert isinstance(ledger.claim(claim.key, **HAPPENED), Duplicate)
    with pytest.raises(FencedError):
        end(ledger, claim)


def test_copies_with_another_payload(ledger: Ledger, key: Key) -> None:
    """Of copies under one id those with another payload are a mismatch."""
    outcomes = ledger.claim_many([key] * 3, fingerprints=["one", "two", "one"])
    assert [type(outcome) for outcome in outcomes] == [Granted, Mismatch, Busy]


def test_as_many_values_as_messages(ledger: Ledger, key: Key) -> None:
    """As many fingerprints as keys, and results as claims, or it is an error before anything is
    stored.
    """
    with pytest.raises(ValueError, match="fingerprint: 2 for 1 keys; give one for each key"):
        ledger.claim_many([key], fingerprints=["one", "two"])
    assert ledger.counts() == {}
    claim = granted(ledger.claim(key))
    for results in ([], [1, 2]):
        with pytest.raises(ValueError, match="zip"):
            ledger.complete_many([claim], results)
    assert record_of(ledger, key).state is State.PROCESSING


# ---- With a claim ------------------------------------------------------------------------------


def test_error_beside_metadata(ledger: Ledger, key: Key) -> None:
    """The error stands in metadata under "error", beside what was there; the newest stays."""
    claim = granted(ledger.claim(key, metadata={"tenant": "a", "error": "mine"}))
    ledger.fail(claim, "first")
    ledger.fail(granted(ledger.claim(key, metadata={"tenant": "b"})), "second")
    assert record_of(ledger, key).metadata == {"tenant": "a", "error": "second"}


def test_values_are_the_ledgers_own(ledger: Ledger, key: Key) -> None:
    """What a caller does later with metadata or a result changes nothing in the ledger."""
    metadata = {"tags": ["a"]}
    ledger.complete(granted(ledger.claim(key, metadata=metadata)), {"tags": ["a"]})
    metadata["tags"].append("b")
    record_of(ledger, key).result["tags"].append("b")
    assert record_of(ledger, key).metadata == record_of(ledger, key).result == {"tags": ["a"]}


NO_JSON = [object(), {1, 2}, b"bytes", float("nan"), float("inf"), 1j]


@pytest.mark.parametrize("value", NO_JSON, ids=lambda value: type(value).__name__)
def test_result_that_is_no_json(ledger: Ledger, claim: Claim, value: object) -> None:
    """A result that is not JSON is refused before anything is written."""
    with pytest.raises(MessageError, match="JSON"):
        ledger.complete(claim, value)
    with pytest.raises(MessageError, match="JSON"):
        ledger.complete_many([claim, claim], [1, value])
    assert record_of(ledger, claim.key).state is State.PROCESSING


def test_lease_replaces_the_policys(ledger: Ledger, key: Key) -> None:
    """A lease given with the claim replaces the policy's."""
    now = ledger.now()
    ledger.claim(key, "10s", Policy(lease="1h"))
    assert record_of(ledger, key).lease_until == now + 10
    other = Key("billing", "other")
    ledger.claim(other, policy=Policy(lease="1h"))
    assert record_of(ledger, other).lease_until == now + 3_600


# ---- Opening -----------------------------------------------------------------------------------


def test_sqlite_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told when the ledger is opened, with the version that it needs."""
    monkeypatch.setattr("sqlite3.sqlite_version_info", (3, 32, 3))
    with pytest.raises(ConfigError, match=r"a ledger in a file needs 3\.33 or newer"):
        open_ledger("sqlite:///ledger.db")


class SideBySide(MeddlingStore):
    """A store that works on two batches at once."""

    batches_at_once = 2


def test_as_many_batches_as_the_store_works_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A single call goes on beside another that stands still in such a store."""
    monkeypatch.setattr(group_commit, "STALL_S", 60.0)
    stall, store = Stall(), SideBySide(MemoryStore())
    store.once(stall.hold)
    with closing(Ledger(store)) as ledger, ThreadPoolExecutor(2) as pool:
        first = pool.submit(ledger.claim, Key("billing", "1"))
        assert stall.reached.wait(60)
        second = pool.submit(ledger.claim, Key("billing", "2"))
        try:
            granted(second.result(60))
        finally:
            stall.go_on.set()
        granted(first.result(60))
