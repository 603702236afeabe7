"""Retries and dead letters in the ledger, with a broker and a database that are real."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import pika
import pytest
from sqlalchemy import create_engine, text
from tests.integration.others import wait_until
from tests.servers import Rabbitmq

from oncely import Consumer, Message, Policy, open_ledger, open_transport
from oncely.core.record import Key
from oncely.core.waiting import WaitingMessage, digest, retries_of, retry_name
from oncely.ledger import Ledger
from oncely.transports.transport import Delivery, Transport

QUEUE = "orders"
_MANY = 20_000

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


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
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


# ---- Many that wait ----------------------------------------------------------------------------


def test_many_that_wait_delay_nobody(
    rabbitmq_url: str, ledger_url: str, transport: Transport
) -> None:
    """However many wait for long, one that is due soon comes in its time."""
    ran: list[float] = []
    with closing(open_ledger(ledger_url)) as ledger:
        ledger.mailbox.keep([_waiting(f"late{n}", 600.0) for n in range(_MANY)])
        consumer = Consumer(rabbitmq_url, QUEUE).idempotent(
            ledger, "c", policy=Policy(backoff="3s")
        )

        def handle(message: Message) -> None:
            ran.append(time.monotonic())
            if len(ran) == 1:
                raise ValueError("not yet")

        with at_work(consumer, handle):
            transport.publish(QUEUE, [Message("soon", b"{}")])
            wait_until(lambda: len(ran) == 2)
        assert 3.0 <= ran[1] - ran[0] < 5.0
        assert ledger.mailbox.backlog(retries_of("c")).waiting == _MANY


def _waiting(message_id: str, delay_s: float) -> WaitingMessage:
    queue, message = retries_of("c"), Message(message_id, b"{}")
    name = retry_name(queue)
    lane = digest(queue, message_id)
    parent = Key("c", message_id)
    return WaitingMessage(
        message_id, "", message, parent, delay_s=delay_s, queue=queue, name=name, lane=lane
    )


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
        until = time.monotonic() + 30
        while len(mails) < 5 and time.monotonic() < until:
            mails += transport.receive("mails", 10, 0.5)
    assert sorted(delivery.message.body for delivery in mails) == [
        str(n).encode() for n in range(11, 20, 2)
    ]
    assert {message_id: times for message_id, times in tried.items() if times == 2} == {
        str(n): 2 for n in range(10)
    }
    aside = [*ledger.mailbox.listed("send", 99, is_set_aside=True)]
    assert {each.destination for each in aside} == {"typing-eror"}
    assert all("no queue takes it" in str(each.reason) for each in aside)


@pytest.mark.timeout(120)
def test_stopped_while_the_broker_is_blocked(private_rabbitmq: Rabbitmq, ledger: Ledger) -> None:
    """Under a memory alarm messages are received, acknowledged and tried again, whatever handlers
    send; and a consumer that is stopped ends within its grace.
    """
    url = private_rabbitmq.url
    with closing(open_transport(url)) as transport:
        for name in (QUEUE, "mails"):
            transport.subscribe(name, [])
        transport.publish(QUEUE, [Message(str(n), b"{}") for n in range(30)])
    private_rabbitmq.evaluate("vm_memory_monitor:set_vm_memory_high_watermark(0.0)")
    ran: list[str] = []

    def handle(message: Message) -> None:
        ran.append(message.id)
        message.send("mails", message.id)
        if int(message.id) % 3 == 0 and ran.count(message.id) == 1:
            raise ValueError("not yet")

    policy = Policy(backoff="100ms")
    consumer = Consumer(url, QUEUE).idempotent(ledger, "c", policy=policy).grace("3s")
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(consumer.consume, handle)
        wait_until(lambda: len(ran) == 40)
        wait_until(lambda: not [*ledger.waiting("c")])
        began = time.monotonic()
        consumer.stop()
        report = running.result(60)
        assert time.monotonic() - began < 8
    assert (report.handled, report.retried) == (30, 10)
    private_rabbitmq.evaluate("vm_memory_monitor:set_vm_memory_high_watermark(0.9)")
    with closing(open_transport(url)) as transport:
        wait_until(lambda: transport.is_drained(QUEUE))
    # What was not sent waits in the ledger, for any relay.
    assert ledger.mailbox.backlog().waiting == 30


# ---- The transaction of whoever sends ----------------------------------------------------------


def test_send_from_anywhere(postgresql_url: str, ledger: Ledger) -> None:
    """What is sent in a transaction waits once that is committed, and never where it is not."""
    engine = create_engine(postgresql_url.replace("postgresql://", "postgresql+psycopg://"))
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE orders (id text)"))
    for number in range(4):
        with engine.connect() as connection:
            with ledger.transaction(connection) as inbox:
                connection.execute(text("INSERT INTO orders VALUES (:id)"), {"id": str(number)})
                inbox.send("mails", {"order": number}, key="k")
            connection.commit() if number % 2 else connection.rollback()
    sent = [each.message for each in ledger.mailbox.listed("send", 9)]
    assert [(message.body, message.key) for message in sent] == [
        (b'{"order": 1}', "k"),
        (b'{"order": 3}', "k"),
    ]
    engine.dispose()
