"""Two versions of a consumer share a queue on RabbitMQ, while one is deployed: what only the newer
one takes waits for it, and is no dead letter.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager

import pytest
from tests.conditions import wait_until

from oncely import Consumer, ConsumerReport, Message, Policy, open_ledger, open_transport
from oncely.core import rules
from oncely.ledger import Ledger
from oncely.transports.transport import Transport

QUEUE = "orders"
PLACED, RETURNED = "order.placed", "order.returned"
IDS = [f"returned{number}" for number in range(20)]

Connect = Callable[[], Ledger | None]


@pytest.fixture(params=["postgresql_url", "none"])
def connect(request: pytest.FixtureRequest) -> Iterator[Connect]:
    """Opens one ledger, for each who asks; or none."""
    if request.param == "none":
        yield lambda: None
        return
    url = request.getfixturevalue(request.param)
    with ExitStack() as opened:
        opened.enter_context(closing(open_ledger(url))).migrate()
        yield lambda: opened.enter_context(closing(open_ledger(url)))


@pytest.fixture(autouse=True)
def _offered_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody here takes is offered again sooner than it would be."""
    monkeypatch.setattr(rules, "UNKNOWN_S", 1.0)


@pytest.fixture
def transport(rabbitmq_url: str) -> Iterator[Transport]:
    """A producer's."""
    with closing(open_transport(rabbitmq_url)) as transport:
        yield transport


class Version:
    """A version of the consumer, which takes these types."""

    def __init__(
        self, url: str, ledger: Ledger | None, *types: str, policy: Policy = Policy()
    ) -> None:
        self.received = 0
        self.handled: Counter[str] = Counter()
        self._consumer = Consumer(url, QUEUE).events(*types)
        if ledger is not None:
            self._consumer.idempotent(ledger, "shop", policy=policy)
        self._consumer.handler(lambda message: self.handled.update([message.id]))

    @contextmanager
    def at_work(self) -> Iterator["Future[ConsumerReport]"]:
        """While it consumes; what it has done, in the end."""
        with ThreadPoolExecutor(1) as thread:
            report = thread.submit(self._consumer.consume, on_progress=self._note)
            try:
                yield report
            finally:
                self._consumer.stop()
                report.result(60)

    def _note(self, report: ConsumerReport) -> None:
        self.received = report.received


def _publish_returned(transport: Transport) -> None:
    transport.publish(f"events:{RETURNED}", [Message(each, b"{}") for each in IDS])


def _is_left(transport: Transport, ledger: Ledger | None) -> list[object]:
    """What there is of dead letters, and of messages that wait."""
    left: list[object] = [*transport.receive(f"{QUEUE}.dead", 99, 0.1)]
    if ledger is not None:
        left += [*ledger.dead(), *ledger.waiting()]
    return left + ([] if transport.is_drained(QUEUE) else ["some are in the queue"])


def test_newer_starts_later(rabbitmq_url: str, connect: Connect, transport: Transport) -> None:
    """What has come to the older one alone, again and again, waits for the newer one."""
    old = Version(rabbitmq_url, connect(), PLACED)
    new = Version(rabbitmq_url, connect(), PLACED, RETURNED)
    transport.subscribe(QUEUE, [RETURNED])
    with old.at_work() as of_old:
        _publish_returned(transport)
        # Which takes a few seconds.
        wait_until(lambda: old.received >= 2 * len(IDS))
        with new.at_work() as of_new:
            wait_until(lambda: {*IDS} <= {*new.handled})
    assert (old.handled, new.handled) == ({}, Counter(IDS))
    assert of_old.result().dead_lettered == of_new.result().dead_lettered == 0
    assert _is_left(transport, connect()) == []
