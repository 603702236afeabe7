"""The hand-written consumer's flows, on RabbitMQ and PostgreSQL: what it promises, oncely keeps."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, create_engine, make_url, text

from oncely import Consumer, Message, Policy, Reject, at_most_once, open_ledger, open_transport
from oncely.core.record import Key, State
from oncely.ledger import Ledger
from oncely.transports.transport import Transport

SMS, EMAIL = "notification.sms.send", "notification.email.send"
NAME = "notification-service"
QUEUE = "notifications"
BACKOFF_S = (0.05, 0.1, 0.3)
"""The usual 5, 10 and 30 seconds, a hundred times as fast."""


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


def test_duplicates_are_acknowledged_without_the_handler(
    consumer: Consumer, ledger: Ledger, transport: Transport
) -> None:
    """Whatever is delivered twice is handled once, and nothing is left in the queue."""
    handled: Counter[str] = Counter()
    transport.publish(QUEUE, [sms(n % 20) for n in range(60)])
    consumer.idempotent(ledger, NAME)
    report = consumer.consume(lambda message: handled.update([message.id]), drain=True)
    assert handled == Counter(f"sms-{n}" for n in range(20))
    assert (report.received, report.handled, report.duplicates) == (60, 20, 40)
    assert transport.is_drained(QUEUE)
    assert ledger.counts() == {(NAME, State.COMPLETED): 20}


def test_retries_with_backoff(consumer: Consumer, ledger: Ledger, transport: Transport) -> None:
    """A failure comes again, until it succeeds; `catch` hears of each, `failed` of none."""
    began: list[str] = []
    caught: list[str] = []
    given_up: list[str] = []

    def send(message: Message) -> None:
        began.append(message.id)
        if len(began) <= 4:
            raise ConnectionError(f"try {len(began)}")

    transport.publish(QUEUE, [sms(1)])
    consumer.idempotent(ledger, NAME).tries(5).backoff(BACKOFF_S)
    consumer.catch(lambda error, message: caught.append(f"{message.id}: {error}"))
    consumer.failed(lambda error, message: given_up.append(message.id))
    report = consumer.consume(send, drain=True)
    assert caught == [f"sms-1: try {n}" for n in (1, 2, 3, 4)]
    assert given_up == []
    assert (report.handled, report.retried, report.failed) == (1, 4, 0)
    record = ledger.find(Key(NAME, "sms-1"))
    assert record is not None
    assert (record.state, record.attempts) == (State.COMPLETED, 5)


def test_given_up_once(consumer: Consumer, ledger: Ledger, transport: Transport) -> None:
    """When the tries are spent `failed` is called once, and the message is in the dead letters
    with its error, its attempts and where it came from; a copy of it does not run again.
    """
    caught: list[int] = []
    given_up: list[str] = []

    def send(_: Message) -> None:
        raise ConnectionError("gateway is down; password=hunter2@x")

    transport.publish(QUEUE, [sms(1)])
    consumer.idempotent(ledger, NAME).tries(3).backoff(BACKOFF_S)
    consumer.catch(lambda *_: caught.append(1))
    consumer.failed(lambda error, message: given_up.append(message.id))
    report = consumer.consume(send, drain=True)
    assert (len(caught), given_up) == (2, ["sms-1"])
    assert (report.retried, report.failed, report.dead_lettered) == (2, 1, 1)
    [letter] = ledger.dead(NAME)
    assert (letter.message, letter.key, letter.attempts) == (sms(1), Key(NAME, "sms-1"), 3)
    assert "gateway is down" in letter.reason
    assert letter.error is not None
    assert "hunter2" not in letter.reason + letter.error
    record = ledger.find(Key(NAME, "sms-1"))
    assert record is not None
    assert (record.state, record.attempts, record.exhausted) == (State.FAILED, 3, True)
    assert "gateway is down" in str(record.error)


def test_dead_letter_is_tried_again(
    consumer: Consumer, ledger: Ledger, transport: Transport
) -> None:
    """What is given up runs again once people say so."""
    broken = [True]
    handled: list[str] = []

    def send(message: Message) -> None:
        if broken:
            raise Reject("no such number")
        handled.append(message.id)

    transport.publish(QUEUE, [sms(1)])
    consumer.idempotent(ledger, NAME)
    consumer.consume(send, drain=True)
    broken.clear()
    ids = [letter.id for letter in ledger.dead(NAME)]
    assert ledger.retry_dead(ids, by="people", why="the number was mended") == 1
    consumer.consume(send, drain=True)
    assert handled == ["sms-1"]
    assert [*ledger.dead(NAME)] == []


def test_middleware_in_order(consumer: Consumer, ledger: Ledger, transport: Transport) -> None:
    """Middleware runs in the order it was registered, outermost first; a duplicate goes through
    what stands before `idempotent`, and through nothing after it.
    """
    went: list[str] = []

    def noted(name: str) -> Callable[[Message, Any], Any]:
        def middleware(message: Message, call_next: Any) -> Any:
            went.append(f"{name} {message.headers['nth']}")
            try:
                return call_next(message)
            finally:
                went.append(f"/{name}")

        return middleware

    for nth in ("first", "second"):
        message = Message("sms-1", b"{}", SMS, headers={"nth": nth})
        transport.publish(QUEUE, [message])
    consumer.middleware(noted("a"), noted("b")).idempotent(ledger, NAME).middleware(noted("c"))
    consumer.consume(lambda _: went.append("handler"), drain=True)
    first = ["a first", "b first", "c first", "handler", "/c", "/b", "/a"]
    assert went == [*first, "a second", "b second", "/b", "/a"]


def test_several_event_types(rabbitmq_url: str, ledger: Ledger, transport: Transport) -> None:
    """Each type goes to its handler, by way of the exchange; what nobody takes, to the dead
    letters with that reason.
    """
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


def test_metadata_of_the_message(consumer: Consumer, ledger: Ledger, transport: Transport) -> None:
    """A function of the message says what is kept with its record."""
    transport.publish(QUEUE, [sms(1)])
    consumer.idempotent(
        ledger, NAME, metadata=lambda message: {"type": message.type, "bytes": len(message.body)}
    )
    consumer.consume(lambda _: None, drain=True)
    record = ledger.find(Key(NAME, "sms-1"))
    assert record is not None
    assert record.metadata == {"type": SMS, "bytes": len(sms(1).body)}


def test_at_most_once_skips_a_failed_message(
    consumer: Consumer, ledger: Ledger, transport: Transport
) -> None:
    """Where an effect must never repeat, what has failed is not tried again: the record stays
    failed, and its delivery is acknowledged.
    """
    runs: list[str] = []

    def send(message: Message) -> None:
        runs.append(message.id)
        raise TimeoutError("no answer from the gateway")

    transport.publish(QUEUE, [sms(1), sms(1)])
    consumer.idempotent(ledger, NAME, policy=at_most_once()).backoff(BACKOFF_S)
    consumer.consume(send, drain=True)
    assert runs == ["sms-1"]
    record = ledger.find(Key(NAME, "sms-1"))
    assert record is not None
    assert (record.state, record.attempts) == (State.FAILED, 1)
    assert transport.is_drained(QUEUE)


def test_transactional_effects(
    consumer: Consumer, ledger: Ledger, transport: Transport, postgresql_ledger_url: str
) -> None:
    """What handlers write is stored with their claims, once; what fails leaves nothing."""
    engine = _engine(postgresql_ledger_url)
    failures = Counter({"sms-3": 1, "sms-7": 99})

    def send(message: Message, connection: Connection) -> None:
        connection.execute(text("INSERT INTO sent VALUES (:id)"), {"id": message.id})
        if failures[message.id]:
            failures[message.id] -= 1
            raise ConnectionError("no line")

    transport.publish(QUEUE, [sms(n % 10) for n in range(30)])
    consumer.idempotent(ledger, NAME, policy=Policy(tries=2, backoff="50ms"))
    report = consumer.transactional(engine).consume(send, drain=True)
    with engine.begin() as connection:
        rows = connection.execute(text("SELECT id FROM sent")).scalars().all()
    assert sorted(rows) == [f"sms-{n}" for n in range(10) if n != 7]
    assert (report.handled, report.failed) == (9, 1)
    engine.dispose()


def _engine(url: str) -> Engine:
    engine = create_engine(make_url(url).set(drivername="postgresql+psycopg"))
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE sent (id text)"))
    return engine
