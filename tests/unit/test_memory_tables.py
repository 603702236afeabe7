"""A transaction in memory that fails leaves everything as it was."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncely.core.message import Message
from oncely.core.record import Key, Record, State
from oncely.core.waiting import OUTBOX, WaitingMessage
from oncely.stores.memory_store import MemoryStore
from oncely.stores.memory_tables import MemoryTables
from oncely.stores.store import Change, Inside, PutBack, Query
from oncely.testing import ManualClock

KEYS = [Key("billing", str(n)) for n in range(3)]
DESTINATIONS = ["mails", "texts"]


class BrokenOffError(Exception):
    """A transaction does not come to its end."""


def insert(inside: Inside, key: Key, _: str) -> None:
    inside.insert([Record(key, State.HANDLED, 1, 1, 0.0, 0.0, metadata={"n": 1}, version=1)])


def change(inside: Inside, key: Key, text: str) -> None:
    for record in inside.load([key]).records.values():
        changed = record._replace(metadata={"n": text}, version=record.version + 1)
        inside.swap([Change(record, changed)])


def remove_record(inside: Inside, key: Key, _: str) -> None:
    inside.swap([Change(record, None) for record in inside.load([key]).records.values()])


def defer(inside: Inside, key: Key, text: str) -> None:
    inside.keep([WaitingMessage(text, to, Message(text), key) for to in DESTINATIONS])


def take(inside: Inside, key: Key, _: str) -> None:
    inside.take(OUTBOX, 1, 30.0, [key])


def remove(inside: Inside, key: Key, _: str) -> None:
    inside.remove(inside.waiting([key])[:1])


def put_back(inside: Inside, key: Key, text: str) -> None:
    refused = inside.waiting([key])[:2]
    inside.put_back([PutBack(message, text, None if text == "a" else 9.0) for message in refused])


def free(inside: Inside, key: Key, _: str) -> None:
    inside.free([message for message in inside.waiting([key]) if message.is_set_aside])


def renew(inside: Inside, key: Key, text: str) -> None:
    waiting = WaitingMessage(
        text, "a", Message(text), key, attempts=3, delay_s=9.0, is_set_aside=text == "b"
    )
    inside.keep([waiting], renews=True)


def keep_step(inside: Inside, key: Key, text: str) -> None:
    inside.keep_step(key, text, {"of": text})


def forget(inside: Inside, key: Key, _: str) -> None:
    inside.forget_steps(key)


def purge(inside: Inside, key: Key, _: str) -> None:
    assert isinstance(inside, MemoryTables)
    if inside.load([key]).records:
        inside.purge(key)


def purge_steps(inside: Inside, key: Key, _: str) -> None:
    assert isinstance(inside, MemoryTables)
    inside.purge_steps(key.consumer, -1.0)


DEEDS = [
    *(insert, change, remove_record, purge, purge_steps),
    *(defer, take, remove, put_back, free, renew),
    *(keep_step, forget),
]
Deed = tuple[Callable[[Inside, Key, str], None], Key, str]
deeds = st.lists(
    st.tuples(st.sampled_from(DEEDS), st.sampled_from(KEYS), st.sampled_from(["a", "b"])),
    max_size=25,
)


def do(store: MemoryStore, these: list[Deed], error: Exception | None = None) -> None:
    """Do these in one transaction, which ends in `error`."""

    def work(inside: Inside) -> None:
        for deed, key, text in these:
            deed(inside, key, text)
        if error is not None:
            raise error

    store.transaction(work)


def contents(store: MemoryStore) -> Any:
    """All that anybody can find there."""

    def look(inside: Inside) -> Any:
        steps = {key: inside.steps(key) for key in KEYS}
        return inside.load(KEYS).records, steps, unnumbered(inside.waiting(KEYS))

    return store.transaction(look), store.backlogs(), sorted(store.scan(Query()))


def sendable(store: MemoryStore, clock: ManualClock) -> Any:
    """What can be sent a bit later, and what in a minute; all of it is held then."""
    taken = []
    for pause_s in (5.0, 60.0):
        clock.advance(pause_s)
        taken.append(unnumbered(store.transaction(lambda inside: inside.take(OUTBOX, 100, 1.0))))
    return taken


def unnumbered(messages: Sequence[WaitingMessage]) -> list[WaitingMessage]:
    """The same without their numbers: those of a broken-off transaction are lost."""
    return [replace(message, number=None) for message in messages]


@given(before=deeds, broken_off=deeds, after=deeds)
def test_roll_back(before: list[Deed], broken_off: list[Deed], after: list[Deed]) -> None:
    """What is done in a transaction that fails was never done, whatever came before or comes."""
    clocks = ManualClock(), ManualClock()
    store, other = (MemoryStore(clock) for clock in clocks)
    do(store, before)
    do(other, before)
    with pytest.raises(BrokenOffError):
        do(store, broken_off, BrokenOffError())
    assert contents(store) == contents(other)
    do(store, after)
    do(other, after)
    assert contents(store) == contents(other)
    assert sendable(store, clocks[0]) == sendable(other, clocks[1])


def test_some_stay_and_some_go() -> None:
    """A transaction that is broken off between others takes nothing of theirs along."""
    store = MemoryStore(ManualClock())
    do(store, [(insert, KEYS[0], "a"), (defer, KEYS[0], "a"), (keep_step, KEYS[0], "a")])
    with pytest.raises(BrokenOffError):
        do(store, [(forget, KEYS[0], "a"), (remove_record, KEYS[0], "a")], BrokenOffError())
    do(store, [(keep_step, KEYS[0], "b")])
    (records, steps, waiting), _, _ = contents(store)
    assert steps[KEYS[0]] == {"a": {"of": "a"}, "b": {"of": "b"}}
    assert [message.destination for message in waiting] == DESTINATIONS
    assert list(records) == [KEYS[0]]
