"""What Prometheus gets to see, and that it never stands in a message's way."""

from collections.abc import Callable

import pytest
from prometheus_client import CollectorRegistry

from oncely.core.commands import Duplicate
from oncely.core.deferred import DeferredMessage
from oncely.core.errors import StoreUnavailable
from oncely.core.message import Message
from oncely.core.policy import Policy
from oncely.core.record import Key
from oncely.ledger import Ledger
from oncely.metrics import Metrics
from oncely.outbox import Relay
from oncely.testing import ManualClock, MeddlingStore, granted
from oncely.transports.memory_transport import MemoryTransport, QueueServer
from oncely.transports.transport import Limits

KEYS = [Key("billing", str(n)) for n in range(10)]


@pytest.fixture
def registry() -> CollectorRegistry:
    """A registry of the test's own."""
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> Metrics:
    """The metrics in it."""
    return Metrics(registry)


@pytest.fixture
def watched(meddling: MeddlingStore, metrics: Metrics) -> Ledger:
    """A ledger that tells them what it does."""
    return Ledger(meddling, metrics)


Value = Callable[..., float | None]


@pytest.fixture
def value(registry: CollectorRegistry) -> Value:
    """The value of a sample by its name and labels."""
    return lambda name, **labels: registry.get_sample_value(name, labels)


def test_claims_by_outcome(watched: Ledger, value: Value) -> None:
    """Claims are counted by their answer; duplicates under the name that services know, too."""
    outcomes = watched.claim_many(KEYS)
    watched.complete_many([granted(outcome) for outcome in outcomes[:4]])
    watched.claim_many(KEYS)
    assert value("oncely_claims_total", consumer="billing", outcome="granted") == 10
    assert value("oncely_claims_total", consumer="billing", outcome="duplicate") == 4
    assert value("oncely_claims_total", consumer="billing", outcome="busy") == 6
    assert value("duplicate_messages_blocked_total", provider="billing") == 4


def test_calls_are_timed(watched: Ledger, value: Value) -> None:
    """Each call for claims is timed once; every call that reached the store has its size."""
    claim = granted(watched.claim(KEYS[0]))
    watched.claim_many(KEYS)
    watched.complete(claim)
    assert value("idempotency_check_duration_seconds_count", provider="billing") == 2
    assert value("oncely_batch_size_count") == 3
    assert value("oncely_batch_size_sum") == 12


def test_errors_are_counted(watched: Ledger, meddling: MeddlingStore, value: Value) -> None:
    """A call for claims that raises is an error; the completion of one is not a check."""
    claim = granted(watched.claim(KEYS[0]))

    def away() -> None:
        raise StoreUnavailable("away")

    meddling.meddle = away
    with pytest.raises(StoreUnavailable):
        watched.claim(KEYS[1])
    with pytest.raises(StoreUnavailable):
        watched.complete(claim)
    assert value("idempotency_check_errors_total", provider="billing") == 1


def test_takeovers(watched: Ledger, clock: ManualClock, value: Value) -> None:
    """A claim granted after another ran out is a takeover; one after a failure is none."""
    granted(watched.claim(KEYS[0], "10s"))
    watched.fail(granted(watched.claim(KEYS[1])), "no")
    clock.advance(11)
    granted(watched.claim(KEYS[0]))
    granted(watched.claim(KEYS[1]))
    assert value("oncely_takeovers_total", consumer="billing") == 1


def test_purges(watched: Ledger, clock: ManualClock, value: Value) -> None:
    """What a purge removed is counted."""
    watched.complete_many([granted(outcome) for outcome in watched.claim_many(KEYS)])
    clock.advance(31 * 86_400)
    watched.purge("30d", "billing")
    assert value("oncely_purged_total", consumer="billing") == 10


def test_records_are_watched(
    watched: Ledger, metrics: Metrics, clock: ManualClock, value: Value
) -> None:
    """Of a watched ledger the records are shown, those in doubt, and how old these are."""
    metrics.watch(watched)
    watched.complete(granted(watched.claim(KEYS[0])))
    watched.claim(KEYS[1], "10s", Policy())
    clock.advance(30)
    assert value("oncely_records", consumer="billing", state="sent") == 1
    assert value("oncely_records", consumer="billing", state="processing") == 1
    assert value("oncely_in_doubt", consumer="billing") == 1
    assert value("oncely_in_doubt_age_seconds", consumer="billing") == 30


def test_deferred_messages(
    watched: Ledger, metrics: Metrics, clock: ManualClock, value: Value
) -> None:
    """What was sent and refused is counted; of a watched ledger, what waits, and for how long."""
    transport = MemoryTransport(QueueServer(), Limits(max_bytes=3))
    relay = Relay(watched, transport, tries=1, metrics=metrics)
    metrics.watch(watched)
    assert value("oncely_deferred_lag_seconds") == 0
    for key, body in zip(KEYS[:3], (b"a", b"b", b"long"), strict=True):
        deferred = DeferredMessage("1", "out", Message("1", body), key)
        watched.handled(granted(watched.claim(key)), deferred=[deferred])
    clock.advance(30)
    assert value("oncely_deferred_waiting") == 3
    assert value("oncely_deferred_lag_seconds") == 30
    relay.send_waiting()
    assert value("oncely_deferred_waiting") == 0
    assert value("oncely_deferred_set_aside") == 1
    assert value("oncely_deferred_lag_seconds") == 0
    assert value("oncely_deferred_sent_total", consumer="billing") == 2
    assert value("oncely_deferred_refused_total", consumer="billing") == 1


def test_no_deferred_messages(
    metrics: Metrics, meddling: MeddlingStore, registry: CollectorRegistry
) -> None:
    """A store that cannot defer messages shows nothing of them."""

    class Without(MeddlingStore):
        has_transactions = False

    metrics.watch(Ledger(Without(meddling.store)))
    shown = {metric.name for metric in registry.collect()}
    assert "oncely_records" in shown
    assert not shown & {"oncely_deferred_waiting", "oncely_deferred_lag_seconds"}


def test_metrics_never_break_a_relay(
    ledger: Ledger, metrics: Metrics, key: Key, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When counting fails, the relay goes on as if it had not."""

    def broken(*_: object) -> None:
        raise ValueError("no")

    monkeypatch.setattr("oncely.metrics.Counted", broken)
    deferred = DeferredMessage("1", "out", Message("1"), key)
    ledger.handled(granted(ledger.claim(key)), deferred=[deferred])
    relay = Relay(ledger, MemoryTransport(QueueServer()), metrics=metrics)
    assert relay.send_waiting().sent == 1


def test_metrics_never_break_a_call(
    watched: Ledger, metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When counting fails, the call goes on as if it had not."""

    def broken(*_: object) -> None:
        raise ValueError("no")

    monkeypatch.setattr("oncely.metrics.Counted", broken)
    watched.complete(granted(watched.claim(KEYS[0])))
    assert isinstance(watched.claim(KEYS[0]), Duplicate)


def test_scrapes_outlive_the_store(
    registry: CollectorRegistry, metrics: Metrics, meddling: MeddlingStore, value: Value
) -> None:
    """When the store is away, the other metrics are shown all the same."""

    class Away(Ledger):
        def now(self) -> float:
            raise StoreUnavailable("away")

    metrics.watch(Away(meddling))
    Ledger(meddling, metrics).claim(KEYS[0])
    assert value("oncely_claims_total", consumer="billing", outcome="granted") == 1
