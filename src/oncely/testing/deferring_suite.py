# ruff: noqa: S101 - asserts are what a conformance suite is made of.
"""What a store has to do with deferred messages."""

import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from oncely.core.deferred import DeferredMessage
from oncely.core.message import Message
from oncely.core.record import Key
from oncely.stores.store import PublishRefusal, Store
from oncely.testing.doing import PARENT, Doing, deferred, ids_of, key_of
from oncely.testing.tools import AdvancingClock, at_once

HOLD_S = 60.0
_RELAYS = 8
_DEADLINE_S = 30.0
_STUCK = 10_000


class DeferringConformance:
    """The part of StoreConformance for deferred messages; skipped where there are none."""

    @pytest.fixture
    def doing(self, store: Store) -> Doing:
        """What does one thing inside a transaction; skips where the store has none."""
        if not store.has_transactions:
            pytest.skip("this store has no transactions")
        return Doing(store)

    # ---- Deferring -----------------------------------------------------------------------------

    def test_defer_keeps_every_field(self, doing: Doing) -> None:
        """What was deferred comes back as it was, with a number."""
        message = Message(
            id="own 🧾",
            body=bytes(range(256)) * 3,
            type="invoice.é",
            headers={"a": "b", "ключ": '"\\\x00\ud800'},
            source="/billing",
            time=datetime(2024, 2, 29, 23, 59, 59, 999_999, UTC),
            content_type="application/octet-stream",
            key="customer 🧾",
        )
        plain = deferred("plain")
        full = DeferredMessage("own 🧾", "orders'é", message, Key("billing é", "parent 🧾"), 7, 1.5)
        doing.defer([plain, full])
        [first] = doing.waiting([plain.parent])
        [second] = doing.waiting([full.parent])
        assert first.number is not None
        assert second.number is not None
        assert replace(first, number=None) == plain
        assert replace(second, number=None) == full

    def test_defer_twice(self, doing: Doing) -> None:
        """What is there under one parent, id and destination stays as it is."""
        doing.defer([deferred("m", body=b"first")])
        doing.defer([deferred("m", body=b"second"), deferred("n", position=1)])
        doing.defer([deferred("o", position=2), deferred("o", position=2)])
        assert ids_of(doing.waiting([PARENT])) == ["m", "n", "o"]
        assert doing.waiting([PARENT])[0].message.body == b"first"

    def test_two_destinations(self, doing: Doing) -> None:
        """One message for two destinations is two, and so are those of two parents."""
        other = key_of("other")
        doing.defer([deferred("m", "a"), deferred("m", "b"), deferred("m", "a", parent=other)])
        assert len(doing.waiting([PARENT])) == 2
        assert len(doing.waiting([PARENT, other])) == 3

    def test_distinct_names(self, doing: Doing, distinct_ids: Sequence[str]) -> None:
        """Ids and destinations that look alike are different, and come back as they were."""
        by_id = [deferred(name) for name in distinct_ids]
        doing.defer([*by_id, *(deferred("m", name) for name in distinct_ids)])
        found = [(m.id, m.destination) for m in doing.waiting([PARENT])]
        assert set(found) == {(m.id, m.destination) for m in by_id} | {
            ("m", name) for name in distinct_ids
        }

    def test_defer_many(self, doing: Doing) -> None:
        """Thousands can be deferred at once, and large ones."""
        doing.defer([deferred(str(n), position=n) for n in range(6_000)])
        assert ids_of(doing.waiting([PARENT])) == [str(n) for n in range(6_000)]
        body = bytes(range(256)) * 8_000
        large = key_of("large")
        doing.defer([deferred(str(n), position=n, parent=large, body=body) for n in range(3)])
        assert [m.message.body == body for m in doing.waiting([large])] == [True] * 3

    # ---- Taking --------------------------------------------------------------------------------

    def test_take_in_order(self, doing: Doing) -> None:
        """Messages are given in the order of sending, at most the limit."""
        doing.defer([deferred(str(n), position=n) for n in (2, 0, 1)])
        doing.defer([deferred("later", parent=key_of("later"))])
        assert ids_of(doing.waiting([PARENT, key_of("later")])) == ["0", "1", "2", "later"]
        taken = doing.take(2, HOLD_S)
        assert ids_of(taken) == ["0", "1"]
        doing.remove(taken)
        assert ids_of(doing.take(9, HOLD_S)) == ["2", "later"]

    def test_take_holds(self, doing: Doing, clock: AdvancingClock) -> None:
        """What was taken is given to nobody else, until it was held for long enough."""
        doing.defer([deferred("1"), deferred("2", position=1)])
        assert ids_of(doing.take(9, HOLD_S)) == ["1", "2"]
        assert doing.take(9, HOLD_S) == []
        clock.advance(HOLD_S - 1)
        assert doing.take(9, HOLD_S) == []
        clock.advance(2)
        assert ids_of(doing.take(9, HOLD_S)) == ["1", "2"]

    def test_take_nothing(self, doing: Doing) -> None:
        """Where nothing waits, nothing is taken."""
        assert doing.take(9, HOLD_S) == []
        assert doing.take(9, HOLD_S, [PARENT]) == []
        doing.defer([deferred("1")])
        assert doing.take(9, HOLD_S, []) == []

    def test_delay(self, doing: Doing, clock: AdvancingClock) -> None:
        """A delayed message is given when its delay is over, and then in its place."""
        doing.defer([deferred("slow", delay_s=100), deferred("fast", parent=key_of("fast"))])
        assert ids_of(doing.take(9, HOLD_S)) == ["fast"]
        clock.advance(99)
        assert "slow" not in ids_of(doing.take(9, HOLD_S))
        clock.advance(2)
        assert ids_of(doing.take(1, HOLD_S)) == ["slow"]

    def test_lanes(self, doing: Doing) -> None:
        """Nothing is given before an earlier one of its lane is sent; lanes do not wait for each
        other.
        """
        doing.defer([deferred(f"{key}{n}", key=key, position=n) for n in (1, 2) for key in "ab"])
        doing.defer([deferred("elsewhere", "other", key="a")])
        [first] = doing.take(1, HOLD_S)
        assert first.id == "a1"
        rest = doing.take(9, HOLD_S)
        assert ids_of(rest) == ["b1", "b2", "elsewhere"]
        doing.remove([first])
        assert ids_of(doing.take(9, HOLD_S)) == ["a2"]

    def test_lanes_of_keys_and_of_parents(self, doing: Doing) -> None:
        """One key is one lane whoever the parents are; without a key each parent is one."""
        parents = [key_of("1"), key_of("2")]
        doing.defer([deferred("k", key="k", parent=parent) for parent in parents])
        doing.defer([deferred("p", position=1, parent=parent) for parent in parents])
        [first] = doing.take(1, HOLD_S)
        assert (first.id, first.parent) == ("k", parents[0])
        [held] = doing.take(1, HOLD_S)
        assert _names([held, *doing.take(9, HOLD_S)]) == [("p", "1"), ("p", "2")]

    def test_lane_beside_a_delay(self, doing: Doing, clock: AdvancingClock) -> None:
        """A message with a delay keeps nothing waiting: it is given when its time has come."""
        doing.defer(
            [deferred("1"), deferred("2", position=1, delay_s=5), deferred("3", position=2)]
        )
        taken = doing.take(9, HOLD_S)
        assert ids_of(taken) == ["1", "3"]
        doing.remove(taken)
        assert doing.take(9, HOLD_S) == []
        clock.advance(6)
        assert ids_of(doing.take(9, HOLD_S)) == ["2"]

    def test_stuck_lane(self, doing: Doing) -> None:
        """However many wait behind a message that is refused, the other lanes are served."""
        doing.defer([deferred("head", key="k")])
        stuck = range(1, _STUCK)
        doing.defer([deferred(str(n), key="k", position=n) for n in stuck])
        doing.defer([deferred("good", parent=key_of("good"))])
        doing.put_back([PublishRefusal(m, "no", 100) for m in doing.take(1, HOLD_S)])
        assert ids_of(doing.take(5, HOLD_S)) == ["good"]

    def test_take_of_parents(self, doing: Doing) -> None:
        """Of some parents only theirs are taken, and none before an earlier one of its lane."""
        parents = [key_of(name) for name in "abc"]
        doing.defer([deferred("m", parent=parent) for parent in parents])
        doing.defer([deferred("k", key="k", position=1, parent=parent) for parent in parents])
        assert _names(doing.take(9, HOLD_S, parents[1:])) == [("m", "b"), ("m", "c")]
        assert _names(doing.take(9, HOLD_S)) == [("m", "a"), ("k", "a"), ("k", "b"), ("k", "c")]

    def test_takes_race(self, doing: Doing) -> None:
        """Of many relays at once none is given what another has, and each lane stays in order."""
        lanes, each = 12, 12
        order = [(lane, n) for n in range(each) for lane in range(lanes)]
        doing.defer(
            [
                deferred(
                    f"{lane}/{n}", key=str(lane), position=place, parent=key_of(str(place % 7))
                )
                for place, (lane, n) in enumerate(order)
            ]
        )
        given: dict[str | None, list[int | None]] = defaultdict(list)

        def send(_: int) -> None:
            while doing.store.backlog().waiting:
                taken = doing.take(7, HOLD_S)
                for message in taken:
                    given[message.message.key].append(message.number)
                doing.remove(taken)

        at_once(_RELAYS, send)
        assert sum(map(len, given.values())) == lanes * each
        assert [numbers == sorted(set(numbers)) for numbers in map(_known, given.values())] == (
            [True] * lanes
        )

    # ---- What is refused -----------------------------------------------------------------------

    def test_put_back(self, doing: Doing, clock: AdvancingClock) -> None:
        """What was refused is given again later, and tells how often and why."""
        doing.defer([deferred("1")])
        for attempts in (1, 2):
            [taken] = doing.take(9, HOLD_S)
            doing.put_back([PublishRefusal(taken, f"no {attempts}", 10)])
            clock.advance(9)
            assert doing.take(9, HOLD_S) == []
            clock.advance(2)
            [found] = doing.waiting([PARENT])
            assert (found.attempts, found.error) == (attempts, f"no {attempts}")

    def test_put_back_what_is_gone(self, doing: Doing) -> None:
        """What is sent meanwhile is neither put back nor removed again."""
        doing.defer([deferred("1")])
        taken = doing.take(9, HOLD_S)
        doing.remove(taken)
        doing.remove(taken)
        doing.put_back([PublishRefusal(taken[0], "no", 10)])
        assert doing.waiting([PARENT]) == []

    def test_set_aside(self, doing: Doing, clock: AdvancingClock) -> None:
        """What is set aside is given to nobody and holds nobody up, until it is sent again."""
        doing.defer([deferred("1"), deferred("2", position=1), deferred("3", position=2)])
        taken = doing.take(2, HOLD_S)
        doing.put_back([PublishRefusal(taken[0], "no", None)])
        doing.remove(taken[1:])
        clock.advance(10 * HOLD_S)
        assert ids_of(doing.waiting([PARENT])) == ["1", "3"]
        [third] = doing.take(1, HOLD_S)
        assert third.id == "3"
        doing.put_back([PublishRefusal(third, "busy", 0)])
        assert doing.store.send_again() == 1
        assert doing.store.send_again() == 0
        again = doing.take(9, HOLD_S)
        assert [(m.id, m.attempts) for m in again] == [("1", 0), ("3", 1)]

    def test_backlog(self, doing: Doing, clock: AdvancingClock) -> None:
        """The backlog tells what waits, what is set aside, and for how long."""
        _check_backlog(doing.store, 0, 0, 0)
        doing.defer([deferred("1"), deferred("2", position=1), deferred("3", "b", delay_s=50)])
        clock.advance(30)
        doing.put_back([PublishRefusal(doing.take(1, HOLD_S)[0], "no", None)])
        _check_backlog(doing.store, 2, 1, 30)
        doing.remove(doing.take(9, HOLD_S))
        _check_backlog(doing.store, 1, 1, 0)
        clock.advance(40)
        _check_backlog(doing.store, 1, 1, 20)

    # ---- Waiting -------------------------------------------------------------------------------

    def test_wait_is_ended_by_deferring(self, doing: Doing) -> None:
        """Whoever waits is told what is deferred while it waits, and what was since it waited."""
        _wait_until_quiet(doing.store)
        woken = threading.Event()

        def wait() -> None:
            doing.store.wait_for_deferred(10 * _DEADLINE_S)
            woken.set()

        for name in ("while it waits", "before it waits"):
            if name == "before it waits":
                doing.defer([deferred(name)])
            waiter = threading.Thread(target=wait, daemon=True)
            waiter.start()
            if name == "while it waits":
                doing.defer([deferred(name)])
            assert woken.wait(_DEADLINE_S), name
            woken.clear()
            waiter.join(_DEADLINE_S)

    def test_wait_ends(self, doing: Doing) -> None:
        """A wait for which nothing comes ends by itself."""
        for _ in range(3):
            doing.store.wait_for_deferred(0.01)


def _names(messages: Sequence[DeferredMessage]) -> list[tuple[str, str]]:
    return [(message.id, message.parent.message_id) for message in messages]


def _known(numbers: Sequence[int | None]) -> list[int]:
    return [number for number in numbers if number is not None]


def _check_backlog(store: Store, waiting: int, set_aside: int, lag_s: float) -> None:
    backlog = store.backlog()
    assert (backlog.waiting, backlog.set_aside) == (waiting, set_aside)
    assert backlog.lag_s == pytest.approx(lag_s, abs=1)


def _wait_until_quiet(store: Store) -> None:
    """What was deferred before is told by the first waits."""
    for _ in range(3):
        store.wait_for_deferred(0.01)
