# ruff: noqa: S101 - asserts are what a conformance suite is made of.
"""Conformance tests of deliveries: the part of TransportSuite that begins with receiving."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import product

import pytest

from oncely.core.message import Message
from oncely.core.verdicts import Ack, Acknowledgement, Reject, Requeue
from oncely.testing.tools import AdvancingClock, at_once
from oncely.transports.transport import Delivery, Transport

Connect = Callable[[], Transport]

QUEUE = "orders"
DEAD = "orders.dead"
DEADLINE_S = 120.0
"""The limit of a wait: it says nothing of how long anything may take."""
RECEIVERS = 8
_NOTHING_S = 0.05
"""How long a test waits for a message that must not come."""
_CLOSES = 2_000
"""How often a transport is closed before its receiver must have returned."""

_ORDER = Message("order-17", b'{"total": 3}', "order.placed", {"tenant": "a"}, key="customer-9")
_VERDICTS: tuple[Acknowledgement, ...] = (Ack(), Requeue(), Reject("late"))


class RedeliverySuite:
    """A delivery is acknowledged once, by its holder; what is not acknowledged is redelivered."""

    @pytest.fixture
    def transport(self, connect: Connect) -> Transport:
        """The first transport of a test."""
        return connect()

    def test_requeue(self, transport: Transport) -> None:
        """A requeued message is redelivered at once, unchanged, and the delivery is counted."""
        transport.publish(QUEUE, [_ORDER])
        for times in (1, 2, 3):
            [delivery] = received(transport, 1)
            assert delivery.message == _ORDER
            assert delivery.count == (times if transport.features.counts_deliveries else 1)
            assert not (times == 1 and delivery.is_again)
            transport.acknowledge([(delivery, Requeue())])

    def test_mixed_verdicts(self, transport: Transport) -> None:
        """Each delivery gets its own verdict, also if verdicts are mixed in one call."""
        transport.publish(QUEUE, [Message(str(n)) for n in range(9)])
        deliveries = {d.message.id: d for d in received(transport, 9)}
        transport.acknowledge([(d, _VERDICTS[int(id_) % 3]) for id_, d in deliveries.items()])
        assert sorted(ids_of(received(transport, 3))) == ["1", "4", "7"]
        assert sorted(ids_of(received(transport, 3, queue=DEAD))) == ["2", "5", "8"]
        assert nothing_comes(transport)

    def test_held(self, connect: Connect) -> None:
        """A held message goes to no other receiver, and not to its holder again."""
        holder, other = connect(), connect()
        given(holder, Message("1"))
        assert nothing_comes(other)
        assert nothing_comes(holder)

    def test_unsettled_comes_again(self, connect: Connect, clock: AdvancingClock) -> None:
        """Unless acknowledged in time, a message is redelivered, to any receiver, and counted."""
        holder, other = connect(), connect()
        visibility_s = holder.features.visibility_s
        if visibility_s is None:
            pytest.skip("this transport declares no visibility timeout")
        given(holder, _ORDER)
        clock.advance(visibility_s / 2)
        assert nothing_comes(other)
        clock.advance(visibility_s / 2)
        [again] = received(other, 1)
        assert again.message == _ORDER
        assert again.count == (2 if other.features.counts_deliveries else 1)

    def test_late_settle(self, connect: Connect, clock: AdvancingClock) -> None:
        """An acknowledgement after a redelivery does not affect the new delivery."""
        holder, other = connect(), connect()
        if holder.features.visibility_s is None:
            pytest.skip("this transport declares no visibility timeout")
        for later, verdict in product((other, holder), _VERDICTS):
            [late] = given(holder, Message("1"))
            clock.advance(holder.features.visibility_s)
            [current] = received(later, 1)
            holder.acknowledge([(late, verdict)])
            assert nothing_comes(other)
            assert not other.is_drained(QUEUE)
            later.acknowledge([(current, Ack())])
            assert other.is_drained(QUEUE)
        assert nothing_comes(other, queue=DEAD)

    def test_acknowledged_twice(self, transport: Transport) -> None:
        """Only the first acknowledgement of a delivery counts, in one call and in the next."""
        for verdict in _VERDICTS:
            [delivery] = given(transport, Message("1"))
            transport.acknowledge([(delivery, Ack()), (delivery, verdict)])
            [other] = given(transport, Message("2"))
            transport.acknowledge([(delivery, verdict)])
            assert not transport.is_drained(QUEUE)
            transport.acknowledge([(other, Requeue()), (other, verdict)])
            [again] = received(transport, 1)
            assert again.message.id == "2"
            transport.acknowledge([(again, Ack())])
        assert nothing_comes(transport, queue=DEAD)

    def test_receivers_share(self, connect: Connect) -> None:
        """Of many receivers at once, in threads and over connections, one gets each message."""
        transports = [connect() for _ in range(RECEIVERS // 2)]
        ids = [str(n) for n in range(500)]
        transports[0].publish(QUEUE, [Message(id_) for id_ in ids])

        def work(receiver: int) -> list[str]:
            taken: list[str] = []
            transport = transports[receiver // 2]
            while not transport.is_drained(QUEUE):
                deliveries = transport.receive(QUEUE, 7, _NOTHING_S)
                taken.extend(ids_of(deliveries))
                transport.acknowledge([(delivery, Ack()) for delivery in deliveries])
            return taken

        by_receiver = at_once(RECEIVERS, work)
        assert sorted(id_ for taken in by_receiver for id_ in taken) == sorted(ids)

    def test_close_gives_back(self, connect: Connect) -> None:
        """Held messages of a closed transport are redelivered at once; waiting messages stay."""
        holder, other = connect(), connect()
        first, second, _ = given(holder, Message("1"), Message("2"), Message("3"))
        holder.acknowledge([(first, Ack()), (second, Reject("no"))])
        holder.close()
        [again] = received(other, 1)
        assert again.message.id not in (first.message.id, second.message.id)
        assert ids_of(received(other, 1, queue=DEAD)) == [second.message.id]

    def test_acknowledged_after_close(self, transport: Transport) -> None:
        """A delivery of a closed transport cannot be acknowledged: another may have the message."""
        for verdict in _VERDICTS:
            [before] = given(transport, Message("1"))
            transport.close()
            [after] = received(transport, 1)
            transport.acknowledge([(before, verdict)])
            assert nothing_comes(transport)
            assert not transport.is_drained(QUEUE)
            transport.acknowledge([(after, Ack())])
            assert transport.is_drained(QUEUE)


class DeliverySuite(RedeliverySuite):
    """What is received is acknowledged, requeued or refused, until its queue is drained."""

    def test_ack(self, transport: Transport, clock: AdvancingClock) -> None:
        """An acknowledged message is never redelivered, also not after the visibility timeout."""
        first, second = given(transport, Message("1"), Message("2"))
        transport.acknowledge([(first, Ack()), (second, Ack())])
        _lapse(transport, clock)
        assert nothing_comes(transport)

    def test_reject(self, transport: Transport, clock: AdvancingClock) -> None:
        """A rejected message goes unchanged to the dead-letter queue, and is not redelivered."""
        [delivery] = given(transport, _ORDER)
        transport.acknowledge([(delivery, Reject("no such customer: é 🧾"))])
        _lapse(transport, clock)
        assert nothing_comes(transport)
        assert transport.is_drained(QUEUE)
        [letter] = received(transport, 1, queue=DEAD)
        assert (letter.message, letter.queue) == (_ORDER, DEAD)
        transport.acknowledge([(letter, Ack())])
        assert transport.is_drained(DEAD)

    def test_dead_letters_of_dead_letters(self, transport: Transport) -> None:
        """A dead-letter queue is a queue like any other: no rejected message is lost."""
        [delivery] = given(transport, _ORDER)
        transport.acknowledge([(delivery, Reject("no"))])
        [letter] = received(transport, 1, queue=DEAD)
        transport.acknowledge([(letter, Reject("no"))])
        assert ids_of(received(transport, 1, queue=f"{DEAD}.dead")) == [_ORDER.id]

    def test_drained(self, transport: Transport) -> None:
        """A queue is drained when nothing waits or is held; dead letters do not count."""
        assert transport.is_drained(QUEUE)
        transport.publish(QUEUE, [Message("1"), Message("2")])
        assert not transport.is_drained(QUEUE)
        assert transport.is_drained("another")
        first, second = received(transport, 2)
        assert not transport.is_drained(QUEUE)
        transport.acknowledge([(first, Requeue()), (second, Reject("no"))])
        assert not transport.is_drained(QUEUE)
        [again] = received(transport, 1)
        assert not transport.is_drained(QUEUE)
        transport.acknowledge([(again, Ack())])
        assert transport.is_drained(QUEUE)

    def test_drained_loop(self, transport: Transport) -> None:
        """Who acknowledges until the queue is drained gets every message once, small and large."""
        ids = [str(n) for n in range(300)]
        sizes = (10, 100_000)
        transport.publish(QUEUE, [Message(id_, b"x" * sizes[n % 2]) for n, id_ in enumerate(ids)])
        taken: list[str] = []
        while not transport.is_drained(QUEUE):
            deliveries = transport.receive(QUEUE, 20, _NOTHING_S)
            taken.extend(ids_of(deliveries))
            transport.acknowledge([(delivery, Ack()) for delivery in deliveries])
        assert sorted(taken, key=int) == ids

    def test_close_then_use(self, transport: Transport) -> None:
        """A call after close opens the transport again; to close twice does no harm."""
        transport.publish(QUEUE, [Message("1")])
        transport.close()
        transport.close()
        assert ids_of(received(transport, 1)) == ["1"]

    def test_close_ends_waiting(self, transport: Transport) -> None:
        """A receiver that waits returns with nothing as soon as its transport is closed."""
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(transport.receive, QUEUE, 1, 2 * DEADLINE_S)
            for _ in range(_CLOSES):
                # Repeatedly: the receiver may not have begun to wait the first time.
                transport.close()
                if wait([waiting], _NOTHING_S).done:
                    break
            assert waiting.done()
            assert list(waiting.result()) == []


def given(transport: Transport, *messages: Message) -> list[Delivery]:
    """Publish these messages; return their deliveries."""
    transport.publish(QUEUE, messages)
    return received(transport, len(messages))


def received(
    transport: Transport, number: int, *, queue: str = QUEUE, at_most: int = 100
) -> list[Delivery]:
    """So many deliveries, in their order. Raises AssertionError if they do not come."""
    deliveries: list[Delivery] = []
    deadline = time.monotonic() + DEADLINE_S
    while len(deliveries) < number:
        assert time.monotonic() < deadline, f"{len(deliveries)} of {number} came"
        wanted = min(at_most, number - len(deliveries))
        deliveries.extend(transport.receive(queue, wanted, 1.0))
    return deliveries


def nothing_comes(transport: Transport, *, queue: str = QUEUE) -> bool:
    """Whether nothing can be received."""
    return not transport.receive(queue, 100, _NOTHING_S)


def _lapse(transport: Transport, clock: AdvancingClock) -> None:
    """Let the visibility timeout of held messages end, if there is one."""
    clock.advance(transport.features.visibility_s or 0.0)


def ids_of(deliveries: Sequence[Delivery]) -> list[str]:
    """The ids of their messages."""
    return [delivery.message.id for delivery in deliveries]
