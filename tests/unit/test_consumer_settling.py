"""What a consumer tells its queue, and how much of it it takes on."""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest
from tests.unit.conftest import Queue, eventually

from oncely.consumer import Consumer
from oncely.consuming import loop as consuming
from oncely.core.errors import TransportError
from oncely.core.message import Message
from oncely.core.policy import Policy
from oncely.core.record import State
from oncely.core.verdicts import Ack, DeadLetter, Verdict
from oncely.ledger import Ledger
from oncely.transports.transport import Delivery


class Full(Queue):
    """One that has no room, for a while, for what is delayed or dead: it stays with us."""

    refusals = 2

    def settle(self, verdicts: Sequence[tuple[Delivery, Verdict]]) -> None:
        super().settle([(d, verdict) for d, verdict in verdicts if isinstance(verdict, Ack)])
        moved = [(d, verdict) for d, verdict in verdicts if not isinstance(verdict, Ack)]
        if moved and self.refusals:
            self.refusals -= 1
            raise TransportError("there is no room")
        super().settle(moved)


class Slow(Queue):
    """One that refuses a dead letter at once, and then takes it only when others are handled."""

    def __init__(self) -> None:
        super().__init__()
        self.is_told_again = Event()
        self.goes_on = Event()
        self.is_in_time = False
        self._refuses = True

    def settle(self, verdicts: Sequence[tuple[Delivery, Verdict]]) -> None:
        if any(isinstance(verdict, DeadLetter) for _, verdict in verdicts):
            if self._refuses:
                self._refuses = False
                raise TransportError("there is no room")
            self.is_told_again.set()
            self.is_in_time = self.goes_on.wait(10)
        super().settle(verdicts)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("tries", [1, 2])
def test_what_is_not_taken_is_told_again(
    no_rest: None, ledger: Ledger, monkeypatch: pytest.MonkeyPatch, tries: int
) -> None:
    """Nothing is left with the consumer, which nobody else could be given."""
    monkeypatch.setattr(consuming, "_AWAY_S", 0.01)
    queue = Full()
    queue.put("1", "2")

    def handle(message: Message) -> None:
        if message.id == "1":
            raise ValueError("no")

    policy = Policy(tries=tries, backoff="1ms")
    Consumer(queue, "in").idempotent(ledger, "c", policy=policy).consume(handle, drain=True)
    assert queue.refusals == 0
    assert queue.put_aside() == {"1": "ValueError: no"}


@pytest.mark.timeout(60)
def test_a_broker_that_is_slow_to_refuse(no_rest: None, ledger: Ledger) -> None:
    """Others are handled while it is told again."""
    queue = Slow()
    queue.put("1")
    handled: list[str] = []

    def handle(message: Message) -> None:
        if message.id == "1":
            raise ValueError("no")
        handled.append(message.id)
        queue.goes_on.set()

    policy = Policy(tries=1)
    consumer = Consumer(queue, "in").idempotent(ledger, "c", policy=policy)
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(consumer.consume, handle)
        assert queue.is_told_again.wait(20)
        # For longer than it rests between two looks: it would be held up by then.
        time.sleep(0.5)
        queue.put("2")
        eventually(lambda: bool(queue.put_aside()))
        consumer.stop()
        running.result()
    assert handled == ["2"]
    assert queue.is_in_time
    assert queue.put_aside() == {"1": "ValueError: no"}


def test_duplicates_do_not_tell_how_long_handlers_take(queue: Queue, ledger: Ledger) -> None:
    """After many of them no more is claimed than at first: what is new may take long."""
    seen: list[int] = []

    def handle(_: Message) -> None:
        seen.append(ledger.counts().get(("c", State.PROCESSING), 0))

    consumer = Consumer(queue, "in").idempotent(ledger, "c")
    queue.put("0")
    consumer.consume(handle, drain=True)
    queue.put(*["0"] * 2_000, *map(str, range(1, 2_000)))
    consumer.consume(handle, drain=True)
    assert len(seen) == 2_000
    assert seen[1] <= 2 * 64
