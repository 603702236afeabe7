"""Retries and dead letters in the ledger, with a broker and a database that are real."""

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import pika
import pytest
from tests import amqp
from tests.conditions import wait_until
from tests.servers import Rabbitmq

from oncely import Consumer, Message, Policy, Unrecoverable, open_ledger, open_transport
from oncely.ledger.ledger import Ledger
from oncely.transports.transport import Delivery, Transport

QUEUE = "orders"

_WORKER = """
import os, signal, sys
from oncely import Consumer, Policy, open_ledger

url, ledger, log, fails = sys.argv[1:]

def handle(message):
    with open(log, "a") as file:
        file.write(f"{message.id}\\n")
    if message.id in fails.split(","):
        raise ValueError("not yet")

policy = Policy(backoff="2s", lease="5s")
consumer = Consumer(url, "orders").idempotent(open_ledger(ledger), "c", policy=policy).ordered()
consumer.consume(handle, stop_on_signals=True)
"""


@pytest.fixture(params=["postgresql_url", "mysql_url"])
def ledger_url(request: pytest.FixtureRequest) -> str:
    """Of a database that is migrated."""
    url: str = request.getfixturevalue(request.param)
    with closing(open_ledger(url)) as ledger:
        ledger.migrate()
    return url


@pytest.fixture
def ledger(postgresql_url: str) -> Iterator[Ledger]:
    """In PostgreSQL."""
    with closing(open_ledger(postgresql_url)) as ledger:
        ledger.migrate()
        yield ledger


@pytest.fixture
def transport(rabbitmq_url: str) -> Iterator[Transport]:
    """A producer's."""
    with closing(open_transport(rabbitmq_url)) as transport:
        transport.subscribe(QUEUE, [])
        yield transport


@contextmanager
def at_work(consumer: Consumer, handler: Callable[[Message], object]) -> Iterator[None]:
    """While it consumes."""
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(consumer.consume, handler)
        try:
            yield
        finally:
            consumer.stop()
            running.result(60)


# ---- Order over restarts and kills -------------------------------------------------------------


@pytest.mark.in_turn("brokers fail")
def test_order_of_what_a_stopped_one_had(
    rabbitmq_url: str, ledger: Ledger, transport: Transport
) -> None:
    """What a consumer has received and not begun goes back to where it was: before what others
    publish meanwhile, and in its order.
    """
    done: list[str] = []
    first = Consumer(rabbitmq_url, QUEUE).idempotent(ledger, "c").ordered()

    def stop(message: Message) -> None:
        done.append(message.id)
        if len(done) == 20:
            first.stop()

    transport.publish(QUEUE, [Message(str(n), b"{}", key=str(n % 3)) for n in range(300)])
    first.consume(stop)
    assert len(done) < 300
    transport.publish(QUEUE, [Message(str(n), b"{}", key=str(n % 3)) for n in range(300, 330)])
    second = Consumer(rabbitmq_url, QUEUE).idempotent(ledger, "c").ordered()
    second.consume(lambda message: done.append(message.id), drain=True)
    for key in range(3):
        ordered = [int(id_) for id_ in done if int(id_) % 3 == key]
        assert ordered == list(range(key, 330, 3))


@pytest.mark.in_turn("brokers fail")
@pytest.mark.parametrize(
    ("ledger_url", "end"),
    [("postgresql_url", signal.SIGTERM), ("mysql_url", signal.SIGKILL)],
    indirect=["ledger_url"],
)
def test_order_over_the_end_of_a_worker(
    tmp_path: Path, rabbitmq_url: str, ledger_url: str, transport: Transport, end: signal.Signals
) -> None:
    """Behind a message that waits those of its key wait, also where another process goes on."""
    log = tmp_path / "log"
    log.touch()

    def ran() -> list[str]:
        return log.read_text().split()

    def start(fails: str) -> "subprocess.Popen[bytes]":
        arguments = (rabbitmq_url, ledger_url, str(log), fails)
        return subprocess.Popen([sys.executable, "-c", _WORKER, *arguments])

    transport.publish(QUEUE, [Message(f"m{n}", b"{}", key="a") for n in (1, 2, 3)])
    first = start("m1")
    wait_until(lambda: bool(ran()))
    with closing(open_ledger(ledger_url)) as ledger:
        wait_until(lambda: bool([*ledger.waiting("c")]))
    first.send_signal(end)
    first.wait(60)
    transport.publish(QUEUE, [Message("m4", b"{}", key="a")])
    second = start("")
    try:
        wait_until(lambda: len([*dict.fromkeys(ran())]) == 4)
    finally:
        second.send_signal(signal.SIGTERM)
        second.wait(60)
    assert ran()[0] == "m1"
    assert [*dict.fromkeys(ran()[1:])] == ["m1", "m2", "m3", "m4"]


# ---- Receivers that share, and nobody who remembers ---------------------------------------------


@pytest.mark.parametrize(("queue_type", "memory"), [("quorum", None), ("classic", "redis_url")])
def test_nothing_waits_in_a_ledger(
    rabbitmq_url: str, queue_type: str, memory: str | None, request: pytest.FixtureRequest
) -> None:
    """Without a ledger, or with Redis, what failed is held and tried again after its delay; what is
    given up is rejected, and goes to the dead-letter queue that is made with its queue.
    """
    url = f"{rabbitmq_url}?queue_type={queue_type}"

    def handle(message: Message) -> None:
        if int(message.id) % 2:
            raise ValueError("no")

    consumer = Consumer(url, QUEUE).tries(2).backoff("50ms")
    if memory is not None:
        consumer.idempotent(open_ledger(request.getfixturevalue(memory)), "c")
    with closing(open_transport(url)) as transport:
        transport.publish(QUEUE, [Message(str(n), b"{}", headers={"a": "b"}) for n in range(4)])
        report = consumer.consume(handle, drain=True)
        assert (report.handled, report.retried, report.failed) == (2, 2, 2)
        letters: list[Delivery] = []
        while came := transport.receive(f"{QUEUE}.dead", 9, 1):
            letters += came
        assert sorted(letter.message.id for letter in letters) == ["1", "3"]
        assert letters[0].message.headers == {"a": "b"}


# ---- What no database takes --------------------------------------------------------------------

_UNUSABLE = {
    "a type": pika.BasicProperties(message_id="1", type="a\0b"),
    "a source": pika.BasicProperties(message_id="2", app_id="a\0b"),
    "a content type": pika.BasicProperties(message_id="3", content_type="a\0b"),
    "an id": pika.BasicProperties(message_id="a\0b"),
    "a key": pika.BasicProperties(message_id="4", headers={"x-oncely-key": "a\0b"}),
    "a long id": pika.BasicProperties(headers={"x-oncely-id": "x" * 300}),
    "another long id": pika.BasicProperties(headers={"x-oncely-id": "x" * 301}),
    "no text": amqp.Raw(message_id=b"\xff" * 255),
    "no id": pika.BasicProperties(correlation_id="a"),
    "no id either": pika.BasicProperties(correlation_id="b"),
    "headers": amqp.Raw(amqp.DOUBLE, amqp.nested(40), message_id=b"5"),
}


def test_what_no_database_takes(rabbitmq_url: str, ledger_url: str, transport: Transport) -> None:
    """What is not a message is a dead letter with its reason, its texts as the database can have
    them, a copy in the error queue; it keeps nobody from going on, and can be tried again.
    """
    transport.subscribe("errors", [])
    with closing(pika.BlockingConnection(pika.URLParameters(rabbitmq_url))) as connection:
        for body, properties in _UNUSABLE.items():
            connection.channel().basic_publish("", QUEUE, body.encode(), properties)
    transport.publish(QUEUE, [Message("good")])
    handled: list[Message] = []
    with closing(open_ledger(ledger_url)) as ledger:
        consumer = Consumer(rabbitmq_url, QUEUE).idempotent(ledger, "c").error_queue("errors")
        report = consumer.consume(handled.append, drain=True)
        assert (report.handled, report.dead_lettered) == (1, len(_UNUSABLE))
        letters = {letter.message.body.decode(): letter for letter in ledger.dead("c")}
        assert letters.keys() == _UNUSABLE.keys()
        reasons = {body: letter.reason.split(": ")[1] for body, letter in letters.items()}
        assert reasons["a type"] == "type with NUL"
        assert reasons["no text"] == "the message id is not UTF-8"
        assert reasons["a long id"] == "too long id"
        assert reasons["headers"] == "a header of AMQP cannot be read"
        assert letters["a long id"].message.headers == {"oncely-id": "x" * 300}
        wait_until(lambda: not ledger.mailbox.backlog().waiting)
        copies: list[Delivery] = []
        while came := transport.receive("errors", 99, 1):
            copies += came
        assert sorted(copy.message.body.decode() for copy in copies) == sorted(_UNUSABLE)
        ledger.retry_dead([letter.id for letter in letters.values() if letter.message.id])
        handled.clear()
        consumer.consume(handled.append, drain=True)
    assert {message.body.decode() for message in handled} == _UNUSABLE.keys() - {
        "no id",
        "no id either",
    }
    assert len({message.id for message in handled}) == len(handled)


# ---- What the broker does not take -------------------------------------------------------------


def test_what_is_refused_holds_up_nobody(
    rabbitmq_url: str, ledger: Ledger, transport: Transport
) -> None:
    """Where the error queue is full, takes nothing or is not there, retries and dead letters go on:
    they are in the ledger; and so do messages to other destinations.
    """
    with closing(pika.BlockingConnection(pika.URLParameters(rabbitmq_url))) as connection:
        arguments = {"x-max-length": 1, "x-overflow": "reject-publish"}
        connection.channel().queue_declare("errors", durable=True, arguments=arguments)
    transport.subscribe("mails", [])
    transport.publish(QUEUE, [Message(str(n), b"{}") for n in range(20)])
    tried: dict[str, int] = {}

    def handle(message: Message) -> None:
        tried[message.id] = tried.get(message.id, 0) + 1
        if int(message.id) < 10:
            raise ValueError("x" * 2_000)
        message.send("mails" if int(message.id) % 2 else "typing-eror", message.id)

    policy = Policy(tries=2, backoff="50ms")
    consumer = Consumer(rabbitmq_url, QUEUE).idempotent(ledger, "c", policy=policy)
    with at_work(consumer.error_queue("errors"), handle):
        wait_until(lambda: len([*ledger.dead("c")]) == 10)
        wait_until(lambda: len(tried) == 20)
        wait_until(lambda: ledger.mailbox.backlog().set_aside >= 5)
        mails: list[Delivery] = []

        def are_sent() -> bool:
            mails.extend(transport.receive("mails", 10, 0.5))
            return len(mails) == 5

        wait_until(are_sent)
    assert sorted(delivery.message.body for delivery in mails) == [
        str(n).encode() for n in range(11, 20, 2)
    ]
    assert {message_id: times for message_id, times in tried.items() if times == 2} == {
        str(n): 2 for n in range(10)
    }
    aside = [*ledger.mailbox.listed("send", 99, is_set_aside=True)]
    assert {each.destination for each in aside} == {"typing-eror"}
    assert all("no queue takes it" in str(each.reason) for each in aside)


@pytest.mark.in_turn("brokers fail")
def test_stopped_while_the_broker_is_blocked(private_rabbitmq: Rabbitmq, ledger: Ledger) -> None:
    """Under a memory alarm messages are received, acknowledged, tried again and set aside, whatever
    handlers and dead letters send; and a consumer that is stopped ends within its grace.
    """
    url = private_rabbitmq.url
    with closing(open_transport(url)) as transport:
        for name in (QUEUE, "mails", "errors"):
            transport.subscribe(name, [])
        transport.publish(QUEUE, [Message(str(n), b"{}") for n in range(33)])
    private_rabbitmq.evaluate("vm_memory_monitor:set_vm_memory_high_watermark(0.0)")
    ran: list[str] = []

    def handle(message: Message) -> None:
        ran.append(message.id)
        message.send("mails", message.id)
        if int(message.id) >= 30:
            raise Unrecoverable("never")
        if int(message.id) % 3 == 0 and ran.count(message.id) == 1:
            raise ValueError("not yet")

    policy = Policy(backoff="100ms")
    consumer = Consumer(url, QUEUE).idempotent(ledger, "c", policy=policy).grace("3s")
    consumer.error_queue("errors")
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(consumer.consume, handle)
        wait_until(lambda: len(ran) == 43)
        wait_until(lambda: not [*ledger.waiting("c")] and len([*ledger.dead("c")]) == 3)
        consumer.stop()
        report = running.result(60)
    assert (report.handled, report.retried, report.dead_lettered) == (30, 10, 3)
    private_rabbitmq.evaluate("vm_memory_monitor:set_vm_memory_high_watermark(0.9)")
    with closing(open_transport(url)) as transport:
        wait_until(lambda: transport.is_drained(QUEUE))
    # What was not sent waits in the ledger, for any relay.
    assert ledger.mailbox.backlog().waiting == 33
