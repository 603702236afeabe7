"""Metrics for Prometheus, where a program wants them; their errors never stop a message."""

import functools
import logging
from collections import Counter as Counted
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric

from oncely._util.clock import monotonic
from oncely._util.event_log import EventLog
from oncely._util.outage import Outage
from oncely.core.commands import (
    Acquire,
    Busy,
    Command,
    Complete,
    Duplicate,
    Exhausted,
    Fail,
    Finish,
    Granted,
    Handled,
    InDoubt,
    Mismatch,
    Outcome,
    Suspect,
    TooOld,
    Waiting,
    Written,
)
from oncely.core.errors import ConfigError
from oncely.core.record import State
from oncely.core.waiting import OUTBOX, WaitingMessage, consumer_of, name_of_queue
from oncely.ledger.ledger import Ledger
from oncely.stores.store import Backlog

_log = EventLog(__name__)

F = TypeVar("F", bound=Callable[..., None])

_NAMES: dict[type, str] = {
    Granted: "granted",
    Handled: "handled",
    Duplicate: "duplicate",
    Busy: "busy",
    Waiting: "waiting",
    Exhausted: "exhausted",
    InDoubt: "in_doubt",
    Mismatch: "mismatch",
    TooOld: "too_old",
    Suspect: "suspect",
}
"""How the answers to claims are labelled."""
_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_EXACT = 100_000
"""Up to so many records a scrape counts; of more, it shows estimates of what is completed."""
_SIZES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000)
_SET_ASIDE = "Deferred messages refused too often; they wait for people."
_DEFERRED = (
    ("oncely_deferred_waiting", "Deferred messages not sent yet.", "waiting"),
    ("oncely_deferred_set_aside", _SET_ASIDE, "set_aside"),
    ("oncely_deferred_lag_seconds", "How long the oldest that could be sent has waited.", "lag_s"),
)
"""Gauges, their texts, and the fields of a Backlog that they show."""
_RETRIES = (
    ("oncely_waiting", "Messages that wait to be tried again.", "waiting"),
    ("oncely_waiting_lag_seconds", "How long the oldest of them has been due.", "lag_s"),
    ("oncely_dead_letters", "Dead letters.", "set_aside"),
)
_QUEUES = (
    ("oncely_queue_waiting", "Messages in a queue of the ledger.", "waiting"),
    ("oncely_queue_lag_seconds", "How long the oldest that could be taken has waited.", "lag_s"),
)
_LAG = ("oncely_broker_lag", "Messages at a broker that its consumer has not handled.")


def metrics_outage() -> Outage:
    """The outage of one object that counts."""
    return Outage(
        _log,
        "metrics_failed",
        "metrics are not counted: %(reason)s; messages are not affected",
        "metrics_recovered",
        "metrics are counted again after %(away_s)s s",
        level=logging.ERROR,
    )


def harmless(method: F) -> F:
    """Note an error of the metrics in the outage of its object, and do not raise it."""

    @functools.wraps(method)
    def guarded(self: Any, *args: Any) -> None:
        try:
            method(self, *args)
        except Exception as error:  # noqa: BLE001 - the message must go on.
            self._outage.met(error, method.__name__)
        else:
            self._outage.over(method.__name__)

    return guarded  # type: ignore[return-value]  # It takes and returns the same.


class Metrics:
    """Counts what a ledger does: hand it to `open_ledger(url, metrics=Metrics())`, and to a Relay.

    One for each registry; several ledgers and relays may share it. A second one raises ConfigError.
    """

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._outage = metrics_outage()
        self._registry = registry
        self._watches = False
        try:
            self._register(registry)
        except ValueError as error:
            raise ConfigError(
                "metrics: this registry has a Metrics already; hand that one to every ledger"
            ) from error

    def _register(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, labels: Sequence[str] = ("consumer",)) -> Counter:
            return Counter(name, text, labels, registry=registry)

        self._blocked = counter(
            "duplicate_messages_blocked_total",
            "Deliveries of messages that were completed before.",
            ["provider"],
        )
        self._check_errors = counter(
            "idempotency_check_errors_total", "Calls for claims that raised an error.", ["provider"]
        )
        self._check_seconds = Histogram(
            "idempotency_check_duration_seconds",
            "How long calls for claims took; a batch counts once.",
            ["provider"],
            registry=registry,
            buckets=_SECONDS,
        )
        self._claims = counter(
            "oncely_claims_total", "Claims asked for, by their answer.", ["consumer", "outcome"]
        )
        self._takeovers = counter(
            "oncely_takeovers_total", "Claims granted where an earlier one had run out."
        )
        self._completed = counter("oncely_completed_total", "Messages completed.")
        self._failed = counter("oncely_failed_total", "Tries that failed.")
        self._exhausted = counter("oncely_exhausted_total", "Messages that failed permanently.")
        self._untracked = counter("oncely_untracked_total", "Messages that ran without a claim.")
        self._purged = counter("oncely_purged_total", "Records removed by age.")
        self._sent = counter(
            "oncely_deferred_sent_total", "Deferred messages that a relay has sent."
        )
        self._refused = counter(
            "oncely_deferred_refused_total", "Times that a transport refused a deferred message."
        )
        self._batch_size = Histogram(
            "oncely_batch_size",
            "Commands that went to the store together.",
            registry=registry,
            buckets=_SIZES,
        )

    def watch(self, ledger: Ledger, *, records: bool = True) -> None:
        """Also show how many records `ledger` has, unless `records` is False, and how many messages
        wait there. Each scrape asks the store; on MariaDB it reads the whole table for the records.

        Where the store is away, the scrape waits for it. Raises ConfigError for a second ledger:
        the gauges have no label for the ledger.
        """
        if self._watches:
            raise ConfigError(
                "metrics: this registry watches a ledger already; watch one ledger for each "
                "registry"
            )
        self._watches = True
        self._registry.register(LedgerGauges(ledger, records=records))

    @harmless
    def settled(
        self, commands: Sequence[Command], results: Sequence[Outcome | Exception], took_s: float
    ) -> None:
        """Requests went to the store together; each has its outcome or its error."""
        self._batch_size.observe(len(commands))
        answers = Counted(
            (command.key.consumer, _NAMES.get(type(result)))
            for command, result in zip(commands, results, strict=True)
            if isinstance(command, Acquire)
        )
        for (consumer, answer), count in answers.items():
            if answer is None:
                self._check_errors.labels(consumer).inc(count)
            else:
                self._claims.labels(consumer, answer).inc(count)
            if answer == "duplicate":
                self._blocked.labels(consumer).inc(count)
        for consumer in {consumer for consumer, _ in answers}:
            self._check_seconds.labels(consumer).observe(took_s)
        for result in results:
            if isinstance(result, Granted) and result.claim.takes_over:
                self._takeovers.labels(result.claim.key.consumer).inc()
        # How messages have ended, where this was their end.
        for command, result in zip(commands, results, strict=True):
            consumer = command.key.consumer
            match command, result:
                case Complete() | Finish(), Written(is_repeated=False):
                    self._completed.labels(consumer).inc()
                case Fail(final=final), Written(is_repeated=False):
                    self._failed.labels(consumer).inc()
                    self._exhausted.labels(consumer).inc(int(final))

    @harmless
    def untracked(self, consumer: str) -> None:
        """A message runs without a claim."""
        self._untracked.labels(consumer).inc()

    @harmless
    def purged(self, consumer: str | None, count: int) -> None:
        """Records were removed by age; of all consumers where none is named."""
        self._purged.labels(consumer or "").inc(count)

    @harmless
    def deferred_sent(self, messages: Sequence[WaitingMessage]) -> None:
        """A transport has confirmed these."""
        _count_each(self._sent, messages)

    @harmless
    def deferred_refused(self, messages: Sequence[WaitingMessage]) -> None:
        """A transport has refused these, whether or not they are tried again."""
        _count_each(self._refused, messages)


def _count_each(counter: Counter, messages: Sequence[WaitingMessage]) -> None:
    for consumer, count in Counted(message.parent.consumer for message in messages).items():
        counter.labels(consumer).inc(count)


class LedgerGauges:
    """The gauges of a ledger, read at each scrape: its records, where they are wanted, and at most
    every so many seconds; and the messages that wait.
    """

    def __init__(self, ledger: Ledger, *, records: bool, every_s: float = 0.0) -> None:
        self._ledger = ledger
        self._records = records
        self._every_s = every_s
        self._counted: Sequence[Metric] = ()
        self._count_at = 0.0
        self._outage = Outage(
            _log,
            "gauges_failed",
            "the gauges of the ledger cannot be read: %(reason)s",
            "gauges_recovered",
            "the gauges of the ledger can be read again after %(away_s)s s",
            level=logging.ERROR,
        )

    def describe(self) -> list[Metric]:
        """Nothing: registering must not need the store."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The gauges, as the store has them now; none where it cannot be asked, which is logged
        when it begins and when it ends.
        """
        try:
            if self._records and monotonic() >= self._count_at:
                self._counted = self._gauges()
                self._count_at = monotonic() + self._every_s
            yield from self._counted
            yield from self._waiting()
        except Exception as error:  # noqa: BLE001 - the other metrics have to be shown all the same.
            self._outage.met(error)
        else:
            self._outage.over()

    def _gauges(self) -> list[Metric]:
        records = GaugeMetricFamily("oncely_records", "Records.", labels=["consumer", "state"])
        text, labels = "Claims that ran out, and wait.", ["consumer"]
        in_doubt = GaugeMetricFamily("oncely_in_doubt", text, labels=labels)
        text = "How long ago the oldest claim in doubt was last seen."
        age = GaugeMetricFamily("oncely_in_doubt_age_seconds", text, labels=labels)
        text = "Messages that may run again once their sender sends them again."
        for_sender = GaugeMetricFamily("oncely_waiting_for_sender", text, labels=labels)
        now = self._ledger.now()
        for (consumer, state), tally in self._ledger.tallies(_EXACT).items():
            records.add_metric([consumer, state.word], tally.count)
            if state is State.FAILED:
                for_sender.add_metric([consumer], tally.for_sender)
            if state is State.PROCESSING:
                in_doubt.add_metric([consumer], tally.lease_over)
                over = tally.lease_over and self._ledger.scan(
                    consumer, state, limit=1, lease_over=True
                )
                ages_s = (now - record.last_seen for record in over or ())
                age.add_metric([consumer], max(ages_s, default=0))
        return [records, in_doubt, age, for_sender]

    def _waiting(self) -> list[Metric]:
        if not self._ledger.can_defer:
            return []
        backlogs = self._ledger.mailbox.backlogs()
        nothing = Backlog(waiting=0, set_aside=0, lag_s=0.0)
        deferred = [
            GaugeMetricFamily(name, text, getattr(backlogs.get(OUTBOX, nothing), field))
            for name, text, field in _DEFERRED
        ]
        retries = _by_name(_RETRIES, "consumer", consumer_of, backlogs)
        queues = _by_name(_QUEUES, "queue", name_of_queue, backlogs)
        lag = GaugeMetricFamily(*_LAG, labels=["queue"])
        for name, backlog in self._ledger.mailbox.broker_backlogs().items():
            lag.add_metric([name], backlog.waiting)
        return [*deferred, *retries, *queues, lag]


def _by_name(
    gauges: Sequence[tuple[str, str, str]],
    label: str,
    name_of: Callable[[str], str | None],
    backlogs: Mapping[str, Backlog],
) -> Iterator[Metric]:
    """These gauges of the queues to which `name_of` gives a name."""
    for gauge, text, field in gauges:
        metric = GaugeMetricFamily(gauge, text, labels=[label])
        for queue, backlog in backlogs.items():
            if (name := name_of(queue)) is not None:
                metric.add_metric([name], getattr(backlog, field))
        yield metric
