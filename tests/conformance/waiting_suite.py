"""Messages that wait in a store."""

import threading
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from tests.conditions import LIMIT_S
from tests.conformance.values import DISTINCT_IDS
from tests.records import PARENT, Doing, deferred, ids_of, key_of

from oncely.core.durations import seconds
from oncely.core.message import Message
from oncely.core.record import Key
from oncely.core.waiting import (
    OUTBOX,
    WaitingMessage,
    digest,
    queue_named,
    retries_of,
    retry_name,
)
from oncely.stores.store import Listing, PutBack, Store
from oncely.testing.tools import AdvancingClock

HOLD_S = 60.0
_STUCK = 2_000


class WaitingStatements:
    """Messages that wait: kept, taken lane by lane, put back, removed by who holds them."""

    # ---- Deferring -----------------------------------------------------------------------------

    def test_defer_keeps_every_field(self, doing: Doing) -> None:
        """A deferred message is read back unchanged, with a number."""
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
        full = WaitingMessage("own 🧾", "orders'é", message, Key("billing é", "parent 🧾"), 7, 1.5)
        doing.keep([plain, full])
        [first] = doing.waiting([plain.parent])
        [second] = doing.waiting([full.parent])
        assert first.number is not None
        assert second.number is not None
        assert replace(first, number=None) == plain
        assert replace(second, number=None) == full

    def test_defer_twice(self, doing: Doing) -> None:
        """An existing message with the same parent, id and destination is not changed."""
        doing.keep([deferred("m", body=b"first")])
        doing.keep([deferred("m", body=b"second"), deferred("n", position=1)])
        doing.keep([deferred("o", position=2), deferred("o", position=2)])
        assert ids_of(doing.waiting([PARENT])) == ["m", "n", "o"]
        assert doing.waiting([PARENT])[0].message.body == b"first"

    def test_two_destinations(self, doing: Doing) -> None:
        """One message for two destinations is two, and so are those of two parents."""
        other = key_of("other")
        doing.keep([deferred("m", "a"), deferred("m", "b"), deferred("m", "a", parent=other)])
        assert len(doing.waiting([PARENT])) == 2
        assert len(doing.waiting([PARENT, other])) == 3

    def test_distinct_names(self, doing: Doing) -> None:
        """Ids and destinations that look alike are different, and come back as they were."""
        by_id = [deferred(name) for name in DISTINCT_IDS]
        doing.keep([*by_id, *(deferred("m", name) for name in DISTINCT_IDS)])
        found = [(m.id, m.destination) for m in doing.waiting([PARENT])]
        assert set(found) == {(m.id, m.destination) for m in by_id} | {
            ("m", name) for name in DISTINCT_IDS
        }

    def test_defer_many(self, doing: Doing) -> None:
        """Thousands can be deferred at once, and large ones."""
        doing.keep([deferred(str(n), position=n) for n in range(6_000)])
        assert ids_of(doing.waiting([PARENT])) == [str(n) for n in range(6_000)]
        body = bytes(range(256)) * 8_000
        large = key_of("large")
        doing.keep([deferred(str(n), position=n, parent=large, body=body) for n in range(3)])
        assert [m.message.body == body for m in doing.waiting([large])] == [True] * 3

    # ---- Taking --------------------------------------------------------------------------------

    def test_take_in_order(self, doing: Doing) -> None:
        """Messages are given in the order of sending, at most the limit."""
        doing.keep([deferred(str(n), position=n) for n in (2, 0, 1)])
        doing.keep([deferred("later", parent=key_of("later"))])
        assert ids_of(doing.waiting([PARENT, key_of("later")])) == ["0", "1", "2", "later"]
        taken = doing.take(2, HOLD_S)
        assert ids_of(taken) == ["0", "1"]
        doing.remove(taken)
        assert ids_of(doing.take(9, HOLD_S)) == ["2", "later"]

    def test_take_holds(self, doing: Doing, clock: AdvancingClock) -> None:
        """A taken message is given to no other worker until its hold time is over."""
        doing.keep([deferred("1"), deferred("2", position=1)])
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
        doing.keep([deferred("1")])
        assert doing.take(9, HOLD_S, []) == []

    def test_delay(self, doing: Doing, clock: AdvancingClock) -> None:
        """A delayed message is given when its delay is over, and then in its place."""
        doing.keep([deferred("slow", delay_s=100), deferred("fast", parent=key_of("fast"))])
        assert ids_of(doing.take(9, HOLD_S)) == ["fast"]
        clock.advance(99)
        assert "slow" not in ids_of(doing.take(9, HOLD_S))
        clock.advance(2)
        assert ids_of(doing.take(1, HOLD_S)) == ["slow"]

    def test_lanes(self, doing: Doing) -> None:
        """Nothing is given before an earlier one of its lane is sent; lanes do not wait for each
        other.
        """
        doing.keep([deferred(f"{key}{n}", key=key, position=n) for n in (1, 2) for key in "ab"])
        doing.keep([deferred("elsewhere", "other", key="a")])
        [first] = doing.take(1, HOLD_S)
        assert first.id == "a1"
        rest = doing.take(9, HOLD_S)
        assert ids_of(rest) == ["b1", "b2", "elsewhere"]
        doing.remove([first])
        assert ids_of(doing.take(9, HOLD_S)) == ["a2"]

    def test_lanes_of_keys_and_of_parents(self, doing: Doing) -> None:
        """One key is one lane whoever the parents are; without a key each parent is one."""
        parents = [key_of("1"), key_of("2")]
        doing.keep([deferred("k", key="k", parent=parent) for parent in parents])
        doing.keep([deferred("p", position=1, parent=parent) for parent in parents])
        [first] = doing.take(1, HOLD_S)
        assert (first.id, first.parent) == ("k", parents[0])
        [held] = doing.take(1, HOLD_S)
        assert _names([held, *doing.take(9, HOLD_S)]) == [("p", "1"), ("p", "2")]

    def test_lane_beside_a_delay(self, doing: Doing, clock: AdvancingClock) -> None:
        """A message with a delay keeps nothing waiting: it is given when its time has come."""
        doing.keep([deferred("1"), deferred("2", position=1, delay_s=5), deferred("3", position=2)])
        taken = doing.take(9, HOLD_S)
        assert ids_of(taken) == ["1", "3"]
        doing.remove(taken)
        assert doing.take(9, HOLD_S) == []
        clock.advance(6)
        assert ids_of(doing.take(9, HOLD_S)) == ["2"]

    def test_stuck_lane(self, doing: Doing) -> None:
        """However many wait behind a message that is refused, the other lanes are served."""
        doing.keep([deferred("head", key="k")])
        stuck = range(1, _STUCK)
        doing.keep([deferred(str(n), key="k", position=n) for n in stuck])
        doing.keep([deferred("good", parent=key_of("good"))])
        doing.put_back([PutBack(m, "no", 100) for m in doing.take(1, HOLD_S)])
        assert ids_of(doing.take(5, HOLD_S)) == ["good"]

    def test_take_of_parents(self, doing: Doing) -> None:
        """Of some parents only theirs are taken, and none before an earlier one of its lane."""
        parents = [key_of(name) for name in "abc"]
        doing.keep([deferred("m", parent=parent) for parent in parents])
        doing.keep([deferred("k", key="k", position=1, parent=parent) for parent in parents])
        assert _names(doing.take(9, HOLD_S, parents[1:])) == [("m", "b"), ("m", "c")]
        assert _names(doing.take(9, HOLD_S)) == [("m", "a"), ("k", "a"), ("k", "b"), ("k", "c")]

    # ---- What is refused -----------------------------------------------------------------------

    def test_put_back(self, doing: Doing, clock: AdvancingClock) -> None:
        """A refused message is given again later, with the number of refusals and the reason."""
        doing.keep([deferred("1")])
        for attempts in (1, 2):
            [taken] = doing.take(9, HOLD_S)
            doing.put_back([PutBack(taken, f"no {attempts}", 10)])
            clock.advance(9)
            assert doing.take(9, HOLD_S) == []
            clock.advance(2)
            [found] = doing.waiting([PARENT])
            assert (found.attempts, found.error) == (attempts, f"no {attempts}")

    def test_put_back_what_is_gone(self, doing: Doing) -> None:
        """A message sent in the meantime is neither put back nor removed again."""
        doing.keep([deferred("1")])
        taken = doing.take(9, HOLD_S)
        doing.remove(taken)
        doing.remove(taken)
        doing.put_back([PutBack(taken[0], "no", 10)])
        assert doing.waiting([PARENT]) == []

    def test_set_aside(self, doing: Doing, clock: AdvancingClock) -> None:
        """A set-aside message is given to no worker and delays no other, until it is retried."""
        doing.keep([deferred("1"), deferred("2", position=1), deferred("3", position=2)])
        taken = doing.take(2, HOLD_S)
        doing.put_back([PutBack(taken[0], "no", None)])
        doing.remove(taken[1:])
        clock.advance(10 * HOLD_S)
        assert ids_of(doing.waiting([PARENT])) == ["1", "3"]
        [third] = doing.take(1, HOLD_S)
        assert third.id == "3"
        doing.put_back([PutBack(third, "busy", 0)])
        assert doing.ledger.mailbox.send_again() == 1
        assert doing.ledger.mailbox.send_again() == 0
        again = doing.take(9, HOLD_S)
        assert [(m.id, m.attempts) for m in again] == [("1", 0), ("3", 1)]

    def test_backlog(self, doing: Doing, clock: AdvancingClock) -> None:
        """The backlog tells what waits, what is set aside, and for how long."""
        _check_backlog(doing, 0, 0, 0)
        doing.keep([deferred("1"), deferred("2", position=1), deferred("3", "b", delay_s=50)])
        clock.advance(30)
        doing.put_back([PutBack(doing.take(1, HOLD_S)[0], "no", None)])
        _check_backlog(doing, 2, 1, 30)
        doing.remove(doing.take(9, HOLD_S))
        _check_backlog(doing, 1, 1, 0)
        clock.advance(40)
        _check_backlog(doing, 1, 1, 20)

    # ---- Retries, dead letters and queues --------------------------------------------------------

    def test_queues_are_apart(self, doing: Doing) -> None:
        """A message of one queue is not taken from another; each queue has its own count."""
        doing.keep([deferred("sent"), retry("a"), retry("b", "other"), queued("c")])
        assert ids_of(doing.take(9, HOLD_S, queue=RETRIES)) == ["a"]
        assert ids_of(doing.take(9, HOLD_S, queue=queue_named("in"))) == ["c"]
        assert ids_of(doing.take(9, HOLD_S)) == ["sent"]
        assert {queue: b.waiting for queue, b in doing.store.backlogs().items()} == {
            OUTBOX: 1,
            RETRIES: 1,
            retries_of("other"): 1,
            queue_named("in"): 1,
        }

    def test_keep_anew(self, doing: Doing, clock: AdvancingClock) -> None:
        """What is kept anew stays in its place, and has all that it has now; else it stays as it
        was.
        """
        doing.keep([retry("first"), retry("second")])
        later = replace(retry("first"), attempts=2, error="no", delay_s=50.0)
        doing.keep([later])
        assert ids_of(doing.take(1, 1, queue=RETRIES)) == ["first"]
        other = Message("first", b"other", "type", {"a": "b"}, key="k")
        doing.keep([replace(later, message=other)], renews=True)
        assert ids_of(doing.take(9, 1, queue=RETRIES)) == ["second"]
        clock.advance(51)
        found = doing.take(9, HOLD_S, queue=RETRIES)
        assert ids_of(found) == ["first", "second"]
        assert (found[0].attempts, found[0].error, found[0].message) == (2, "no", other)
        aside = replace(found[0], is_set_aside=True, reason="given up", error="trace", delay_s=0.0)
        doing.keep([aside], renews=True)
        clock.advance(HOLD_S + 1)
        assert ids_of(doing.take(9, HOLD_S, queue=RETRIES)) == ["second"]
        [letter] = doing.store.listed(Listing(RETRIES, is_set_aside=True))
        assert (letter.reason, letter.error, letter.number) == (
            "given up",
            "trace",
            found[0].number,
        )

    def test_many_anew(self, doing: Doing) -> None:
        """Many are kept anew together, those that are there already and others."""
        doing.keep([retry("there")])
        anew = [retry("there"), retry("other"), retry("third", "other")]
        doing.keep([replace(each, error=f"no {each.id}") for each in anew], renews=True)
        found = doing.store.listed(Listing("retry/*", is_set_aside=False))
        assert [each.error for each in found] == ["no there", "no other", "no third"]

    def test_times(self, doing: Doing, clock: AdvancingClock) -> None:
        """It is known when a message was kept first and last, and when it is due."""
        doing.keep([replace(retry("a"), delay_s=10.0)])
        [first] = doing.store.listed(Listing(RETRIES, is_set_aside=False))
        clock.advance(20)
        doing.keep([replace(retry("a"), delay_s=30.0)], renews=True)
        [again] = doing.store.listed(Listing(RETRIES, is_set_aside=False))
        assert (first.since, first.last_seen, first.due) != (None, None, None)
        assert first.since is not None
        assert first.since == again.since == pytest.approx(first.last_seen, abs=1)
        assert again.last_seen == pytest.approx(first.since + 20, abs=1)
        assert first.due == pytest.approx(first.since + 10, abs=1)
        assert again.due == pytest.approx(first.since + 50, abs=1)

    def test_one_per_lane(self, doing: Doing) -> None:
        """Who asks for that is given the first of each lane, and the next when that is gone."""
        doing.keep([retry(f"{lane}{n}", lane=lane) for n in (1, 2) for lane in "ab"])
        first = doing.take(9, HOLD_S, queue=RETRIES, one_per_lane=True)
        assert ids_of(first) == ["a1", "b1"]
        assert doing.take(9, HOLD_S, queue=RETRIES, one_per_lane=True) == []
        doing.remove(first[:1])
        assert ids_of(doing.take(9, HOLD_S, queue=RETRIES, one_per_lane=True)) == ["a2"]

    def test_lanes_with_any(self, doing: Doing) -> None:
        """It is told in which lanes any wait: held or not, but for those that are set aside."""
        doing.keep([retry("1", lane="a"), retry("2", lane="b"), retry("3", lane="c")])
        held, aside, _ = doing.take(9, HOLD_S, queue=RETRIES)
        doing.put_back([PutBack(aside, "no", None)])
        assert doing.lanes(RETRIES, {held.lane, aside.lane, "none"}) == {held.lane}
        assert doing.lanes(RETRIES, set()) == set()

    def test_put_back_without_a_try(self, doing: Doing, clock: AdvancingClock) -> None:
        """A message put back through no fault of its own keeps its attempts, and its error."""
        doing.keep([replace(retry("a"), attempts=3, error="before")])
        [taken] = doing.take(9, HOLD_S, queue=RETRIES)
        doing.put_back([PutBack(taken, None, 5.0, is_try=False)])
        assert doing.take(9, HOLD_S, queue=RETRIES) == []
        clock.advance(6)
        [again] = doing.take(9, HOLD_S, queue=RETRIES)
        assert (again.attempts, again.error) == (3, "before")

    def test_free(self, doing: Doing) -> None:
        """A set-aside, held or delayed message can be made due at once, also with other content."""
        doing.keep([retry("a"), replace(retry("b"), delay_s=99.0)])
        [held] = doing.take(9, HOLD_S, queue=RETRIES)
        doing.put_back([PutBack(held, "no", None)])
        waiting = [*doing.waiting([held.parent, key_of("b")])]
        edited = Message("own", b"edited", "t", {"h": "v"}, "source", None, "text/plain", "k")
        doing.free([replace(waiting[0], id="own", message=edited), waiting[1]])
        first, second = doing.take(9, HOLD_S, queue=RETRIES)
        assert (first.message, first.attempts, first.is_set_aside) == (edited, 0, False)
        assert second.id == "b"

    def test_rename(self, doing: Doing) -> None:
        """A message with a new name leaves room under its old one, and is the same otherwise."""
        doing.keep([deferred("m"), deferred("n", position=1)])
        first, other = doing.waiting([PARENT])
        doing.rename([replace(first, name="new"), replace(other, number=1_000_000, name="gone")])
        doing.keep([deferred("m", position=2)])
        renamed, _, added = doing.waiting([PARENT])
        assert renamed == replace(first, name="new")
        assert replace(added, number=None) == deferred("m", position=2)
        doing.remove([renamed])
        doing.keep([replace(first, number=None, name="new")])
        assert len(doing.waiting([PARENT])) == 3

    def test_free_in(self, doing: Doing, clock: AdvancingClock) -> None:
        """It is told in how long the next can be taken."""
        assert doing.store.free_in_s(RETRIES) is None
        doing.keep([replace(retry("a"), delay_s=20.0), replace(retry("b"), delay_s=30.0)])
        assert doing.store.free_in_s(RETRIES) == pytest.approx(20, abs=1)
        clock.advance(21)
        assert doing.store.free_in_s(RETRIES) == 0
        [taken] = doing.take(9, HOLD_S, queue=RETRIES)
        assert doing.store.free_in_s(RETRIES) == pytest.approx(9, abs=1)
        doing.put_back([PutBack(taken, "no", None)])
        doing.remove(doing.waiting([key_of("b")]))
        assert doing.store.free_in_s(RETRIES) is None

    def test_listed(self, doing: Doing) -> None:
        """Waiting messages are read page by page, of one queue or of a prefix of names: those that
        can be taken first.
        """
        delays = (20.0, 0.0, 10.0, 0.0)
        rows = [replace(retry(str(n), "ab"[n % 2]), delay_s=delays[n % 4]) for n in range(500)]
        doing.keep(rows)
        doing.keep([deferred("sent"), retry("c", "c")])
        for limit, with_bodies in ((250, True), (1_000, True), (1_000, False)):
            each = Listing("retry/*", is_set_aside=False, limit=limit, with_bodies=with_bodies)
            by_delay = sorted([*rows, retry("c", "c")], key=lambda row: row.delay_s)
            assert ids_of([*doing.store.listed(each)]) == ids_of(by_delay[:limit])
        of_a = doing.store.listed(Listing(retries_of("a"), is_set_aside=False, limit=3))
        assert ids_of([*of_a]) == ["2", "6", "10"]
        assert [*doing.store.listed(Listing(retries_of("*"), is_set_aside=True))] == []

    def test_listed_letters(self, doing: Doing) -> None:
        """What is set aside is listed in its order, however it came to be set aside."""
        doing.keep([retry(str(n)) for n in range(4)])
        doing.keep([replace(retry("4"), is_set_aside=True)])
        taken = doing.take(9, HOLD_S, queue=RETRIES)
        doing.put_back([PutBack(each, "no", None) for each in reversed(taken)])
        found = doing.store.listed(Listing(RETRIES, is_set_aside=True))
        assert ids_of([*found]) == ["0", "1", "2", "3", "4"]

    def test_longest_delay(self, doing: Doing) -> None:
        """The longest delay that can be written is stored: a thousand years."""
        longest_s = seconds("366000d")
        doing.keep([retry("put back"), replace(retry("kept"), delay_s=longest_s)])
        [taken] = doing.take(9, HOLD_S, queue=RETRIES)
        doing.put_back([PutBack(taken, "no", longest_s)])
        dues = [each.due or 0 for each in doing.store.listed(Listing(RETRIES, is_set_aside=False))]
        in_s = [due - doing.store.load([]).now for due in dues]
        assert in_s == pytest.approx([longest_s] * 2, abs=10)
        assert doing.take(9, HOLD_S, queue=RETRIES) == []

    def test_listed_without_bodies(self, doing: Doing) -> None:
        """A list that needs no bodies has all else; the messages keep theirs."""
        doing.keep([deferred("m", body=b"large")])
        [whole] = doing.store.listed(Listing(OUTBOX, is_set_aside=False))
        [seen] = doing.store.listed(Listing(OUTBOX, is_set_aside=False, with_bodies=False))
        assert whole.message.body == b"large"
        assert seen == replace(whole, message=replace(whole.message, body=b""))
        assert [*doing.store.listed(Listing(OUTBOX, is_set_aside=False))] == [whole]

    def test_bindings(self, doing: Doing) -> None:
        """What a queue is bound to is known by each of its names; to repeat it changes nothing."""
        store: Any = doing.store
        names = [name for name in DISTINCT_IDS if len(name) < 100]
        for _ in range(2):
            store.bind("in", names)
            for name in names:
                store.bind(name, ["order.*", ""])
        bound = {(name, topic) for name in names for topic in ("order.*", "")}
        of_in = {("in", name) for name in names}
        assert store.bindings() == sorted(bound | of_in)
        assert store.bindings("in") == sorted(of_in)

    def test_numbered(self, doing: Doing) -> None:
        """Messages are found by their numbers, as far as they are there."""
        doing.keep([retry("a"), retry("b")])
        first, second = doing.take(9, HOLD_S, queue=RETRIES)
        doing.remove([first])
        numbers = [first.number, second.number]
        assert ids_of(doing.numbered(numbers)) == ["b"]
        assert doing.numbered([]) == []

    # ---- What was taken with a count -----------------------------------------------------------

    def test_take_counts(self, doing: Doing, clock: AdvancingClock) -> None:
        """Where that is asked, each taking is one more attempt, which what is taken has."""
        doing.keep([deferred("1")])
        for attempts in (1, 2, 3):
            [taken] = doing.take(9, HOLD_S, counts=True)
            [found] = doing.waiting([PARENT])
            assert taken.attempts == found.attempts == attempts
            clock.advance(HOLD_S)
        [taken] = doing.take(9, HOLD_S)
        assert taken.attempts == 3

    def test_held(self, doing: Doing, clock: AdvancingClock) -> None:
        """A message is held until its holder releases it, or another worker is given it."""
        doing.keep([deferred("1")])
        [first] = doing.take(9, HOLD_S, counts=True)
        assert doing.held([first]) == {first.number}
        doing.put_back([PutBack(first, None, 0, is_try=False)])
        assert doing.held([first]) == set()
        [second] = doing.take(9, HOLD_S, counts=True)
        assert doing.held([first, second]) == {second.number}
        clock.advance(HOLD_S)
        [third] = doing.take(9, HOLD_S, counts=True)
        assert doing.remove_held([second]) == set()
        assert doing.remove_held([second, third]) == {third.number}
        assert doing.held([third]) == doing.remove_held([third]) == set()
        assert doing.waiting([PARENT]) == []

    def test_moved_is_not_held(self, doing: Doing) -> None:
        """A message moved to another queue is taken there; its former holder holds it no more."""
        doing.keep([deferred("1", key="k"), deferred("2", key="k", position=1)])
        [first] = doing.take(1, HOLD_S, counts=True)
        doing.free([replace(first, queue="queue/dead", lane=first.name)])
        assert ids_of(doing.take(9, HOLD_S)) == ["2"]
        [moved] = doing.take(9, HOLD_S, queue="queue/dead", counts=True)
        assert (moved.id, moved.attempts) == ("1", 1)
        assert doing.remove_held([first]) == set()
        assert doing.remove_held([moved]) == {moved.number}

    # ---- Waiting -------------------------------------------------------------------------------

    def test_wait_is_ended_by_deferring(self, doing: Doing) -> None:
        """Whoever waits is told what is deferred while it waits, and what was since it waited; a
        wait for which nothing comes ends by itself.
        """
        _wait_until_quiet(doing.store)
        woken = threading.Event()

        def wait() -> None:
            doing.store.wait_for_messages(10 * LIMIT_S)
            woken.set()

        for name in ("while it waits", "before it waits"):
            if name == "before it waits":
                doing.keep([deferred(name)])
            waiter = threading.Thread(target=wait, daemon=True)
            waiter.start()
            if name == "while it waits":
                doing.keep([deferred(name)])
            assert woken.wait(LIMIT_S), name
            woken.clear()
            waiter.join(LIMIT_S)


RETRIES = retries_of("billing")


def retry(message_id: str, consumer: str = "billing", *, lane: str = "") -> WaitingMessage:
    """A message as it waits to be tried again."""
    return _waiting(retries_of(consumer), Key(consumer, message_id), lane)


def queued(message_id: str) -> WaitingMessage:
    """A message as it waits in a queue."""
    return _waiting(queue_named("in"), Key(queue_named("in"), message_id), "")


def _waiting(queue: str, parent: Key, lane: str) -> WaitingMessage:
    message = Message(parent.message_id, b"{}")
    return WaitingMessage(
        message.id,
        "",
        message,
        parent,
        queue=queue,
        name=retry_name(queue),
        lane=digest(queue, lane or parent.message_id),
    )


def _names(messages: Sequence[WaitingMessage]) -> list[tuple[str, str]]:
    return [(message.id, message.parent.message_id) for message in messages]


def _check_backlog(doing: Doing, waiting: int, set_aside: int, lag_s: float) -> None:
    backlog = doing.backlog()
    assert (backlog.waiting, backlog.set_aside) == (waiting, set_aside)
    assert backlog.lag_s == pytest.approx(lag_s, abs=1)


def _wait_until_quiet(store: Store) -> None:
    """What was deferred before is told by the first waits; the others end by themselves."""
    for _ in range(3):
        store.wait_for_messages(0.01)
