"""Metrics for Prometheus, for those who ask for them; they never stand in a message's way."""

import functools
import logging
from collections import Counter as Counted
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric

from oncely.core.record import State
from oncely.core.rules import Ask, Duplicate, Granted, Outcome
from oncely.ledger import Ledger
from oncely.request import Request

_log = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., None])

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_SIZES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000)


def _harmless(method: F) -> F:
    """Let an error of the metrics be logged and go no further."""

    @functools.wraps(method)
    def guarded(*args: Any, **kwargs: Any) -> None:
        try:
            method(*args, **kwargs)
        except Exception:  # noqa: BLE001 - whatever it is, the message goes on.
            _log.exception("metrics_failed")

    return guarded  # type: ignore[return-value]  # It takes and returns the same.


class Metrics:
    """Counts what a ledger does: hand it to `open_ledger(url, metrics=Metrics())`.

    One for each registry; several ledgers may share it.
    """

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._registry = registry

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=registry)

        self._blocked = counter(
            "duplicate_messages_blocked_total",
            "Deliveries of messages that were completed before.",
            "provider",
        )
        self._check_errors = counter(
            "idempotency_check_errors_total", "Calls for claims that raised an error.", "provider"
        )
        self._check_seconds = Histogram(
            "idempotency_check_duration_seconds",
            "How long calls for claims took; a batch counts once.",
            ["provider"],
            registry=registry,
            buckets=_SECONDS,
        )
        self._claims = counter(
            "oncely_claims_total", "Claims asked for, by their answer.", "consumer", "outcome"
        )
        self._takeovers = counter(
            "oncely_takeovers_total", "Claims granted where an earlier one had run out.", "consumer"
        )
        self._purged = counter("oncely_purged_total", "Records removed by age.", "consumer")
        self._batch_size = Histogram(
            "oncely_batch_size",
            "Commands that went to the store together.",
            registry=registry,
            buckets=_SIZES,
        )

    def watch(self, ledger: Ledger) -> None:
        """Show how many records `ledger` has, too: asked for at each scrape, which reads the table.

        Where the store is away, or the records are many, the scrape waits for it.
        """
        self._registry.register(_Records(ledger))

    @_harmless
    def settled(
        self, requests: Sequence[Request], outcomes: Sequence[Outcome], took_s: float
    ) -> None:
        """Commands went to the store together and were answered."""
        self._batch_size.observe(len(requests))
        answers = Counted(
            (request.key.consumer, type(outcome).__name__)
            for request, outcome in zip(requests, outcomes, strict=True)
            if isinstance(request.command, Ask)
        )
        for (consumer, answer), count in answers.items():
            self._claims.labels(consumer, answer.lower()).inc(count)
            if answer == Duplicate.__name__:
                self._blocked.labels(consumer).inc(count)
        for consumer in {consumer for consumer, _ in answers}:
            self._check_seconds.labels(consumer).observe(took_s)
        for outcome in outcomes:
            if isinstance(outcome, Granted) and _is_takeover(outcome):
                self._takeovers.labels(outcome.claim.key.consumer).inc()

    @_harmless
    def raised(self, requests: Sequence[Request]) -> None:
        """Commands went to the store together, and an error came back."""
        asked = {request.key.consumer for request in requests if isinstance(request.command, Ask)}
        for consumer in asked:
            self._check_errors.labels(consumer).inc()

    @_harmless
    def purged(self, consumer: str | None, count: int) -> None:
        """Records were removed by age; of all consumers where none is named."""
        self._purged.labels(consumer or "").inc(count)


def _is_takeover(granted: Granted) -> bool:
    former = granted.claim.former
    return former is not None and former.state is State.PROCESSING


class _Records:
    """What stands in the ledger, asked for when Prometheus asks."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def describe(self) -> list[Metric]:
        """Nothing yet: to register must not need the store."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The gauges, as the store has them now; none where it cannot be asked."""
        try:
            yield from self._gauges()
        except Exception:  # noqa: BLE001 - the other metrics are to be seen all the same.
            _log.exception("metrics_failed")

    def _gauges(self) -> list[Metric]:
        records = GaugeMetricFamily("oncely_records", "Records.", labels=["consumer", "state"])
        in_doubt = GaugeMetricFamily(
            "oncely_in_doubt", "Claims that ran out, and wait.", labels=["consumer"]
        )
        age = GaugeMetricFamily(
            "oncely_in_doubt_age_seconds",
            "How long ago the oldest claim in doubt was last seen.",
            labels=["consumer"],
        )
        now = self._ledger.now()
        for (consumer, state), tally in self._ledger.tallies().items():
            records.add_metric([consumer, state.value], tally.count)
            if state is State.PROCESSING:
                in_doubt.add_metric([consumer], tally.lease_over)
                oldest = next(self._ledger.scan(consumer, state, limit=1, lease_over=True), None)
                age.add_metric([consumer], now - oldest.last_seen if oldest else 0)
        return [records, in_doubt, age]
