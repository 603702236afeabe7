"""Destinations as text, and which types a subscription takes."""

import pytest

from oncely.core.destination import (
    Destination,
    EventsOf,
    ExchangeNamed,
    QueueNamed,
    check_destination,
    destination_of,
    takes,
)
from oncely.core.errors import ConfigError, MessageError


@pytest.mark.parametrize(
    ("text", "destination"),
    [
        ("orders", QueueNamed("orders")),
        ("a:b", QueueNamed("a:b")),
        ("shop/orders", QueueNamed("shop/orders")),
        ("exchange:shop/order.placed", ExchangeNamed("shop", "order.placed")),
        ("exchange:shop/", ExchangeNamed("shop", "")),
        ("exchange:shop/a/b", ExchangeNamed("shop", "a/b")),
        ("events:order.placed", EventsOf("order.placed")),
    ],
)
def test_destinations(text: str, destination: Destination) -> None:
    """Each form is what it says."""
    assert destination_of(text) == destination


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "names nothing; write a queue's name"),
        (" ", "names nothing"),
        (None, "None names nothing"),
        ("exchange:shop", 'no routing key; write "exchange:NAME/routing.key"'),
        ("exchange:/key", "no exchange"),
        ("events:", 'no type; write "events:TYPE"'),
        ("é" * 128, "longer than 255 bytes"),
        ("a\nb", "not printable"),
        ("\udfff", "is not text"),
    ],
)
def test_malformed(text: str, said: str) -> None:
    """What is no destination is told in one line, with what to type."""
    with pytest.raises(ConfigError) as raised:
        destination_of(text)
    assert said in str(raised.value)
    assert "write " in str(raised.value)
    assert "\n" not in str(raised.value)


def test_too_long_to_wait() -> None:
    """An exchange and a key may be too long together for the ledger, and not for a broker."""
    text = f"exchange:{'x' * 123}/{'y' * 123}"
    with pytest.raises(MessageError, match=r"longer than 255 characters; write "):
        check_destination(text)
    assert destination_of(text) == ExchangeNamed("x" * 123, "y" * 123)
    assert check_destination(text[:-1]) == text[:-1]


@pytest.mark.parametrize(
    ("pattern", "type_", "is_taken"),
    [
        ("order.placed", "order.placed", True),
        ("order.placed", "order.placed.late", False),
        ("order.*", "order.placed", True),
        ("order.*", "order", False),
        ("order.*", "order.placed.late", False),
        ("order.#", "order", True),
        ("order.#", "order.placed.late", True),
        ("#", "anything", True),
        ("#.late", "late", True),
        ("*.late", "order.late", True),
        ("order.p+", "order.pp", False),
        ("*", "", False),
        ("#", "", True),
        ("*", "order", True),
        ("order.*", "order.", True),
        ("order.#.late", "order.late", True),
    ],
)
def test_topics(pattern: str, type_: str, is_taken: bool) -> None:
    """As topic exchanges have it."""
    assert takes(pattern, type_) == is_taken
