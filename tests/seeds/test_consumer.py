"""The hand-written consumer's flows, on RabbitMQ and PostgreSQL: what it promises, oncely keeps."""

from collections.abc import Iterator
from contextlib import closing

import pytest
from tests.records import record_of

from oncely import Consumer, Message, open_ledger, open_transport
from oncely.core.record import Key, State
from oncely.ledger.ledger import Ledger
from oncely.transports.transport import Transport

SMS, EMAIL = "notification.sms.send", "notification.email.send"
NAME = "notification-service"
QUEUE = "notifications"


@pytest.fixture
def ledger(postgresql_ledger_url: str) -> Iterator[Ledger]:
    """In PostgreSQL."""
    with closing(open_ledger(postgresql_ledger_url)) as ledger:
        yield ledger


@pytest.fixture
def transport(rabbitmq_url: str) -> Iterator[Transport]:
    """A producer's, and that of people who look at dead letters."""
    with closing(open_transport(rabbitmq_url)) as transport:
        transport.subscribe(QUEUE, [])
        yield transport


@pytest.fixture
def consumer(rabbitmq_url: str) -> Consumer:
    """What reads the queue; nothing is said of it yet."""
    return Consumer(rabbitmq_url, QUEUE)


def sms(number: int) -> Message:
    """A message to be sent once."""
    return Message(f"sms-{number}", b'{"to": "+49 30 1234"}', SMS)


def test_given_up_once(consumer: Consumer, ledger: Ledger, transport: Transport) -> None:
    """When tries are spent `failed` is called once; the dead letter tells error and attempts."""
    caught: list[int] = []
    given_up: list[str] = []

    def send(_: Message) -> None:
        raise ConnectionError("gateway is down; password=hunter2@x")

    transport.publish(QUEUE, [sms(1)])
    consumer.idempotent(ledger, NAME).tries(3).backoff("50ms")
    consumer.catch(lambda *_: caught.append(1))
    consumer.failed(lambda error, message: given_up.append(message.id))
    report = consumer.consume(send, drain=True)
    assert (len(caught), given_up) == (2, ["sms-1"])
    assert (report.retried, report.failed, report.dead_lettered) == (2, 1, 1)
    [letter] = ledger.dead(NAME)
    assert (letter.message, letter.key, letter.attempts) == (sms(1), Key(NAME, "sms-1"), 3)
    assert "gateway is down" in letter.reason
    assert letter.error is not None
    assert letter.error.startswith("Traceback")
    assert "hunter2" not in letter.reason + letter.error
    assert 0 < letter.first_seen <= letter.last_seen
    record = record_of(ledger, Key(NAME, "sms-1"))
    assert (record.state, record.attempts, record.exhausted) == (State.FAILED, 3, True)
    assert "gateway is down" in str(record.error)


def test_several_event_types(rabbitmq_url: str, ledger: Ledger, transport: Transport) -> None:
    """Each type goes from the exchange to its handler; what nobody takes is a dead letter."""
    consumer = Consumer(rabbitmq_url, QUEUE).events(SMS, EMAIL).idempotent(ledger, NAME)
    handled: list[str] = []

    @consumer.handler(SMS)
    def by_sms(message: Message) -> None:
        handled.append(f"sms {message.id}")

    @consumer.handler(EMAIL)
    def by_email(message: Message) -> None:
        handled.append(f"email {message.id}")

    transport.subscribe(QUEUE, [SMS, EMAIL])
    _publish_events(rabbitmq_url, [("1", SMS), ("2", EMAIL), ("3", "notification.fax.send")])
    transport.publish(QUEUE, [Message("4", b"{}", "notification.fax.send")])
    report = consumer.consume(drain=True)
    assert sorted(handled) == ["email 2", "sms 1"]
    assert (report.received, report.dead_lettered) == (3, 1)
    [letter] = ledger.dead(NAME)
    assert letter.message.id == "4"
    assert "notification.fax.send" in letter.reason


def _publish_events(url: str, events: list[tuple[str, str]]) -> None:
    """As a producer of another kind does, to the exchange."""
    import pika

    with closing(pika.BlockingConnection(pika.URLParameters(url))) as connection:
        channel = connection.channel()
        for message_id, type_ in events:
            properties = pika.BasicProperties(message_id=message_id, type=type_)
            channel.basic_publish("oncely", type_, b"{}", properties)
