"""What handlers send, while the broker is away: it is sent when that is back."""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from oncely import Consumer, Message, TransportError, open_ledger, open_transport
from oncely.consumer import sender
from oncely.core.record import State
from oncely.metrics import Metrics
from oncely.stores.memory_store import MemoryStore
from oncely.transports.store_transport import StoreTransport


def test_sent_when_the_broker_is_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message that could not be sent at first leaves before a drain is over, and once."""
    monkeypatch.setattr(sender, "_AGAIN_S", 0.01)
    ledger = open_ledger(f"sqlite:///{tmp_path}/ledger.db")
    ledger.migrate()
    transport = open_transport(f"sqlite:///{tmp_path}/queue.db")
    transport.publish("orders", [Message("order-17")])
    transport.subscribe("mails", [])
    failures, publish = [TransportError("the broker is away")] * 3, transport.publish

    def fail_first(queue: str, messages: Sequence[Message], *, create: bool = True) -> None:
        if failures:
            raise failures.pop()
        publish(queue, messages, create=create)

    monkeypatch.setattr(transport, "publish", fail_first)
    consumer = Consumer(transport, "orders").idempotent(ledger, "shop")
    report = consumer.consume(lambda order: order.send("mails", "we have it"), drain=True)
    assert failures == []
    assert (report.handled, report.deferred_sent) == (1, 1)
    assert [each.message.body for each in transport.receive("mails", 10, 0)] == [b"we have it"]
    assert ledger.counts() == {("shop", State.COMPLETED): 1}
    transport.close()
    ledger.close()


def test_what_is_sent_is_counted(tmp_path: Path) -> None:
    """The metrics of a consumer's ledger count what its handlers send, as those of a relay do."""
    registry = CollectorRegistry()
    with closing(
        open_ledger(f"sqlite:///{tmp_path}/ledger.db", metrics=Metrics(registry))
    ) as ledger:
        ledger.migrate()
        transport = StoreTransport(MemoryStore())
        transport.publish("orders", [Message("order-17")])
        transport.subscribe("mails", [])

        def handle(order: Message) -> None:
            order.send("mails", "we have it")
            order.send("nowhere", "lost")

        Consumer(transport, "orders").idempotent(ledger, "shop").consume(handle, drain=True)
    for what in ("sent", "refused"):
        assert registry.get_sample_value(f"oncely_deferred_{what}_total", {"consumer": "shop"}) == 1
