"""A relay before a real RabbitMQ: what it does not take holds up nothing else, and is told."""

import logging
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import ChannelClosedByBroker
from tests.integration.adapting import channel_to
from tests.logs import of_event
from tests.records import granted

from oncely import Message, open_ledger, open_transport
from oncely.core.record import Key
from oncely.core.waiting import WaitingMessage
from oncely.ledger import Ledger
from oncely.outbox import Relay
from oncely.transports.transport import Transport

_LARGE = {str(number): "x" for number in range(20_000)}


@pytest.fixture
def ledger(postgresql_url: str) -> Iterator[Ledger]:
    """In PostgreSQL."""
    with closing(open_ledger(postgresql_url)) as ledger:
        ledger.migrate()
        yield ledger


@pytest.fixture
def transport(rabbitmq_url: str) -> Iterator[Transport]:
    """A relay's."""
    with closing(open_transport(rabbitmq_url)) as transport:
        yield transport


@pytest.fixture
def channel(rabbitmq_url: str) -> Iterator[BlockingChannel]:
    """With the queue `mails`, a queue of types `mail.*`, and `full`, which takes one message."""
    with channel_to(rabbitmq_url) as channel:
        full = {"x-max-length": 1, "x-overflow": "reject-publish"}
        channel.queue_declare("full", durable=True, arguments=full)
        channel.basic_publish("", "full", b"first")
        channel.queue_declare("mails", durable=True)
        channel.exchange_declare("oncely", "topic", durable=True)
        channel.queue_bind("mails", "oncely", "mail.*")
        channel.exchange_declare("shop", "direct", durable=True)
        channel.queue_bind("mails", "shop", "sold")
        yield channel


def defer(ledger: Ledger, name: str, *rows: tuple[str, Message]) -> None:
    """Let a message have sent these, each to its destination, in lanes of their own."""
    key = Key("shop", name)
    deferred = [
        WaitingMessage(message.id, to, message, key, lane=f"{name}-{message.id}")
        for to, message in rows
    ]
    ledger.handled(granted(ledger.claim(key)), deferred=deferred)


def bodies(channel: BlockingChannel, queue: str) -> list[bytes]:
    """What is in a queue, which is empty then."""
    found = []
    while (body := channel.basic_get(queue, auto_ack=True)[2]) is not None:
        found.append(body)
    return sorted(found)


def test_bad_destinations(
    ledger: Ledger,
    transport: Transport,
    channel: BlockingChannel,
    rabbitmq_url: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What leads nowhere, is not taken or cannot be sent is refused, each with destination and
    reason in the log; no queue is made of a typing error; all else is sent.
    """
    bad = {
        "typing-eror": (Message("1"), "no queue takes it"),
        "exchange:none/key": (Message("2"), "no exchange 'none'"),
        "events:fax.sent": (Message("3"), "no queue takes it"),
        "full": (Message("4"), "the queue is full"),
        "mails": (Message("5", headers={"n" * 256: ""}), "longer than the 255 bytes"),
        "exchange:shop/sold": (Message("6", headers=_LARGE), "over the limit"),
    }
    for number in range(5):
        for to, (message, _) in bad.items():
            good = [(good, Message(f"{message.id}-{good}", b"good")) for good in _GOOD]
            defer(ledger, f"{number}-{message.id}", (to, message), *good)
    with caplog.at_level(logging.WARNING, "oncely"):
        report = Relay(ledger, transport).send_waiting()
    assert (report.sent, report.set_aside, report.refused) == (30 * len(_GOOD), 25, 5)
    assert bodies(channel, "mails") == [b"good"] * 30 * len(_GOOD)
    logged = [*map(vars, of_event(caplog, "deferred_refused", "deferred_set_aside"))]
    assert len(logged) == 30
    for each in logged:
        message, reason = bad[each["destination"]]
        assert each["message_id"] == message.id
        assert reason in each["reason"]
        assert (each["event"] == "deferred_refused") == (each["destination"] == "full")
    assert report.error is not None
    assert any(report.error.startswith(f"{to}: ") for to in bad)
    with channel_to(rabbitmq_url) as another, pytest.raises(ChannelClosedByBroker) as refused:
        another.queue_declare("typing-eror", passive=True)
    assert refused.value.reply_code == 404


_GOOD = ("mails", "events:mail.sent", "exchange:shop/sold")


@pytest.mark.usefixtures("channel")
def test_one_channel(ledger: Ledger, transport: Transport, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many it sends, and to how many destinations, it opens no other channel."""
    relay = Relay(ledger, transport, batch=3)
    opened: list[int] = []
    open_one = pika.connection.Connection.channel

    def noted(self: pika.connection.Connection, *args: Any, **named: Any) -> Any:
        opened.append(1)
        return open_one(self, *args, **named)

    monkeypatch.setattr(pika.connection.Connection, "channel", noted)
    defer(ledger, "first", *[(to, Message(to)) for to in _GOOD])
    assert relay.send_waiting().sent == 3
    assert 1 <= len(opened) <= 1 + 2  # To see whether each exchange is there.
    opened.clear()
    for number in range(20):
        defer(ledger, str(number), *[(to, Message(to)) for to in _GOOD])
    assert relay.send_waiting().sent == 60
    assert opened == []
