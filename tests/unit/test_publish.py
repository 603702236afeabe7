"""`oncely.publish`: by a transport or by its URL."""

from pathlib import Path

import pytest

from oncely import ConfigError, Message, PublishRefused, open_transport, publish


def test_by_its_url(tmp_path: Path) -> None:
    """What is published by a URL is there for whoever opens it."""
    url = f"sqlite:///{tmp_path}/queue.db"
    publish(url, "orders", [Message("1"), Message("2")])
    transport = open_transport(url)
    assert [d.message.id for d in transport.receive("orders", 10, 0.0)] == ["1", "2"]
    transport.close()


def test_by_a_transport() -> None:
    """A transport stays open; one message needs no list."""
    transport = open_transport("memory://published")
    transport.subscribe("orders", ["order.*"])
    publish(transport, "events:order.placed", Message("1"))
    [delivery] = transport.receive("orders", 10, 0.0)
    assert delivery.message.type == "order.placed"


def test_what_leads_nowhere() -> None:
    """Unless a queue may be made, a missing one is refused, with its name."""
    with pytest.raises(PublishRefused, match="nowhere"):
        publish("memory://published", "nowhere", [Message("1")], create=False)


def test_a_wrong_url() -> None:
    """A wrong URL says what to type."""
    with pytest.raises(ConfigError, match="write"):
        publish("nats://x", "orders", [Message("1")])
