"""Handlers that take longer than brokers like, on RabbitMQ: they run once, and the line lives."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
from tests.servers import Rabbitmq

from oncely import Consumer, Message, Policy, open_ledger, open_transport
from oncely.ledger import Ledger
from oncely.transports.transport import Transport

QUEUE = "slow"
_DEADLINE_S = 60.0


@pytest.fixture
def ledger(postgresql_url: str) -> Iterator[Ledger]:
    """In PostgreSQL."""
    with closing(open_ledger(postgresql_url)) as ledger:
        ledger.migrate()
        yield ledger


def received_by(consumers: list[Consumer], handler: Callable[[Message], None]) -> int:
    """Let consumers of one queue drain it; how many deliveries they were given."""
    with ThreadPoolExecutor(len(consumers)) as pool:
        reports = [pool.submit(each.consume, handler, drain=True) for each in consumers]
        return sum(report.result(_DEADLINE_S).received for report in reports)


def _transport(url: str) -> Transport:
    transport = open_transport(url)
    transport.subscribe(QUEUE, [])
    return transport


def test_handler_that_blocks_its_thread(rabbitmq_url: str, ledger: Ledger) -> None:
    """A handler that blocks for longer than two heartbeats of the broker runs once; its line is
    never lost, so nothing is delivered a second time.
    """
    url = f"{rabbitmq_url}?heartbeat=1s"
    runs: Counter[str] = Counter()

    def handle(message: Message) -> None:
        runs.update([message.id])
        until = time.monotonic() + 3.5
        while time.monotonic() < until:
            sum(range(50_000))  # Busy, and with the interpreter to itself most of the time.

    with closing(_transport(url)) as transport:
        transport.publish(QUEUE, [Message("1")])
        consumer = Consumer(url, QUEUE).idempotent(ledger, "slow")
        report = consumer.consume(handle, drain=True)
    assert runs == {"1": 1}
    assert (report.received, report.handled) == (1, 1)


def test_handler_that_outlasts_the_acknowledgement(
    private_rabbitmq: Rabbitmq, ledger: Ledger
) -> None:
    """Where the broker takes a delivery away, because it was not acknowledged in time, the next
    meets the claim, and waits; the handler runs once.
    """
    private_rabbitmq.evaluate("application:set_env(rabbit, consumer_timeout, 1000)")
    private_rabbitmq.evaluate("application:set_env(rabbit, channel_tick_interval, 500)")
    runs: Counter[str] = Counter()

    def handle(message: Message) -> None:
        runs.update([message.id])
        time.sleep(6.0)

    url = private_rabbitmq.url
    with closing(_transport(url)) as transport:
        transport.publish(QUEUE, [Message("1")])
        policy = Policy(lease="3s")
        both = [Consumer(url, QUEUE).idempotent(ledger, "slow", policy=policy) for _ in range(2)]
        assert received_by(both, handle) > 1
        assert runs == {"1": 1}
        assert [*ledger.dead("slow")] == []
