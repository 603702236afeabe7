"""`once` under the policies that ask for more than a claim: probe, missing id, age, outage."""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from tests.logs import events_in
from tests.meddling import MeddlingStore, away
from tests.records import granted

from oncely.core.errors import InDoubtError, MessageError, TooOldError
from oncely.core.message import Message, current
from oncely.core.policy import Policy
from oncely.core.record import Key, State
from oncely.ledger.ledger import Ledger
from oncely.metrics import Metrics
from oncely.once import once
from oncely.testing import ManualClock

Handler = Callable[[Message], Any]
Make = Callable[..., Handler]


@pytest.fixture
def runs() -> list[str]:
    """The ids of the messages that were handled."""
    return []


@pytest.fixture
def handler(ledger: Ledger, runs: list[str]) -> Make:
    """Makes a handler under `once`, whose runs are counted."""

    def make(**options: Any) -> Handler:
        def handle(message: Message) -> str:
            runs.append(message.id)
            return f"handled {message.id}"

        guard: Callable[[Handler], Handler] = once(
            ledger, consumer="billing", key=lambda message: message.id, **options
        )
        return guard(handle)

    return make


# ---- A probe -----------------------------------------------------------------------------------


@pytest.mark.parametrize("finding", ["happened", "not_happened", "unknown", TimeoutError()])
def test_probe(
    handler: Make, ledger: Ledger, clock: ManualClock, key: Key, runs: list[str], finding: Any
) -> None:
    """The probe decides what is in doubt; while it does not know, or fails, nothing runs."""
    message = Message(key.message_id, b"{}")
    asked: list[Message] = []

    def probe(message: Message) -> Any:
        asked.append(message)
        if isinstance(finding, Exception):
            raise finding
        return finding

    granted(ledger.claim(key, "60s"))
    clock.advance(61)
    is_known = finding in ("happened", "not_happened")
    with nullcontext() if is_known else pytest.raises(InDoubtError):
        handler(policy=Policy(on_in_doubt=probe))(message)
    assert asked == [message]
    assert runs == (["abc-123"] if finding == "not_happened" else [])
    state = State.COMPLETED if is_known else State.PROCESSING
    assert ledger.counts() == {("billing", state): 1}


# ---- A missing id ------------------------------------------------------------------------------


@pytest.mark.parametrize(("how", "count", "known"), [("fingerprint", 2, 2), ("untracked", 3, 0)])
def test_missing_id(
    handler: Make, ledger: Ledger, runs: list[str], how: Any, count: int, known: int
) -> None:
    """Under "fingerprint" the body is what a message without an id is known by; under "untracked"
    it runs whenever it comes, and the ledger hears nothing of it.
    """
    handle = handler(policy=Policy(on_missing_id=how))
    for body in (b"one", b"one", b"two"):
        handle(Message("", body))
    assert runs == [""] * count
    assert sum(ledger.counts().values()) == known


# ---- Age ---------------------------------------------------------------------------------------


def _sent(ago: timedelta) -> Message:
    return Message("abc-123", time=datetime.now(UTC) - ago)


def _forget(ledger: Ledger, clock: ManualClock, *, until: timedelta) -> None:
    """Have the ledger forget what was sent longer ago than that."""
    clock.now = datetime.now(UTC).timestamp() - 365 * 86_400
    ledger.complete(granted(ledger.claim(Key("billing", "forgotten"))))
    clock.now = datetime.now(UTC).timestamp()
    assert ledger.purge(until) == 1


def test_too_old_is_refused(
    handler: Make, ledger: Ledger, clock: ManualClock, runs: list[str]
) -> None:
    """An unknown message from before what the ledger has forgotten does not run."""
    _forget(ledger, clock, until=timedelta(days=7))
    with pytest.raises(TooOldError, match=r"'abc-123' was sent before .*, and the ledger has forg"):
        handler()(_sent(timedelta(days=8)))
    assert runs == []
    handler()(_sent(timedelta(days=6)))
    assert runs == ["abc-123"]


# ---- Outage ------------------------------------------------------------------------------------


def test_outage_may_run(
    meddling: MeddlingStore, runs: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Under on_outage="run" a message runs untracked while the store is away, and is counted."""
    registry = CollectorRegistry()
    ledger = Ledger(meddling, Metrics(registry))

    @once(ledger, consumer="billing", key=lambda m: m.id, policy=Policy(on_outage="run"))
    def handle(message: Message) -> None:
        runs.append(message.id)
        assert message.step("debit", lambda: "debited") == "debited"
        with pytest.raises(MessageError, match="not tracked"):
            message.send("bank", b"debit")

    meddling.meddle = away
    with caplog.at_level(logging.WARNING):
        handle(Message("abc-123"))
    assert runs == ["abc-123"]
    assert "untracked" in events_in(caplog)
    assert registry.get_sample_value("oncely_untracked_total", {"consumer": "billing"}) == 1


def test_nothing_is_processed_outside() -> None:
    """Outside a handler there is nothing to have steps: MessageError says where there is."""
    message = Message("abc-123")
    for call in (
        lambda: message.step("debit", print),
        lambda: message.send("bank", b""),
        lambda: message.idempotency_key,
        current,
    ):
        with pytest.raises(MessageError, match="inside a function under `once`"):
            call()
