"""The heartbeat where something else happens meanwhile: takeovers, clocks, forks, new claims."""

import queue
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from tests.conditions import LIMIT_S, wait_until
from tests.logs import events_in
from tests.meddling import MeddlingStore
from tests.processes import exit_of, forked
from tests.records import granted, record_of
from tests.unit.conftest import extended, failing, nothing

from oncely.core.commands import Busy, Outcome
from oncely.core.durations import Duration
from oncely.core.errors import StoreDenied
from oncely.core.message import Message
from oncely.core.policy import Policy
from oncely.core.record import Claim, Key
from oncely.core.turn import Turn
from oncely.ledger.driver import run_inline
from oncely.ledger.ledger import Ledger
from oncely.lifecycle import heartbeat as heartbeats
from oncely.lifecycle.heartbeat import Heartbeat
from oncely.lifecycle.lifecycle import Lifecycle
from oncely.lifecycle.retry_queue import RetryQueue
from oncely.testing import ManualClock

_LEASE_S = 0.06


class WatchedLedger(Ledger):
    """A ledger that tells of each extending, and lets a test do something at its end."""

    def __init__(self, store: MeddlingStore) -> None:
        super().__init__(store)
        self.extended: queue.Queue[list[Claim]] = queue.Queue()
        self.afterwards: Callable[[], object] = lambda: None

    def extend_each(
        self, claims: Sequence[Claim], lease: Duration
    ) -> Sequence[Outcome | Exception]:
        try:
            outcomes = super().extend_each(claims, lease)
            self.afterwards()
            return outcomes
        finally:
            self.extended.put(list(claims))

    def beats(self, number: int) -> list[Claim]:
        """Wait for so many extendings from now on; the claims of the last."""
        while not self.extended.empty():
            self.extended.get_nowait()
        for _ in range(number):
            claims = self.extended.get(timeout=LIMIT_S)
        return claims


@pytest.fixture
def ledger(meddling: MeddlingStore) -> WatchedLedger:
    return WatchedLedger(meddling)


@pytest.fixture
def monotonic() -> ManualClock:
    """The clock that the heartbeat reads, moved by hand."""
    return ManualClock(1_000.0)


@pytest.fixture
def heartbeat(ledger: WatchedLedger, monotonic: ManualClock) -> Iterator[Heartbeat]:
    heartbeat = Heartbeat(ledger, _LEASE_S, monotonic)
    yield heartbeat
    heartbeat.close()


def test_fenced_claims_are_dropped(
    ledger: WatchedLedger,
    heartbeat: Heartbeat,
    clock: ManualClock,
    claim: Claim,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A claim that another worker took over is not extended again, nor good; it is logged."""
    other = granted(ledger.claim(Key("billing", "other")))
    clock.advance(61)
    newest = granted(ledger.claim(claim.key))
    heartbeat.hold([claim, other], 0.0)
    ledger.beats(1)
    assert [extended.key for extended in ledger.beats(2)] == [other.key]
    assert not heartbeat.is_good(claim)
    heartbeat.lost(claim)
    assert events_in(caplog).count("claim_lost") == 1
    found = record_of(ledger, claim.key)
    assert (found.fence, found.version) == (newest.fence, newest.version)


def test_store_clock_set_forward(
    ledger: WatchedLedger,
    clock: ManualClock,
    monotonic: ManualClock,
    claim: Claim,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the store's clock is set forward by a day in the middle of the work, the leases that
    seem over begin anew long before the next beat, so that nobody is granted their messages.
    """
    monkeypatch.setattr(heartbeats, "_LOOK_S", 0.01)
    heartbeat = Heartbeat(ledger, 3_600.0, monotonic)
    heartbeat.hold([claim], monotonic.now)
    wait_until(lambda: heartbeat._ahead_s is not None)
    clock.advance(86_400.0)
    ledger.extended.get(timeout=LIMIT_S)
    wait_until(lambda: heartbeat.newest([claim])[0] is not claim)
    heartbeat.close()
    assert "store_clock_jumped" in events_in(caplog)
    assert isinstance(ledger.claim(claim.key), Busy)


def test_claimed_again_during_a_beat(
    ledger: WatchedLedger, heartbeat: Heartbeat, claim: Claim, key: Key
) -> None:
    """A message claimed again while its former claim is being extended is held by the new one."""
    newer: list[Claim] = []

    def fail_and_claim_again() -> None:
        ledger.afterwards = lambda: None
        ledger.fail(heartbeat.let_go([claim])[0], "no")
        newer.append(granted(ledger.claim(key)))
        heartbeat.hold(newer, 0.0)

    ledger.afterwards = fail_and_claim_again
    heartbeat.hold([claim], 0.0)
    ledger.extended.get(timeout=LIMIT_S)
    heartbeat.close()
    [held] = heartbeat.let_go(newer[:1])
    assert held.fence == 2
    ledger.complete(held)


# ---- What is broken off --------------------------------------------------------------------------


@pytest.fixture
def lifecycle(ledger: WatchedLedger) -> Lifecycle:
    """Of messages that are retried by the ledger: such an end is stored apart from the others."""
    return replace(Lifecycle.under(ledger, "billing", Policy()), retry_queue=RetryQueue("billing"))


def turns_of(lifecycle: Lifecycle, *ids: str) -> list[Turn]:
    """Turns of these, which are claimed."""
    turns = [Turn(each, None, Message(each, b"{}")) for each in ids]
    run_inline(lifecycle.claim(lifecycle.sync_driver, turns))
    assert len(extended(lifecycle.ledger)) == len(ids)
    return turns


@pytest.mark.parametrize("end", [Lifecycle.store, Lifecycle.give_back])
def test_end_that_is_broken_off(
    lifecycle: Lifecycle, monkeypatch: pytest.MonkeyPatch, end: Callable[..., Any]
) -> None:
    """Where a signal handler raises before anything is stored, no claim is extended any more."""
    turns = turns_of(lifecycle, "a", "b")
    monkeypatch.setattr(Lifecycle, "_write", failing(1, KeyboardInterrupt(), nothing))
    with pytest.raises(KeyboardInterrupt):
        run_inline(end(lifecycle, lifecycle.sync_driver, turns))
    assert extended(lifecycle.ledger) == []


@pytest.mark.parametrize("error", [StoreDenied("no UPDATE"), ZeroDivisionError("a driver's")])
def test_end_that_the_store_refuses(
    lifecycle: Lifecycle, meddling: MeddlingStore, error: Exception
) -> None:
    """The same where the first of two writes fails, and the second is not tried."""
    turns = turns_of(lifecycle, "a", "b")
    for turn in turns:
        turn.called()
    turns[1].raised(ValueError("no"))
    meddling.meddle = failing(1, error, nothing)
    with pytest.raises(type(error)):
        run_inline(lifecycle.store(lifecycle.sync_driver, turns))
    assert extended(lifecycle.ledger) == []


def test_claim_of_many_that_fails_for_one(lifecycle: Lifecycle, meddling: MeddlingStore) -> None:
    """Where the error of one ends the run, nobody asks again: the claims of the others run out."""
    # All together, and then the first alone.
    meddling.meddle = failing(2, StoreDenied("not this one"), nothing)
    with pytest.raises(StoreDenied, match="not this one"):
        turns_of(lifecycle, "a", "b")
    assert [record.key.message_id for record in lifecycle.ledger.scan()] == ["b"]
    assert extended(lifecycle.ledger) == []


# ---- Forks -------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_fork(ledger: WatchedLedger, claim: Claim) -> None:
    """A forked child extends the claims that it holds itself, and not those of its parent."""
    # Long enough that no beat, and none of its locks, is under way at the fork.
    heartbeat = Heartbeat(ledger, 1.0)
    heartbeat.hold([claim], 0.0)

    def extend_its_own() -> None:
        ledger.extended = queue.Queue()
        own = granted(ledger.claim(Key("billing", "child")))
        heartbeat.hold([own], 0.0)
        assert [claim.key for claim in ledger.beats(1)] == [own.key]

    status = exit_of(forked(extend_its_own))
    heartbeat.close()
    assert status == 0
