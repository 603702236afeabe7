"""Measured: Prometheus metrics of messages by type: how many, and how long they took."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from oncely.core.errors import ConfigError
from oncely.core.message import Message
from oncely.metrics import harmless, metrics_outage
from oncely.middleware.chain import Around

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_OTHER = "other"


class Measured(Around):
    """Counts and times the messages that go through it, by their type.

    The first `most_types` types have labels of their own, all others are "other": senders must not
    decide how many series there are. A registry has one Measured, which any number of consumers
    may share; a second one raises ConfigError. An error of the metrics is logged.
    """

    def __init__(self, registry: CollectorRegistry = REGISTRY, most_types: int = 100) -> None:
        self._outage = metrics_outage()
        self._most_types = most_types
        self._types: set[str] = set()
        self._lock = threading.Lock()
        try:
            self._register(registry)
        except ValueError as error:
            raise ConfigError(
                "metrics: this registry has a Measured already; hand that one to every consumer"
            ) from error

    def _register(self, registry: CollectorRegistry) -> None:
        self._handled = Counter(
            "oncely_messages_handled_total",
            "Messages that went through without an error, duplicates among them.",
            ["type"],
            registry=registry,
        )
        self._failed = Counter(
            "oncely_messages_failed_total",
            "Messages that went through with an error.",
            ["type"],
            registry=registry,
        )
        self._seconds = Histogram(
            "oncely_message_duration_seconds",
            "How long a message took.",
            ["type"],
            registry=registry,
            buckets=_SECONDS,
        )
        self._in_flight = Gauge(
            "oncely_messages_in_flight",
            "Messages that are at it now.",
            registry=registry,
            # With several processes behind one port: the sum of those that live.
            multiprocess_mode="livesum",
        )

    @contextmanager
    def around(self, message: Message) -> Iterator[None]:  # noqa: D102
        began = time.perf_counter()
        self._count(self._in_flight.inc)
        try:
            yield
        except Exception:
            self._ended(self._failed, message, began)
            raise
        else:
            self._ended(self._handled, message, began)
        finally:
            self._count(self._in_flight.dec)

    @harmless
    def _count(self, change: Callable[[], None]) -> None:
        change()

    @harmless
    def _ended(self, counter: Counter, message: Message, began: float) -> None:
        label = message.type
        if label not in self._types:
            with self._lock:
                if len(self._types) < self._most_types:
                    self._types.add(label)
                elif label not in self._types:
                    label = _OTHER
        counter.labels(label).inc()
        self._seconds.labels(label).observe(time.perf_counter() - began)
