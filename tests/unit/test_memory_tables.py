"""What the store in memory holds: a lane of many messages costs what it is looked at."""

from collections.abc import Iterator, Sequence

from oncely.core.message import Message
from oncely.core.waiting import WaitingMessage
from oncely.stores.memory_store import MemoryStore
from oncely.stores.memory_tables import WaitingRow
from oncely.stores.store import Transaction
from oncely.testing import ManualClock

_HOLD_S = 60.0


class _Counting(dict[int, WaitingRow]):
    """Rows that count how many of them are looked at."""

    looked = 0

    def values(self) -> Iterator[WaitingRow]:  # type: ignore[override]
        for row in super().values():
            self.looked += 1
            yield row


def test_one_lane_of_many() -> None:
    """Where the only lane is held, it is not looked through all that stands in it."""
    store = MemoryStore(ManualClock())
    rows = store._tables._queues["queue/a"] = _Counting()
    store.put("a", [Message("gone")])
    store.put("a", [Message(str(n), key="x") for n in range(1_000)])

    def take(transaction: Transaction) -> Sequence[WaitingMessage]:
        return transaction.take("queue/a", 100, _HOLD_S, one_per_lane=True)

    gone, first = store.transaction(take)
    store.transaction(lambda transaction: transaction.remove([gone]))
    rows.looked = 0
    assert store.transaction(take) == []
    store.transaction(lambda transaction: transaction.remove([first]))
    [second] = store.transaction(take)
    assert (second.message.id, rows.looked) == ("1", 4)
