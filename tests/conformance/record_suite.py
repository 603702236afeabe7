"""Records of a store, statement by statement."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from tests.conformance.values import DISTINCT_IDS, JSON_VALUES
from tests.records import LEASE_S, Swap, fresh, insert, swap

from oncely.core.cases import Case
from oncely.core.change import Change
from oncely.core.commands import Acquire
from oncely.core.policy import Policy
from oncely.core.record import Key, Record, State
from oncely.core.rules import first_change
from oncely.stores.store import Query, Store, Tally
from oncely.testing.tools import AdvancingClock


class RecordStatements:
    """Records: inserted, loaded, swapped, scanned, counted, purged."""

    metadata_is_exact = True
    """False where the database's own JSON makes a large float an integer."""

    # ---- insert ----------------------------------------------------------------------------------

    def test_insert_of_nothing(self, store: Store) -> None:
        """To insert nothing writes nothing."""
        assert insert(store, []) == set()
        assert store.tallies() == {}

    def test_insert_keeps_every_field(self, store: Store) -> None:
        """An inserted record is read back, with the store's clock added to its times."""
        record = fresh("1", fingerprint="f" * 64, metadata={"tenant": "a"}, version=2**63 - 1)
        insert(store, [record])
        now = store.load(()).now
        assert _untimed(stored(store, record.key)) == _untimed(record)
        assert _times(stored(store, record.key)) == pytest.approx((now, now, now + LEASE_S), abs=1)

    # ---- load ------------------------------------------------------------------------------------

    def test_load_of_many(self, store: Store) -> None:
        """Thousands of keys can be written and loaded at once."""
        records = [fresh(str(n)) for n in range(3_000)]
        assert len(insert(store, records)) == 3_000
        assert set(store.load([r.key for r in records]).records) == {r.key for r in records}

    def test_load_tells_the_time(self, store: Store, clock: AdvancingClock) -> None:
        """Load tells the store's clock, also when no key is asked for."""
        before = store.load(()).now
        clock.advance(3_600)
        assert store.load(()).now == pytest.approx(before + 3_600, abs=1)

    # ---- swap ------------------------------------------------------------------------------------

    @pytest.mark.parametrize("step", [0, 2])
    @pytest.mark.parametrize("there", [None, 42])
    def test_a_case(self, store: Store, step: int, there: int | None) -> None:
        """A change that is the same for many records is inserted where none is there, and written
        where the version is still the believed one; what it keeps stays.
        """
        keys = [fresh(str(n)).key for n in range(200)]
        versions = [(7 + step * n) << 24 for n in range(200)]
        first = first_change(Acquire(keys[0], Policy(), LEASE_S, 7, "f", {"tenant": "a"}))
        if there is not None:
            insert(store, [fresh(str(there), attempts=9, version=3 << 24)])
        others = {key for n, key in enumerate(keys) if n != there}
        rows = [(key, None, version) for key, version in zip(keys, versions, strict=True)]
        assert store.insert(Case(first, (), rows)) == others
        failed = Change(0, {"state": State.FAILED, "attempts": 2, "lease_s": None})
        next_ = [(key, n, n + 1) for key, n in zip(keys, versions, strict=True)]
        assert store.update(Case(failed, (), next_)) == others
        found = store.load(keys).records
        assert [(found[key].attempts, found[key].version) for key in keys] == [
            (9, 3 << 24) if n == there else (2, version + 1) for n, version in enumerate(versions)
        ]
        kept = found[keys[1]]
        assert (kept.fingerprint, kept.metadata, kept.fence) == ("f", {"tenant": "a"}, 1)

    def test_swap_compares_the_version_alone(self, store: Store) -> None:
        """Swap compares the version and nothing else: the holder knows no more for sure."""
        there = inserted(store, "1")
        believed = fresh("1", fence=77, attempts=77, lease_until=5.0, version=there.version)
        new = fresh("1", fence=2, version=there.version + 1)
        assert swap(store, [Swap(believed, new)]) == {there.key}
        assert stored(store, there.key).fence == 2

    def test_swap_keeps_every_field(self, store: Store) -> None:
        """A swapped record is read back, field by field."""
        old = inserted(store, "1")
        new = old._replace(
            state=State.FAILED,
            attempts=3,
            fence=4,
            version=2**63 - 1,
            metadata={"error": "no"},
            result=[1],
            fingerprint="f" * 64,
            exhausted=True,
            duplicates=5,
            lease_until=None,
        )
        swap(store, [Swap(old, new)])
        assert _untimed(stored(store, old.key)) == _untimed(new)

    def test_swap_renews_the_times(self, store: Store, clock: AdvancingClock) -> None:
        """A swap moves last_seen, counts the lease from now, and never touches first_seen."""
        old = inserted(store, "1")
        clock.advance(100)
        new = old._replace(lease_until=LEASE_S, first_seen=0.0, version=old.version + 1)
        swap(store, [Swap(old, new)])
        now = store.load(()).now
        expected = (old.first_seen, now, now + LEASE_S)
        assert _times(stored(store, old.key)) == pytest.approx(expected, abs=1)

    def test_swap_removes(self, store: Store) -> None:
        """A swap to None removes the record where it is unchanged, and only there."""
        one, two = inserted(store, "1"), inserted(store, "2")
        stale = two._replace(version=two.version - 1)
        assert swap(store, [Swap(one, None), Swap(stale, None)]) == {one.key}
        assert set(store.load([one.key, two.key]).records) == {two.key}

    def test_swap_of_what_is_gone(self, store: Store) -> None:
        """A swap of a record that is not there writes nothing."""
        gone = fresh("1")
        assert swap(store, [Swap(gone, gone._replace(version=gone.version + 1))]) == set()
        assert swap(store, [Swap(gone, None)]) == set()
        assert store.load([gone.key]).records == {}

    # ---- What is kept ----------------------------------------------------------------------------

    def test_ids_stay_distinct(self, store: Store) -> None:
        """Ids that look alike are different messages, and come back as they were written; where a
        consumer ends and a message id begins is never in question.
        """
        keys = [Key("billing", message_id) for message_id in DISTINCT_IDS]
        keys += [Key("a", "b:c"), Key("a:b", "c"), Key("a b", "c"), Key("a", "b c")]
        records = [
            fresh(key.message_id, consumer=key.consumer, version=n) for n, key in enumerate(keys)
        ]
        assert insert(store, records) == set(keys)
        found = store.load(keys).records
        assert {key: found[key].version for key in keys} == {k: n for n, k in enumerate(keys)}
        assert {record.key for record in store.scan(Query(limit=1_000))} == set(keys)

    def test_consumers_stay_distinct(self, store: Store) -> None:
        """The same holds for the names of consumers, in loads, scans and counts."""
        insert(store, [fresh("1", consumer=name) for name in DISTINCT_IDS])
        counts = {name: tally.count for name, tally in store.tallies().items()}
        assert counts == {(name, State.PROCESSING): 1 for name in DISTINCT_IDS}
        for name in DISTINCT_IDS:
            [record] = store.scan(Query(consumer=name))
            assert record.key == Key(name, "1")

    def test_json_comes_back_equal(self, store: Store) -> None:
        """Results come back equal and of the same type; metadata too, as the database's JSON."""
        olds = [
            inserted(store, str(n), metadata={"value": value})
            for n, value in enumerate(JSON_VALUES)
        ]
        news = [
            old._replace(result=value, version=old.version + 1)
            for old, value in zip(olds, JSON_VALUES, strict=True)
        ]
        swap(store, [Swap(*pair) for pair in zip(olds, news, strict=True)])
        for new in news:
            found, value = stored(store, new.key), new.result
            assert (found.result, type(found.result)) == (value, type(value))
            kept = (found.metadata or {})["value"]
            is_exact = self.metadata_is_exact or not isinstance(value, float)
            assert kept == (value if is_exact else pytest.approx(value))

    # ---- scan, counts, purge ---------------------------------------------------------------------

    def test_scan_orders(self, store: Store, clock: AdvancingClock) -> None:
        """Scan gives what was unseen longest first, and at most the limit."""
        for name in ("1", "2", "3"):
            inserted(store, name)
            clock.advance(10)
        first = stored(store, Key("billing", "1"))
        swap(store, [Swap(first, first._replace(version=first.version + 1))])
        assert _ids(store.scan(Query())) == ["2", "3", "1"]
        assert _ids(store.scan(Query(limit=2))) == ["2", "3"]

    def test_scan_filters(self, store: Store, clock: AdvancingClock) -> None:
        """Scan gives what fits every field of the query that is set."""
        failed(store, "1")
        inserted(store, "2")
        insert(store, [fresh("3", consumer="mailing")])
        clock.advance(10)
        failed(store, "4")
        assert set(_ids(store.scan(Query(consumer="billing")))) == {"1", "2", "4"}
        assert _ids(store.scan(Query(state=State.FAILED))) == ["1", "4"]
        assert set(_ids(store.scan(Query(older_than_s=5)))) == {"1", "2", "3"}
        assert _ids(store.scan(Query("billing", State.FAILED, 5))) == ["1"]
        assert store.scan(Query(consumer="nobody")) == []

    def test_scan_finds_text(self, store: Store) -> None:
        """Scan finds what stands in the message id; no letter of it is a pattern."""
        for name in ("a%b", "a_b", "aXb", "AXB", "a\\b", "a*b", "a[b", "ä"):
            inserted(store, name)
        assert _ids(store.scan(Query(text="aXb"))) == ["aXb"]
        for letter in ("%", "_", "\\", "*", "[", "ä", "A"):
            assert [letter in name for name in _ids(store.scan(Query(text=letter)))] == [True]
        assert len(store.scan(Query(text=""))) == 8

    def test_scan_finds_leases_that_are_over(self, store: Store, clock: AdvancingClock) -> None:
        """Scan finds those whose lease has run out; a lease without end never does."""
        inserted(store, "1")
        insert(store, [fresh("2", lease_until=None), fresh("3", lease_until=10 * LEASE_S)])
        assert store.scan(Query(lease_over=True)) == []
        clock.advance(LEASE_S + 1)
        assert _ids(store.scan(Query(lease_over=True))) == ["1"]

    def test_records_of_a_message(self, store: Store) -> None:
        """Those of every consumer that has one, and of no other message."""
        for consumer in ("mailing", "billing"):
            insert(store, [fresh("1", consumer=consumer), fresh("11", consumer=consumer)])
        keys = [record.key for record in store.of_message("1")]
        assert keys == [Key("billing", "1"), Key("mailing", "1")]
        assert store.of_message("2") == []

    def test_counts(self, store: Store) -> None:
        """Tallies counts each consumer's records in each state."""
        failed(store, "1")
        for name in ("2", "3"):
            inserted(store, name)
        insert(store, [fresh("1", consumer="mailing")])
        assert {name: tally.count for name, tally in store.tallies().items()} == {
            ("billing", State.FAILED): 1,
            ("billing", State.PROCESSING): 2,
            ("mailing", State.PROCESSING): 1,
        }

    def test_tallies_add_up(self, store: Store, clock: AdvancingClock) -> None:
        """Tallies tells the least recently seen, how many leases are over, and all duplicates."""
        first = inserted(store, "1")
        clock.advance(LEASE_S + 1)
        for name in ("2", "3"):
            old = inserted(store, name)
            swap(store, [Swap(old, old._replace(duplicates=4, version=old.version + 1))])
        [tally] = store.tallies().values()
        assert replace(tally, oldest=0.0, over_since=None) == Tally(3, 1, 0.0, 8)
        assert tally.oldest == pytest.approx(first.last_seen, abs=0.001)
        assert tally.over_since == pytest.approx(first.lease_until, abs=0.001)
        swap(store, [Swap(stored(store, Key("billing", "2")), None)])
        assert [tally.duplicates for tally in store.tallies().values()] == [4]

    def test_size(self, store: Store) -> None:
        """The size is a number of bytes, where the store can tell."""
        inserted(store, "1")
        size = store.size()
        assert size is None or size > 0

    def test_purge_in_batches(self, store: Store, clock: AdvancingClock) -> None:
        """Purge removes at most the limit at a time, and says how many."""
        for n in range(5):
            failed(store, str(n))
        clock.advance(100)
        query = Query(older_than_s=50, limit=2)
        assert [store.purge(query, [State.FAILED]) for _ in range(4)] == [2, 2, 1, 0]
        assert store.tallies() == {}

    def test_purge_leaves_the_rest(self, store: Store, clock: AdvancingClock) -> None:
        """Purge never removes another state, another consumer, or what was seen later."""
        failed(store, "old")
        inserted(store, "other-state")
        failed(store, "other-consumer", "mailing")
        clock.advance(100)
        failed(store, "new")
        assert store.purge(Query("billing", older_than_s=50), [State.FAILED]) == 1
        assert set(_ids(store.scan(Query()))) == {"other-state", "other-consumer", "new"}

    # ---- close -----------------------------------------------------------------------------------

    def test_close_then_use(self, store: Store) -> None:
        """A call after close opens the store again."""
        record = inserted(store, "1")
        store.close()
        store.close()
        assert stored(store, record.key) == record


def inserted(store: Store, message_id: str, **fields: Any) -> Record:
    """A fresh record, as it is stored."""
    record = fresh(message_id, **fields)
    insert(store, [record])
    return stored(store, record.key)


def failed(store: Store, message_id: str, consumer: str = "billing") -> None:
    """Store a record that has failed."""
    old = inserted(store, message_id, consumer=consumer)
    new = old._replace(state=State.FAILED, lease_until=None, version=old.version + 1)
    swap(store, [Swap(old, new)])


def stored(store: Store, key: Key) -> Record:
    """The record of a key."""
    return store.load([key]).records[key]


def _times(record: Record) -> tuple[float, float, float | None]:
    return record.first_seen, record.last_seen, record.lease_until


def _untimed(record: Record) -> Record:
    return record._replace(first_seen=0.0, last_seen=0.0, lease_until=None)


def _ids(records: Sequence[Record]) -> list[str]:
    return [record.key.message_id for record in records]
