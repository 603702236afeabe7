# ruff: noqa: S101 - asserts are what a conformance suite is made of.
"""What a store has to do when all of its records are read."""

from collections.abc import Sequence

import pytest

from oncely.core.record import Key, State
from oncely.stores.store import Change, KeyRange, Store, Wanted
from oncely.testing.doing import fresh

_MANY = 1_100


class ReadConformance:
    """Reading by ranges of keys, page by page. A part of StoreConformance, on its fixtures."""

    @pytest.mark.parametrize("number", [1, 3, 50])
    def test_key_ranges_hold_every_key(
        self, store: Store, distinct_ids: Sequence[str], number: int
    ) -> None:
        """Ranges of keys together give every record once, whatever the order of the keys."""
        keys = [Key(name, id_) for id_ in distinct_ids for name in ("billing", "other")]
        store.insert([fresh(*reversed(key)) for key in keys])
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
        store.insert([fresh(id_, name) for id_ in ids for name in ("billing", "other", "third")])
        parts = [_keys(store, part) for part in store.key_ranges(2)]
        found = [key for part in parts for key in part]
        assert len(set(found)) == len(found) == 3 * _MANY
        assert len(parts) == 1 or max(len(part) for part in parts) < 0.8 * len(found)

    def test_read_filters(self, store: Store) -> None:
        """Every field of what is wanted counts, and all that are set must fit."""
        store.insert([fresh("1"), fresh("2"), fresh("3", "other"), fresh("a*b"), fresh("aab")])
        failed = fresh("4")
        store.insert([failed])
        stored = store.load([failed.key]).records[failed.key]
        store.swap(
            [Change(stored, stored._replace(state=State.FAILED, version=stored.version + 1))]
        )
        for wanted, ids in (
            (Wanted(), ["1", "2", "3", "4", "a*b", "aab"]),
            (Wanted(consumers=["other"]), ["3"]),
            (Wanted(states=[State.FAILED]), ["4"]),
            (Wanted(states=[]), []),
            (Wanted(consumers=[]), []),
        ):
            assert sorted(key.message_id for key in _keys(store, wanted=wanted)) == ids

    def test_read_takes_names_as_they_are(self, store: Store) -> None:
        """A consumer's name that holds signs of a pattern finds its own records alone."""
        names = ["a*", "ab", "a?", "[ab]", "a\\", "^a-", "7:a"]
        store.insert([fresh("1", name) for name in names])
        for name in names:
            assert _keys(store, wanted=Wanted([name])) == [Key(name, "1")]


def _keys(store: Store, part: KeyRange = KeyRange(), wanted: Wanted = Wanted()) -> list[Key]:
    return [record.key for page in store.read(part, wanted) for record in page]
