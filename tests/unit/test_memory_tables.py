"""What the store in memory holds: nothing is left of what is rolled back, and order is kept."""

from collections.abc import Iterator, Sequence
from random import Random

import pytest

from oncely.core.message import Message
from oncely.core.waiting import WaitingMessage
from oncely.stores.memory_store import MemoryStore
from oncely.stores.memory_tables import WaitingRow
from oncely.stores.store import PutBack, Transaction
from oncely.testing import ManualClock

_QUEUES = ("a", "b")
_HOLD_S = 60.0


class _GivenUpError(Exception):
    pass


def change(random: Random, transaction: Transaction, rows: list[WaitingRow]) -> None:
    """Do something to what waits."""
    some = [row.message for row in random.sample(rows, min(len(rows), 3))]
    match random.randrange(6):
        case 0 | 1:
            keys = [random.choice([None, "x", "y"]) for _ in range(3)]
            messages = [Message(str(n), key=key) for n, key in enumerate(keys)]
            transaction.keep(WaitingMessage.queued(random.choice(_QUEUES), messages))
        case 2:
            transaction.take(f"queue/{random.choice(_QUEUES)}", 3, _HOLD_S, one_per_lane=True)
        case 3:
            transaction.put_back(
                [PutBack(each, "no", random.choice([None, 0.0]), False) for each in some]
            )
        case 4:
            transaction.free([each.moved(random.choice(_QUEUES)) for each in some])
        case 5:
            transaction.remove(some)


def takeable(rows: list[WaitingRow], queue: str) -> list[int]:
    """By its definition: the first of each lane that is not set aside, in order."""
    lanes: dict[str, int] = {}
    for row in rows:
        if row.message.queue == queue and not row.message.is_set_aside:
            lanes.setdefault(row.message.lane, row.message.number or 0)
    return sorted(lanes.values())


@pytest.mark.parametrize("seed", range(20))
def test_transactions(seed: int) -> None:
    """Whatever is done, and undone, what can be taken is what the rows say, in their order."""
    random, clock = Random(seed), ManualClock()
    store = MemoryStore(clock)
    tables = store._tables
    for _ in range(150):
        before = tables.rows()
        is_given_up = random.random() < 0.4

        def work(transaction: Transaction, is_given_up: bool = is_given_up) -> None:
            for _ in range(random.randrange(1, 4)):
                change(random, transaction, tables.rows())
            if is_given_up:
                raise _GivenUpError

        if is_given_up:
            with pytest.raises(_GivenUpError):
                store.transaction(work)
            assert tables.rows() == before
        else:
            store.transaction(work)
        clock.advance(random.choice([0.0, _HOLD_S]))
    clock.advance(_HOLD_S)
    for queue in _QUEUES:
        name = f"queue/{queue}"
        expected = takeable(tables.rows(), name)
        assert store.free_in_s(name) == (0.0 if expected else None)
        taken = store.transaction(
            lambda transaction, name=name: transaction.take(name, 1_000, _HOLD_S, one_per_lane=True)  # type: ignore[misc]
        )
        assert [each.number for each in taken] == expected


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
