"""Delays on RabbitMQ: whoever receives holds what is delayed, and gives it out when it is due."""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Any
from urllib.parse import urlsplit

import pika
import pytest
from tests.servers import Rabbitmq

from oncely.core.errors import TransportError
from oncely.core.message import Message
from oncely.core.verdicts import Ack, Delay, Requeue
from oncely.transports.open_transport import open_transport
from oncely.transports.rabbitmq import arrivals as inbox
from oncely.transports.rabbitmq import delaying, messages, topology
from oncely.transports.transport import Delivery, Transport

_DEADLINE_S = 30.0
_QUEUE = "orders"
_HOUR_S = 3_600.0

Open = Callable[..., Transport]


@pytest.fixture(params=["quorum", "classic"])
def queue_type(request: pytest.FixtureRequest) -> str:
    """The type of all queues."""
    return str(request.param)


@pytest.fixture
def open_one(rabbitmq_url: str, queue_type: str) -> Iterator[Open]:
    """Opens transports on one vhost, and closes them all in the end."""
    with ExitStack() as opened:

        def one(options: str = "") -> Transport:
            url = f"{rabbitmq_url}?queue_type={queue_type}{options}"
            return opened.enter_context(closing(open_transport(url)))

        yield one


@pytest.fixture
def transport(open_one: Open) -> Transport:
    """A transport on a vhost of its own."""
    return open_one()


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all delays are of one class, and a throng in it is passed on at once."""
    monkeypatch.setattr(topology, "_SPANS_S", ())
    monkeypatch.setattr(delaying, "_HELD_IN_A_THRONG_S", 0.05)
    monkeypatch.setattr(inbox, "_LOOK_AGAIN_S", 0.01)


def _delay(transport: Transport, delays_s: Sequence[float]) -> None:
    """Have a message delayed for each so long, which is its id."""
    transport.publish(_QUEUE, [Message(str(delay_s)) for delay_s in delays_s])
    deliveries = _received(transport, len(delays_s))
    transport.settle([(each, Delay(float(each.message.id))) for each in deliveries])


def _received(transport: Transport, number: int, *, at_most: int = 100) -> list[Delivery]:
    deliveries: list[Delivery] = []
    deadline = time.monotonic() + _DEADLINE_S
    while len(deliveries) < number:
        assert time.monotonic() < deadline, f"{len(deliveries)} of {number} came"
        deliveries += transport.receive(_QUEUE, min(at_most, number - len(deliveries)), 5.0)
    return deliveries


def _ids(deliveries: Sequence[Delivery]) -> list[str]:
    return [delivery.message.id for delivery in deliveries]


# ---- When they come ----------------------------------------------------------------------------


def test_in_the_order_in_which_they_are_due(transport: Transport) -> None:
    """Each comes when it is due, not before, and soon after; a receiver that waits wakes up."""
    delays_s = [0.9, 0.3, 1.2, 0.6]
    transport.publish(_QUEUE, [Message(str(delay_s)) for delay_s in delays_s])
    deliveries = _received(transport, 4)
    begun = time.monotonic()
    transport.settle([(each, Delay(float(each.message.id))) for each in deliveries])
    for delay_s in sorted(delays_s):
        [delivery] = _received(transport, 1)
        assert delivery.message.id == str(delay_s)
        assert delay_s <= time.monotonic() - begun < delay_s + 2.0
        assert delivery.queue == _QUEUE
        transport.settle([(delivery, Ack())])
    assert transport.is_drained(_QUEUE)


def test_before_others(transport: Transport) -> None:
    """What is due comes before what was published meanwhile."""
    _delay(transport, [0.1])
    transport.publish(_QUEUE, [Message(str(n)) for n in range(3)])
    time.sleep(0.2)
    assert _ids(_received(transport, 4, at_most=2)) == ["0.1", "0", "1", "2"]


def test_short_beside_long(open_one: Open) -> None:
    """A short delay is kept to, however many others are delayed for long."""
    transport = open_one("&prefetch=2")
    _delay(transport, [_HOUR_S + n for n in range(5)] + [60.0 + n for n in range(5)] + [0.2])
    assert _ids(_received(transport, 1)) == ["0.2"]


@pytest.mark.usefixtures("busy")
def test_more_than_can_be_held(open_one: Open) -> None:
    """Where more is delayed than may be held, what is due behind the others comes too; to be
    passed on does not count as a delivery.
    """
    transport = open_one("&prefetch=2")
    _delay(transport, [*(_HOUR_S + n for n in range(5)), 1.5, 0.1])
    again = _received(transport, 2, at_most=1)
    assert sorted(_ids(again)) == ["0.1", "1.5"]
    counts = transport.features.counts_deliveries
    assert [delivery.count for delivery in again] == [2 if counts else 1] * 2


@pytest.mark.parametrize("prefetch", [1, 2])
def test_more_due_than_the_prefetch(open_one: Open, prefetch: int) -> None:
    """Receivers may hold more of what was delayed than the prefetch."""
    transport = open_one(f"&prefetch={prefetch}")
    _delay(transport, [0.01 * n for n in range(1, 7)])
    deliveries = _received(transport, 6)
    assert len(set(_ids(deliveries))) == 6
    transport.settle([(delivery, Ack()) for delivery in deliveries])
    assert transport.is_drained(_QUEUE)


# ---- Who gives them out ------------------------------------------------------------------------


def test_another_gives_it_out(open_one: Open) -> None:
    """What a transport has delayed that is closed since, another one gives out, when it is due."""
    first, second = open_one(), open_one()
    _delay(first, [1.0])
    begun = time.monotonic()
    # It may hold it now.
    assert first.receive(_QUEUE, 1, 0.2) == []
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(second.receive, _QUEUE, 1, _DEADLINE_S)
        first.close()
        [delivery] = waiting.result(_DEADLINE_S)
    assert 0.9 < time.monotonic() - begun < 3.0
    second.settle([(delivery, Ack())])
    assert second.is_drained(_QUEUE)


def test_requeued_to_another(open_one: Open) -> None:
    """What was delayed and is requeued comes at once, to whoever waits."""
    first, second = open_one(), open_one()
    _delay(first, [0.1])
    [delivery] = _received(first, 1)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(second.receive, _QUEUE, 1, _DEADLINE_S)
        first.settle([(delivery, Requeue())])
        assert _ids(waiting.result(_DEADLINE_S / 2)) == ["0.1"]


def test_drained_by_another(open_one: Open) -> None:
    """A queue is not drained while another transport's delays are neither over nor taken."""
    first, second = open_one(), open_one()
    _delay(first, [0.5])
    first.close()
    assert not second.is_drained(_QUEUE)
    [delivery] = _received(second, 1)
    assert not second.is_drained(_QUEUE)
    second.settle([(delivery, Ack())])
    assert second.is_drained(_QUEUE)


def test_drained_is_given_nothing(open_one: Open) -> None:
    """Whoever has found its queue drained is given nothing until it receives again: others would
    not see it, and find theirs drained too.
    """
    first, second = open_one(), open_one()
    assert first.receive(_QUEUE, 1, 0) == []
    assert first.is_drained(_QUEUE)
    _delay(second, [0.01 * n for n in range(1, 11)])
    assert len(_received(second, 10)) == 10
    first.publish(_QUEUE, [Message("1")])
    second.close()
    assert "1" in _ids(_received(first, 11))


# ---- What cannot be relied on ------------------------------------------------------------------


@pytest.mark.parametrize(("ahead_s", "at_least_s"), [(_HOUR_S, 0.5), (-_HOUR_S, 0.0)])
def test_wrong_clock(
    open_one: Open, monkeypatch: pytest.MonkeyPatch, ahead_s: float, at_least_s: float
) -> None:
    """A machine whose clock is wrong has nothing delayed for longer than it has asked for."""
    first, second = open_one(), open_one()
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(messages, "time", lambda: time.time() + ahead_s)
        _delay(first, [0.5])
        begun = time.monotonic()
        first.close()
    assert len(_received(second, 1)) == 1
    assert at_least_s <= time.monotonic() - begun < 3.0


@pytest.mark.parametrize("headers", [None, {"x-oncely-due": "noon", "x-oncely-delay": [1]}])
def test_strange_message(
    transport: Transport, rabbitmq_url: str, headers: dict[str, Any] | None
) -> None:
    """What does not say until when it is delayed is due."""
    transport.receive(_QUEUE, 1, 0)
    with closing(pika.BlockingConnection(pika.URLParameters(rabbitmq_url))) as connection:
        properties = pika.BasicProperties(message_id="1", headers=headers)
        connection.channel().basic_publish("", f"{_QUEUE}.delay.1000", b"", properties)
    assert _ids(_received(transport, 1)) == ["1"]


def test_queues_may_not_be_made(
    rabbitmq: Rabbitmq, rabbitmq_url: str, transport: Transport
) -> None:
    """A user who may make none but the queue itself is told which is missing; once somebody has
    made them, all goes on.
    """
    url = rabbitmq_url.replace("//oncely:secret@", "//clerk:secret@")
    vhost = urlsplit(rabbitmq_url).path.removeprefix("/")
    rabbitmq.ctl("add_user", "clerk", "secret")
    try:
        rabbitmq.ctl("set_permissions", "--vhost", vhost, "clerk", f"^{_QUEUE}$", ".*", ".*")
        queue_type = "quorum" if transport.features.counts_deliveries else "classic"
        with closing(open_transport(f"{url}?queue_type={queue_type}")) as clerk:
            with pytest.raises(TransportError, match=rf"ACCESS_REFUSED.*{_QUEUE}\.dead"):
                clerk.receive(_QUEUE, 1, 0)
            _delay(transport, [0.1])
            transport.close()
            assert _ids(_received(clerk, 1)) == ["0.1"]
    finally:
        rabbitmq.ctl("delete_user", "clerk")
