"""RabbitMQ goes away, cuts off, refuses, blocks: nothing is lost, and the transport goes on."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from threading import Event, Thread
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.conditions import LIMIT_S, wait_until
from tests.integration.adapting import channel_to
from tests.logs import events_in
from tests.processes import exit_of, forked
from tests.proxy import Proxy
from tests.servers import HOST, Rabbitmq

from oncely.consumer import Consumer
from oncely.core.errors import BrokerRefused, PublishRefused, TransportError
from oncely.core.message import Message
from oncely.core.verdicts import Ack, Reject, Requeue
from oncely.ledger.ledger import Ledger, open_ledger
from oncely.testing import at_once
from oncely.transports.open_transport import open_transport
from oncely.transports.rabbitmq import session
from oncely.transports.rabbitmq.rabbitmq_transport import RabbitmqTransport
from oncely.transports.transport import Delivery, Transport

_QUEUE = "orders"
_ACK = b"\x00\x3c\x00\x50"

Open = Callable[..., Transport]


@pytest.fixture
def open_at() -> Iterator[Open]:
    """Opens transports at a URL, and closes them all in the end."""
    with ExitStack() as opened:
        yield lambda url: opened.enter_context(closing(open_transport(url)))


@pytest.fixture
def transport(open_at: Open, rabbitmq_url: str) -> Transport:
    """A transport on a vhost of its own."""
    return open_at(rabbitmq_url)


def _publish(transport: Transport, number: int, first: int = 0) -> list[str]:
    ids = [str(n) for n in range(first, first + number)]
    transport.publish(_QUEUE, [Message(id_) for id_ in ids])
    return ids


def _received(transport: Transport, number: int, queue: str = _QUEUE) -> list[Delivery]:
    """So many deliveries, however often the broker is away meanwhile."""
    deliveries: list[Delivery] = []

    def are_here() -> bool:
        with suppress(TransportError):
            deliveries.extend(transport.receive(queue, number - len(deliveries), 1.0))
        return len(deliveries) == number

    wait_until(are_here, lambda: f"{len(deliveries)} of {number} came")
    return deliveries


def _ids(deliveries: Sequence[Delivery]) -> list[str]:
    return [delivery.message.id for delivery in deliveries]


def _vhost(url: str) -> str:
    return urlsplit(url).path.removeprefix("/")


# ---- Traffic through faults --------------------------------------------------------------------


class Traffic:
    """One thread publishes, one consumes, and neither minds a broker that is away."""

    def __init__(self, transport: Transport) -> None:
        self.published: list[str] = []
        self.received: set[str] = set()
        self._transport = transport
        self._end = Event()
        self._threads = [Thread(target=self._produce), Thread(target=self._consume)]

    def __enter__(self) -> "Traffic":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join(LIMIT_S)

    def goes_on(self) -> None:
        """Wait until much has been published and received since now."""
        published, received = len(self.published) + 200, len(self.received) + 200
        wait_until(lambda: len(self.published) >= published and len(self.received) >= received)

    def _produce(self) -> None:
        number = 0
        while not self._end.is_set():
            ids = [str(n) for n in range(number, number + 20)]
            try:
                self._transport.publish(_QUEUE, [Message(id_) for id_ in ids])
            except TransportError:
                self._end.wait(0.05)
            else:
                self.published += ids
                number += 20

    def _consume(self) -> None:
        wait_until(self._is_through)

    def _is_through(self) -> bool:
        is_last = self._end.is_set() and set(self.published) <= self.received
        try:
            self._take()
            return is_last and self._transport.is_drained(_QUEUE)
        except TransportError:
            return False

    def _take(self) -> None:
        deliveries = self._transport.receive(_QUEUE, 50, 0.2)
        # Where the reply is lost, the broker may have taken the acknowledgement: none comes again.
        self.received.update(_ids(deliveries))
        self._transport.acknowledge([(delivery, Ack()) for delivery in deliveries])


@pytest.mark.in_turn("brokers fail")
def test_restart(private_rabbitmq: Rabbitmq, open_at: Open) -> None:
    """While the broker is killed or stopped, calls fail; what was confirmed is there afterwards,
    dead letters too, and publishing and consuming go on by themselves.
    """
    transport = open_at(f"{private_rabbitmq.url}?confirm_timeout=5s")
    other = open_at(private_rabbitmq.url)
    other.publish("another", [Message("kept"), Message("dead")])
    _, second = _received(other, 2, "another")
    other.acknowledge([(second, Reject("no"))])
    with Traffic(transport) as traffic:
        for end in (private_rabbitmq.kill, private_rabbitmq.stop):
            traffic.goes_on()
            end()
            with pytest.raises(TransportError):
                other.publish("another", [Message("1")])
            with pytest.raises(TransportError):
                other.receive("another", 1, 0.1)
            private_rabbitmq.start()
        traffic.goes_on()
    assert set(traffic.published) <= traffic.received
    [again] = _received(other, 1, "another")
    assert again.message.id == "kept"
    assert _ids(_received(other, 1, "another.dead")) == ["dead"]


@pytest.mark.in_turn("brokers fail")
def test_connections_closed(rabbitmq: Rabbitmq, rabbitmq_url: str, transport: Transport) -> None:
    """An operator closes all connections, again and again: nothing is lost, and all goes on."""
    with Traffic(transport) as traffic:
        for _ in range(3):
            traffic.goes_on()
            rabbitmq.close_connections(_vhost(rabbitmq_url))
        traffic.goes_on()
    assert set(traffic.published) <= traffic.received


@pytest.mark.in_turn("brokers fail")
def test_what_a_lost_connection_had_comes_first(
    rabbitmq: Rabbitmq, rabbitmq_url: str, transport: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A queue is consumed again when the broker has noticed that its consumer has gone: before, it
    would deliver what stands behind what that was given.
    """
    told = [0, 1, 1, 1, 0]
    monkeypatch.setattr(session, "consumers", lambda *_: told.pop(0))
    _publish(transport, 30)
    with closing(open_transport(f"{rabbitmq_url}?prefetch=10")) as narrow:
        first = _ids(_received(narrow, 10))
        rabbitmq.close_connections(_vhost(rabbitmq_url))
        assert _ids(_received(narrow, 10)) == first == [str(n) for n in range(10)]
    assert told == []


def test_who_receives_alone_waits_for_those_that_are_gone(
    transport: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As what a killed process had comes first: its successor does not know how many there were."""
    told = [1, 1, 0]
    monkeypatch.setattr(session, "consumers", lambda *_: told.pop(0))
    transport.subscribe(_QUEUE, [], alone=True)
    _publish(transport, 1)
    assert _ids(_received(transport, 1)) == ["0"]
    assert told == []


# ---- One fault ---------------------------------------------------------------------------------


def test_queue_deleted(
    rabbitmq_url: str, transport: Transport, caplog: pytest.LogCaptureFixture
) -> None:
    """A queue that is deleted under its consumer is made again, and what comes into it arrives;
    what was held of the former one cannot be acknowledged any more.
    """
    caplog.set_level(logging.INFO, "oncely")
    _publish(transport, 1)
    [held] = _received(transport, 1)
    with channel_to(rabbitmq_url) as channel:
        channel.queue_delete(_QUEUE)
    assert transport.receive(_QUEUE, 1, 0.2) == []
    _publish(transport, 1, first=1)
    [delivery] = _received(transport, 1)
    transport.acknowledge([(held, Ack()), (delivery, Ack())])
    assert delivery.message.id == "1"
    assert events_in(caplog) == ["acknowledged_too_late"]
    assert transport.is_drained(_QUEUE)


def test_memory_alarm(rabbitmq: Rabbitmq, rabbitmq_url: str, open_at: Open) -> None:
    """While the broker has no memory left, to publish fails in time; to receive, to acknowledge,
    to reject and to find a queue drained go on. Afterwards all is well.
    """
    transport = open_at(f"{rabbitmq_url}?confirm_timeout=500ms")
    _publish(transport, 6)
    first, second = _received(transport, 2)
    with _no_memory(rabbitmq):
        # The broker still takes what makes it notice that this is a publisher.
        with pytest.raises(TransportError, match="not answered within"):  # noqa: PT012
            for _ in range(3):
                transport.publish("another", [Message("1")])
        transport.acknowledge([(delivery, Ack()) for delivery in _received(transport, 4)])
        transport.acknowledge([(first, Requeue()), (second, Reject("no"))])
        transport.acknowledge([(delivery, Ack()) for delivery in _received(transport, 1)])
        assert transport.is_drained(_QUEUE)
    _publish(transport, 1)
    assert _ids(_received(transport, 1)) == ["0"]


def test_a_broker_that_takes_less(rabbitmq: Rabbitmq, transport: Transport) -> None:
    """A body over the broker's own limit is refused; those beside it are stored, some twice."""
    limit = "application:{}_env(rabbit, max_message_size{})"
    rabbitmq.evaluate(limit.format("set", ", 1000"))
    try:
        with pytest.raises(PublishRefused, match="message size 2000") as refused:
            transport.publish(_QUEUE, [Message(str(n), b"x" * n) for n in (10, 2_000, 20)])
        assert [*refused.value.refused] == [1]
        with pytest.raises(PublishRefused, match="message size 1001"):
            transport.publish(_QUEUE, [Message("1001", b"x" * 1_001)])
    finally:
        rabbitmq.evaluate(limit.format("unset", ""))
    stored: set[str] = set()
    while stored < {"10", "20"}:
        stored |= {*_ids(_received(transport, 1))}
    assert stored == {"10", "20"}


@contextmanager
def _no_memory(rabbitmq: Rabbitmq) -> Iterator[None]:
    def limit(fraction: float) -> None:
        rabbitmq.evaluate(f"vm_memory_monitor:set_vm_memory_high_watermark({fraction})")
        has_memory, alarms = fraction > 0, "rabbit_alarm:get_alarms()"
        wait_until(lambda: (rabbitmq.evaluate(alarms) == "[]") == has_memory)

    limit(0.0)
    try:
        yield
    finally:
        limit(0.4)


def test_acknowledged_too_late(
    rabbitmq: Rabbitmq, rabbitmq_url: str, open_at: Open, caplog: pytest.LogCaptureFixture
) -> None:
    """What is held beyond the broker's own timeout comes again; the late acknowledgement is
    dropped and the transport goes on, what it publishes through included.
    """
    caplog.set_level(logging.INFO, "oncely")
    with _hasty(rabbitmq):
        transport = open_at(rabbitmq_url)
        _publish(transport, 1)
        [late] = _received(transport, 1)
        [again] = _received(transport, 1)
        transport.acknowledge([(late, Ack())])
        assert events_in(caplog) == ["acknowledged_too_late"]
        assert (again.message.id, again.count) == ("0", 2)
        transport.acknowledge([(again, Ack())])
        assert transport.is_drained(_QUEUE)


@contextmanager
def _hasty(rabbitmq: Rabbitmq) -> Iterator[None]:
    """While new channels have to acknowledge within a second."""
    read = "element(2, application:get_env(rabbit, {}))"
    names = ("consumer_timeout", "channel_tick_interval")
    usual = {name: rabbitmq.evaluate(read.format(name)) for name in names}
    for name in usual:
        rabbitmq.evaluate(f"application:set_env(rabbit, {name}, 1000)")
    try:
        yield
    finally:
        for name, value in usual.items():
            rabbitmq.evaluate(f"application:set_env(rabbit, {name}, {value})")


@pytest.mark.parametrize("delivers", [True, False], ids=["reply lost", "request lost"])
def test_cut_while_publishing(rabbitmq_url: str, open_at: Open, delivers: bool) -> None:
    """A connection that breaks while messages are published is told at once; to publish all
    again loses none.
    """
    with Proxy(urlsplit(rabbitmq_url).port or 0) as proxy:
        transport = open_at(_through(rabbitmq_url, proxy))
        ids = _publish(transport, 3)
        proxy.cut(b"the-message", delivers=delivers)
        message = Message("the-message")
        with pytest.raises(TransportError):
            transport.publish(_QUEUE, [message])
        transport.publish(_QUEUE, [message])
        copies = 2 if delivers else 1
        assert _ids(_received(transport, 3 + copies)) == [*ids, *["the-message"] * copies]
        assert proxy.cuts == 1


@pytest.mark.parametrize("delivers", [True, False], ids=["delivered", "lost"])
def test_cut_while_settling(rabbitmq_url: str, open_at: Open, delivers: bool) -> None:
    """What was acknowledged when the connection broke is acknowledged, or comes again."""
    with Proxy(urlsplit(rabbitmq_url).port or 0) as proxy:
        transport = open_at(_through(rabbitmq_url, proxy))
        _publish(transport, 2)
        deliveries = _received(transport, 2)
        proxy.cut(_ACK, delivers=delivers)
        transport.acknowledge([(delivery, Ack()) for delivery in deliveries])
        _publish(transport, 1, first=2)
        again = _received(transport, 1 if delivers else 3)
        assert sorted(_ids(again)) == (["2"] if delivers else ["0", "1", "2"])
        transport.acknowledge([(delivery, Ack()) for delivery in again])
        assert transport.is_drained(_QUEUE)


def _through(url: str, proxy: Proxy) -> str:
    return url.replace(f"{HOST}:{urlsplit(url).port}", f"{HOST}:{proxy.port}")


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_fork(transport: Transport) -> None:
    """A forked child has connections of its own, and leaves its parent's alone."""
    ids = _publish(transport, 1)
    [held] = _received(transport, 1)

    def use() -> None:
        transport.publish("another", [Message("1")])
        [delivery] = transport.receive("another", 10, LIMIT_S)
        transport.acknowledge([(delivery, Ack())])
        assert transport.receive(_QUEUE, 10, 0.05) == []
        transport.close()

    assert exit_of(forked(use)) == 0
    transport.acknowledge([(held, Requeue())])
    assert _ids(_received(transport, 1)) == ids


# ---- Handlers that take longer than a broker likes -----------------------------------------------


@pytest.fixture
def ledger(postgresql_ledger_url: str) -> Iterator[Ledger]:
    """In PostgreSQL."""
    with closing(open_ledger(postgresql_ledger_url)) as ledger:
        yield ledger


def test_handler_that_blocks_its_thread(rabbitmq_url: str, ledger: Ledger) -> None:
    """A handler that blocks for longer than two heartbeats of the broker runs once; its line is
    never lost, so nothing is delivered a second time.
    """
    url = f"{rabbitmq_url}?heartbeat=1s"
    runs: list[str] = []

    def handle(message: Message) -> None:
        runs.append(message.id)
        until = time.monotonic() + 3.5
        while time.monotonic() < until:
            sum(range(50_000))  # Busy, and with the interpreter to itself most of the time.

    with closing(open_transport(url)) as transport:
        transport.publish(_QUEUE, [Message("1")])
    report = Consumer(url, _QUEUE).idempotent(ledger, "slow").consume(handle, drain=True)
    assert (runs, report.received, report.handled) == (["1"], 1, 1)


def test_handler_that_outlasts_the_acknowledgement(
    rabbitmq: Rabbitmq, rabbitmq_url: str, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the broker takes a delivery away, because it was not acknowledged in time, the next
    meets the claim, and waits; the handler runs once.
    """
    runs: list[str] = []
    received: list[Delivery] = []
    receive = RabbitmqTransport.receive

    def noting(transport: RabbitmqTransport, *args: Any) -> Sequence[Delivery]:
        taken = receive(transport, *args)
        received.extend(taken)
        return taken

    def handle(message: Message) -> None:
        runs.append(message.id)
        wait_until(lambda: len(received) > 1)

    def consume(_: int) -> None:
        Consumer(rabbitmq_url, _QUEUE).idempotent(ledger, "slow").consume(handle, drain=True)

    monkeypatch.setattr(RabbitmqTransport, "receive", noting)
    with _hasty(rabbitmq), closing(open_transport(rabbitmq_url)) as transport:
        transport.publish(_QUEUE, [Message("1")])
        at_once(2, consume)
    assert runs == ["1"]
    assert [*ledger.dead("slow")] == []


# ---- Refused for good --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        (":secret@", ":wrong@", "wrong user or password"),
        ("/oncely", "/missing", "vhost .* not found"),
    ],
)
def test_wrong_address(rabbitmq_url: str, open_at: Open, right: str, wrong: str, said: str) -> None:
    """A wrong password or vhost is told at once, in one line without the password."""
    transport = open_at(wrong.join(rabbitmq_url.rsplit(right, 1)))
    for call in (lambda: transport.receive(_QUEUE, 1, 3_600.0), lambda: _publish(transport, 1)):
        with pytest.raises(BrokerRefused, match=said) as raised:
            call()
        assert "\n" not in str(raised.value)
        assert ":wrong" not in str(raised.value)


def test_wrong_queue_type(rabbitmq_url: str, open_at: Open, transport: Transport) -> None:
    """A queue of the other type is told at once, with what to type instead."""
    _publish(transport, 1)
    with pytest.raises(BrokerRefused, match=r"of another type; change \?queue_type="):
        open_at(f"{rabbitmq_url}?queue_type=classic").receive(_QUEUE, 1, 3_600.0)


def test_nobody_there(open_at: Open) -> None:
    """Where no broker is, a call says so when its time is over."""
    transport = open_at(f"amqp://{HOST}:1/")
    with pytest.raises(TransportError, match="refused"):
        transport.receive(_QUEUE, 1, 0.5)
