"""How much of its queue a consumer takes on."""

from tests.unit.conftest import Queue

from oncely.consumer import Consumer
from oncely.core.message import Message
from oncely.core.record import State
from oncely.ledger import Ledger


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
