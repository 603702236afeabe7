"""Two versions of a consumer share a queue on RabbitMQ, while one is deployed: what only the newer
one takes waits for it, and is no dead letter. There is no ledger in which it could wait.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

import pytest
from tests.conditions import wait_until

from oncely import Consumer, ConsumerReport, Message, open_transport
from oncely.core import turn
from oncely.transports.transport import Transport

QUEUE = "orders"
PLACED, RETURNED = "order.placed", "order.returned"


@pytest.fixture
def transport(rabbitmq_url: str) -> Iterator[Transport]:
    """A producer's."""
    with closing(open_transport(rabbitmq_url)) as transport:
        yield transport


@contextmanager
def at_work(consumer: Consumer, handled: list[str]) -> Iterator[list[ConsumerReport]]:
    """While it consumes, what it has done so far comes last."""
    reports: list[ConsumerReport] = [ConsumerReport()]
    consumer.handler(lambda message: handled.append(message.id))
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(consumer.consume, on_progress=reports.append)
        try:
            yield reports
        finally:
            consumer.stop()
            reports.append(running.result(60))


def test_newer_starts_later(
    rabbitmq_url: str, transport: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has come to the older one alone, again and again, waits for the newer one."""
    monkeypatch.setattr(turn, "UNKNOWN_S", 1.0)
    ids = [f"returned{number}" for number in range(20)]
    old, new = (Consumer(rabbitmq_url, QUEUE) for _ in range(2))
    old.events(PLACED)
    new.events(PLACED, RETURNED)
    by_old: list[str] = []
    by_new: list[str] = []
    transport.subscribe(QUEUE, [RETURNED])
    with at_work(old, by_old) as of_old:
        transport.publish(f"events:{RETURNED}", [Message(each, b"{}") for each in ids])
        # Which takes a few seconds.
        wait_until(lambda: of_old[-1].received >= 2 * len(ids))
        with at_work(new, by_new) as of_new:
            wait_until(lambda: {*ids} <= {*by_new})
    assert (by_old, sorted(by_new)) == ([], sorted(ids))
    assert of_old[-1].dead_lettered == of_new[-1].dead_lettered == 0
    assert transport.receive(f"{QUEUE}.dead", 99, 0.1) == []
    assert transport.is_drained(QUEUE)
