"""What Prometheus gets to see, and that it never stands in a message's way."""

from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from tests.meddling import MeddlingStore, away
from tests.records import granted

from oncely.core.commands import Duplicate, Fail, Waiting
from oncely.core.errors import ConfigError, StoreUnavailable
from oncely.core.message import Message
from oncely.core.policy import Policy
from oncely.core.record import Key
from oncely.core.waiting import WaitingMessage, queue_named, retries_of
from oncely.ledger.arguments import Write
from oncely.ledger.ledger import Ledger
from oncely.metrics import LedgerGauges, Metrics
from oncely.outbox import Relay
from oncely.stores.memory_store import MemoryStore
from oncely.testing import ManualClock
from oncely.transports.store_transport import StoreTransport
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
    """Claims are counted by their answer; duplicates under the name that services know, too. Each
    call for claims is timed once; every call that reached the store has its size. A redelivery of
    what waits for its retry is counted as that, and is no error.
    """
    outcomes = watched.claim_many(KEYS)
    watched.complete_many([granted(outcome) for outcome in outcomes[:4]])
    watched.claim_many(KEYS)
    assert value("oncely_claims_total", consumer="billing", outcome="granted") == 10
    assert value("oncely_claims_total", consumer="billing", outcome="duplicate") == 4
    assert value("oncely_claims_total", consumer="billing", outcome="busy") == 6
    assert value("duplicate_messages_blocked_total", provider="billing") == 4
    assert value("idempotency_check_duration_seconds_count", provider="billing") == 2
    assert value("oncely_batch_size_count") == 3
    assert value("oncely_batch_size_sum") == 24
    watched.write_all([Write(Fail(granted(outcomes[9]), "no", retry_s=30.0))])
    assert isinstance(watched.claim(KEYS[9]), Waiting)
    assert value("oncely_claims_total", consumer="billing", outcome="waiting") == 1
    assert value("idempotency_check_errors_total", provider="billing") is None


def test_one_for_each_registry(metrics: Metrics, registry: CollectorRegistry) -> None:
    """A second one is refused in one line, and the first goes on."""
    with pytest.raises(ConfigError, match="hand that one to every ledger"):
        Metrics(registry)
    metrics.untracked("billing")
    assert registry.get_sample_value("oncely_untracked_total", {"consumer": "billing"}) == 1


def test_errors_are_counted(watched: Ledger, meddling: MeddlingStore, value: Value) -> None:
    """A call for claims that raises is an error; the completion of one is not a check."""
    claim = granted(watched.claim(KEYS[0]))

    meddling.meddle = away
    with pytest.raises(StoreUnavailable):
        watched.claim(KEYS[1])
    with pytest.raises(StoreUnavailable):
        watched.complete(claim)
    assert value("idempotency_check_errors_total", provider="billing") == 1


def test_takeovers_and_purges(watched: Ledger, clock: ManualClock, value: Value) -> None:
    """A claim granted after another ran out is a takeover; one after a failure is none. What a
    purge removed is counted.
    """
    granted(watched.claim(KEYS[0], "10s"))
    watched.fail(granted(watched.claim(KEYS[1])), "no")
    clock.advance(11)
    watched.complete_many([granted(outcome) for outcome in watched.claim_many(KEYS)])
    assert value("oncely_takeovers_total", consumer="billing") == 1
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
    assert value("oncely_records", consumer="billing", state="completed") == 1
    assert value("oncely_records", consumer="billing", state="processing") == 1
    assert value("oncely_in_doubt", consumer="billing") == 1
    assert value("oncely_in_doubt_age_seconds", consumer="billing") == 30


def test_records_are_counted_now_and_then(
    watched: Ledger, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records are counted as often as was asked for, and what waits at each scrape."""
    monkeypatch.setattr("oncely.metrics.monotonic", clock)
    gauges = LedgerGauges(watched, records=True, every_s=60)

    def records() -> float:
        families = {each.name: each for each in gauges.collect()}
        assert "oncely_deferred_waiting" in families
        return sum(sample.value for sample in families["oncely_records"].samples)

    watched.claim(KEYS[0])
    assert records() == 1
    watched.claim(KEYS[1])
    clock.advance(59)
    assert records() == 1
    clock.advance(1)
    assert records() == 2


def test_deferred_messages(
    watched: Ledger, metrics: Metrics, clock: ManualClock, value: Value
) -> None:
    """What was sent and refused is counted; of a watched ledger, what waits, and for how long."""
    transport = StoreTransport(MemoryStore(), Limits(max_bytes=3))
    relay = Relay(watched, transport, tries=1, metrics=metrics, create_queues=True)
    metrics.watch(watched)
    assert value("oncely_deferred_lag_seconds") == 0
    for key, body in zip(KEYS[:3], (b"a", b"b", b"long"), strict=True):
        deferred = WaitingMessage("1", "out", Message("1", body), key)
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


def test_what_waits(watched: Ledger, metrics: Metrics, clock: ManualClock, value: Value) -> None:
    """What is tried again, dead letters and queues, each by its name; nothing of who has none."""
    metrics.watch(watched, records=False)

    def row(queue: str, id_: str, **how: Any) -> WaitingMessage:
        return WaitingMessage(id_, "", Message(id_), Key("shop", id_), queue=queue, **how)

    shop, letter = retries_of("shop"), {"is_set_aside": True, "reason": "no"}
    rows = [row(shop, "1"), row(shop, "2", delay_s=100.0), row(shop, "3", **letter)]
    watched.mailbox.keep(
        [*rows, row(retries_of("a/b"), "4", **letter), row(queue_named("web"), "5")]
    )
    clock.advance(30)
    gauges = ("oncely_waiting", "oncely_waiting_lag_seconds", "oncely_dead_letters")
    assert [value(name, consumer="shop") for name in gauges] == [2, 30, 1]
    assert [value(name, consumer="a/b") for name in gauges] == [0, 0, 1]
    assert value("oncely_queue_waiting", queue="web") == 1
    assert value("oncely_queue_lag_seconds", queue="web") == 30
    assert value("oncely_deferred_waiting") == 0
    watched.retry_dead([letter.id for letter in watched.dead("shop")])
    assert [value(name, consumer="shop") for name in gauges] == [3, 30, 0]
    watched.discard_dead([letter.id for letter in watched.dead()])
    assert value("oncely_dead_letters", consumer="a/b") is None


def test_no_deferred_messages(
    metrics: Metrics, meddling: MeddlingStore, registry: CollectorRegistry
) -> None:
    """A store that cannot defer messages shows nothing of them."""

    class Without(MeddlingStore):
        has_transactions = False

    metrics.watch(Ledger(Without(meddling.store)))
    shown = {metric.name for metric in registry.collect()}
    assert "oncely_records" in shown
    assert not shown & {"oncely_deferred_waiting", "oncely_deferred_lag_seconds", "oncely_waiting"}


def test_metrics_never_break_a_call(
    watched: Ledger, metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When counting fails, the call goes on as if it had not."""

    def broken(*_: object) -> None:
        raise ValueError("no")

    monkeypatch.setattr("oncely.metrics.Counted", broken)
    watched.complete(granted(watched.claim(KEYS[0])))
    assert isinstance(watched.claim(KEYS[0]), Duplicate)


def test_scrapes_log_a_mistake_with_its_place(
    registry: CollectorRegistry,
    metrics: Metrics,
    watched: Ledger,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An error that is not an outage is logged once, too, with its traceback."""
    metrics.watch(watched)
    monkeypatch.setattr(watched, "now", lambda: 1 / 0)
    for _ in range(3):
        list(registry.collect())
    [line] = caplog.records
    assert (vars(line)["event"], bool(line.exc_info)) == ("gauges_failed", True)


def test_how_messages_end(watched: Ledger, metrics: Metrics, value: Value) -> None:
    """Completed is counted once, also where a relay completes; tries that failed, and the last."""
    claim = granted(watched.claim(KEYS[0]))
    watched.complete(claim)
    watched.complete(claim)
    deferred = WaitingMessage("1", "out", Message("1"), KEYS[1])
    watched.handled(granted(watched.claim(KEYS[1])), deferred=[deferred])
    assert value("oncely_completed_total", consumer="billing") == 1
    Relay(watched, StoreTransport(MemoryStore()), create_queues=True).send_waiting()
    assert value("oncely_completed_total", consumer="billing") == 2
    watched.fail(granted(watched.claim(KEYS[2])), "no")
    watched.fail(granted(watched.claim(KEYS[2])), "no", final=True)
    assert value("oncely_failed_total", consumer="billing") == 2
    assert value("oncely_exhausted_total", consumer="billing") == 1
