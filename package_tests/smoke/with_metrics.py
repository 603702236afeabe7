"""What a ledger answers is counted for Prometheus."""

from prometheus_client import CollectorRegistry, generate_latest

import oncely
from oncely.metrics import Metrics
from oncely.middleware import Measured

registry = CollectorRegistry()
metrics = Metrics(registry=registry)
ledger = oncely.open_ledger("memory://", metrics=metrics)
ledger.migrate()
metrics.watch(ledger)
ledger.claim(oncely.Key("billing", "order-17"), lease="1m")
assert b'outcome="granted"' in generate_latest(registry)
assert Measured(registry=registry) is not None
