"""Reading all records of a store."""

from itertools import product

import pytest
from tests.conformance.values import DISTINCT_IDS
from tests.records import LEASE_S, Swap, fresh, insert, swap

from oncely.core.record import Key, Record, State
from oncely.stores.store import KeyRange, Look, Query, Store, Wanted, Window
from oncely.testing.tools import AdvancingClock

_MANY = 1_100


class ReadStatements:
    """Reading by ranges of keys, page by page, and window by window."""

    has_order_of_ids = True
    """False where windows have an order of their own."""

    def test_key_ranges_hold_every_key(self, store: Store) -> None:
        """Ranges of keys together give every record once, whatever the order of the keys."""
        keys = [Key(name, id_) for id_ in DISTINCT_IDS for name in ("billing", "other")]
        insert(store, [fresh(*reversed(key)) for key in keys])
        for number in (1, 3, 50):
            ranges = store.key_ranges(number)
            assert 1 <= len(ranges) <= number
            found = [key for part in ranges for key in _keys(store, part)]
            assert sorted(found) == sorted(keys)

    def test_key_ranges_of_nothing(self, store: Store) -> None:
        """An empty ledger has a range with nothing in it."""
        assert [_keys(store, part) for part in store.key_ranges(8)] == [[]]

    def test_read_takes_many_pages(self, store: Store) -> None:
        """More records than a page holds are read, each once, in every range of several; also
        where a page ends between the consumers of one id.
        """
        ids = [str(number) for number in range(_MANY)]
        insert(store, [fresh(id_, name) for id_ in ids for name in ("billing", "other", "third")])
        parts = [_keys(store, part) for part in store.key_ranges(2)]
        found = [key for part in parts for key in part]
        assert len(set(found)) == len(found) == 3 * _MANY
        # A database that samples does not make them equal.
        assert len(parts) == 1 or all(parts)

    def test_read_filters(self, store: Store) -> None:
        """Every field of the filter counts, and all fields that are set must match."""
        insert(store, [fresh("1"), fresh("2"), fresh("3", "other"), fresh("a*b"), fresh("aab")])
        failed = fresh("4")
        insert(store, [failed])
        stored = store.load([failed.key]).records[failed.key]
        swap(store, [Swap(stored, stored._replace(state=State.FAILED, version=stored.version + 1))])
        for wanted, ids in (
            (Wanted(), ["1", "2", "3", "4", "a*b", "aab"]),
            (Wanted(consumers=["other"]), ["3"]),
            (Wanted(states=[State.FAILED]), ["4"]),
            (Wanted(states=[]), []),
            (Wanted(consumers=[]), []),
            (Wanted(seen_from=stored.last_seen - 3_600, states=[State.FAILED]), ["4"]),
            (Wanted(seen_from=stored.last_seen + 3_600), []),
            (Wanted(seen_before=stored.last_seen - 3_600), []),
            (Wanted(["other"], seen_before=stored.last_seen + 3_600), ["3"]),
        ):
            assert sorted(key.message_id for key in _keys(store, wanted=wanted)) == ids

    def test_read_takes_names_as_they_are(self, store: Store) -> None:
        """A consumer's name with the characters of a pattern finds only its own records."""
        names = ["a*", "ab", "a?", "[ab]", "a\\", "^a-", "7:a"]
        insert(store, [fresh("1", name) for name in names])
        for name in names:
            assert _keys(store, wanted=Wanted([name])) == [Key(name, "1")]

    # ---- Windows -------------------------------------------------------------------------------

    def test_windows_give_every_record(self, store: Store) -> None:
        """Window after window gives every record once, in the order of the ids, and looks at no
        more than it was told to, but for the records of one id.
        """
        names = ("billing", "other")
        keys = [Key(name, id_) for id_ in DISTINCT_IDS for name in names]
        insert(store, [fresh(*reversed(key)) for key in keys])
        for size in (1, 2, 7, 1_000):
            windows = _windows(store, Look([Query()], size=size))
            found = [key for window in windows for key in window.keys]
            assert sorted(found) == sorted(keys)
            assert sum(window.looked_at for window in windows) == len(keys)
            if self.has_order_of_ids:
                assert found == sorted(keys, key=lambda key: (key.message_id, key.consumer))
                assert max(window.looked_at for window in windows) < size + len(names)

    def test_windows_end_at_the_limit(self, store: Store) -> None:
        """A window ends where it has found enough; the records of one id stay together; and the
        next one goes on there, so that none is left out.
        """
        keys = [Key(name, f"{n:02}") for n in range(20) for name in ("a", "b", "c")]
        insert(store, [fresh(key.message_id, key.consumer) for key in keys])
        for state, limit in product((None, State.PROCESSING), (1, 2, 5)):
            sought = Look([Query("a", state), Query("b", state)], limit=limit)
            windows = _windows(store, sought)
            found = [key for window in windows for key in window.keys]
            assert sorted(found) == sorted(key for key in keys if key.consumer != "c")
            assert max(len(window.keys) for window in windows) <= limit + 1
            if self.has_order_of_ids:
                assert {len(window.keys) % 2 for window in windows} == {0}

    def test_windows_filter(self, store: Store, clock: AdvancingClock) -> None:
        """Every field of a query counts; a record may fit any of several."""
        insert(store, [fresh(id_) for id_ in ("1", "2", "3", "4")])
        insert(store, [fresh("5", "other")])
        clock.advance(LEASE_S + 1)
        _change(store, "2", state=State.FAILED, lease_until=None, attempts=0)
        _change(store, "3", state=State.FAILED, lease_until=None, exhausted=True)
        _change(store, "4", state=State.COMPLETED, lease_until=None)
        insert(store, [fresh("a%b"), fresh("aXb")])
        for fits, ids in (
            ([Query()], ["1", "2", "3", "4", "5", "aXb", "a%b"]),
            ([Query(consumer="other")], ["5"]),
            ([Query(consumer="nobody")], []),
            ([Query(state=State.COMPLETED)], ["4"]),
            ([Query(state=State.FAILED)], ["2", "3"]),
            ([Query(state=State.FAILED, exhausted=True)], ["3"]),
            ([Query(state=State.FAILED, waits_for_sender=True)], ["2"]),
            ([Query(state=State.PROCESSING, lease_over=True)], ["1", "5"]),
            ([Query(older_than_s=5)], ["1", "5"]),
            ([Query(text="%")], ["a%b"]),
            ([Query(state=State.FAILED, text="3")], ["3"]),
            ([Query("other", State.PROCESSING), Query("other", State.FAILED)], ["5"]),
            ([Query(state=State.FAILED), Query(state=State.COMPLETED)], ["2", "3", "4"]),
        ):
            for size in (1, 1_000):
                windows = _windows(store, Look(fits, size=size))
                found = [key.message_id for window in windows for key in window.keys]
                assert sorted(found) == sorted(ids), (fits, size)

    def test_windows_of_a_beginning(self, store: Store) -> None:
        """Only ids that begin with the text are looked at; no letter of it is a pattern."""
        ids = (
            *("a", "a%", "a%b", "a\U0010ffff", "aa", "ab", "A%", "b"),
            *("é", "éa", "🧾", "🧾1", "x" * 255),
        )
        insert(store, [fresh(id_) for id_ in ids])
        begins = ("", "a", "a%", "aa", "A", "é", "🧾", "🧾1", "x" * 255, "y")
        for state, text in product((None, State.PROCESSING), begins):
            windows = _windows(store, Look([Query(state=state)], text, size=2))
            found = [key.message_id for window in windows for key in window.keys]
            assert sorted(found) == sorted(id_ for id_ in ids if id_.startswith(text)), text

    def test_kinds_of_failed_records(self, store: Store) -> None:
        """Scan tells those that have failed permanently, and those that wait for their sender, from
        the others that failed; the latter are counted.
        """
        insert(store, [fresh(id_) for id_ in ("1", "2", "3", "4")])
        _change(store, "1", state=State.FAILED, lease_until=None)
        _change(store, "2", state=State.FAILED, lease_until=None, exhausted=True, attempts=0)
        _change(store, "3", state=State.FAILED, lease_until=None, attempts=0)
        _change(store, "4", state=State.FAILED, attempts=0)
        for query, id_ in (
            (Query(state=State.FAILED, exhausted=True), "2"),
            (Query(state=State.FAILED, waits_for_sender=True), "3"),
        ):
            found = store.scan(query)
            assert [record.key.message_id for record in found] == [id_]
        [tally] = store.tallies().values()
        seen = store.scan(Query(waits_for_sender=True))[0].last_seen
        assert tally.for_sender == 1
        assert tally.for_sender_since == pytest.approx(seen, abs=0.001)


def _windows(store: Store, look: Look) -> list[Window]:
    """Every window, up to the last one."""
    windows = [store.window(look)]
    while (end := windows[-1].end) is not None:
        windows.append(store.window(look._replace(after=end)))
    return windows


def _change(store: Store, message_id: str, **fields: object) -> None:
    key = Key("billing", message_id)
    stored: Record = store.load([key]).records[key]
    new = stored._replace(version=stored.version + 1, **fields)  # type: ignore[arg-type]
    swap(store, [Swap(stored, new)])


def _keys(store: Store, part: KeyRange = KeyRange(), wanted: Wanted = Wanted()) -> list[Key]:
    return [record.key for page in store.read(part, wanted) for record in page]
