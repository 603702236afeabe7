"""The horizons, up to which a ledger may have forgotten messages."""

from contextlib import closing
from itertools import count

import pytest
from tests.meddling import MeddlingStore
from tests.records import fresh, granted, insert

from oncely.core.commands import Duplicate, Granted, TooOld
from oncely.core.record import Key, Record, State
from oncely.core.rules import PURGEABLE
from oncely.ledger.ledger import Ledger
from oncely.stores.store import Query, Store
from oncely.testing.tools import AdvancingClock

_DAY_S = 86_400.0
_KEY = Key("billing", "abc-123")
_versions = count(1)


class HorizonStatements:
    """Horizons: raised by a purge, believed by an insert."""

    def test_no_horizon(self, store: Store) -> None:
        """A store that has removed nothing has no horizons."""
        insert(store, [_new(_KEY)])
        assert store.purge(Query(older_than_s=0.0), PURGEABLE) == 0
        assert store.horizons({"billing", "mailing"}) == {}
        assert store.horizons(()) == {}

    def test_purge_raises_horizons(self, store: Store, clock: AdvancingClock) -> None:
        """A purge raises the horizon of each consumer whose records it removes, to the time up to
        which it purges; other horizons stay.
        """
        for consumer in ("billing", "mailing", "billing "):
            insert(store, [_new(Key(consumer, "1"), state=State.FAILED, lease_until=None)])
        insert(store, [_new(Key("working", "1"))])
        clock.advance(100)
        now = store.load(()).now
        assert store.purge(Query("billing", older_than_s=90), PURGEABLE) == 1
        names = {"billing", "mailing", "billing ", "working"}
        assert store.horizons(names) == {"billing": pytest.approx(now - 90, abs=0.001)}
        assert store.purge(Query(older_than_s=50), PURGEABLE) == 2
        found = store.horizons(names)
        assert set(found) == {"billing", "mailing", "billing "}
        assert found["mailing"] == pytest.approx(now - 50, abs=0.001)
        assert store.horizons({"mailing"}) == {"mailing": found["mailing"]}

    def test_horizons_only_grow(self, store: Store, clock: AdvancingClock) -> None:
        """A horizon is never lowered, also not by a purge of older records."""
        store.forget_until({"billing": 10.5, "mailing": 3.0})
        store.forget_until({"billing": 7.0, "mailing": 1_600_000_000.123456})
        assert store.horizons(["billing", "mailing"]) == {
            "billing": 10.5,
            "mailing": 1_600_000_000.123456,
        }
        later = store.load(()).now + _DAY_S
        store.forget_until({"billing": later})
        insert(store, [_new(_KEY, state=State.FAILED, lease_until=None)])
        clock.advance(100)
        assert store.purge(Query(older_than_s=50), PURGEABLE) == 1
        assert store.horizons(["billing"]) == {"billing": later}

    def test_insert_believing(self, store: Store, clock: AdvancingClock) -> None:
        """An insert writes no record of a consumer whose horizon differs from the believed one."""
        assert insert(store, [_new(_KEY)], {"billing": 5.0}) == set()
        assert insert(store, [_new(_KEY)], {"billing": None}) == {_KEY}
        one, two = Key("billing", "1"), Key("mailing", "2")
        store.forget_until({"billing": store.load(()).now - 1 / 3})
        clock.advance(1)
        [horizon] = store.horizons(["billing"]).values()
        for believed in (None, horizon - 1, horizon + 1e-6):
            assert one not in insert(store, [_new(one)], {"billing": believed})
            assert one not in insert(
                store, [_new(one), _new(two)], {"billing": believed, "mailing": 1.0}
            )
        assert set(store.load([one, two]).records) == set()
        three = Key("mailing", "3")
        only_one_is_true = {"billing": None, "mailing": None}
        assert insert(store, [_new(one), _new(three)], only_one_is_true) == {three}
        assert set(store.load([one, three]).records) == {three}
        true = {"billing": horizon, "mailing": None}
        assert insert(store, [_new(one), _new(two)], true) == {one, two}
        assert insert(store, [_new(one)], {"billing": horizon}) == set()
        assert insert(store, [_new(Key("billing", "3"))]) == {Key("billing", "3")}

    def test_insert_believing_keeps_what_is_there(self, store: Store) -> None:
        """An insert that a horizon prevents leaves the existing record."""
        insert(store, [_new(_KEY, fence=7)])
        other = Key("billing", "other")
        assert insert(store, [_new(_KEY), _new(other)], {"billing": 5.0}) == set()
        assert store.load([_KEY]).records[_KEY].fence == 7

    def test_retentions(self, store: Store) -> None:
        """A consumer's retention can be stored, and changed."""
        assert store.retentions() == {}
        store.keep_retention("billing", 30 * _DAY_S)
        store.keep_retention("mailing", 0.1)
        store.keep_retention("billing", 7 * _DAY_S)
        store.forget_until({"selling": 5.0, "mailing": 5.0})
        assert store.retentions() == {"billing": 7 * _DAY_S, "mailing": 0.1}
        assert store.horizons(["billing", "mailing"]) == {"mailing": 5.0}


class HorizonRules:
    """What a ledger answers for messages that it may have forgotten."""

    def test_too_old(self, ledger: Ledger, clock: AdvancingClock) -> None:
        """A message from before the horizon that is not in the ledger is not granted, and leaves no
        record.
        """
        sent_at = ledger.now()
        ledger.complete(granted(ledger.claim(_KEY)))
        clock.advance(31 * _DAY_S)
        assert isinstance(ledger.claim(_KEY, sent_at=sent_at), Duplicate)
        clock.advance(31 * _DAY_S)
        assert ledger.purge("30d") == 1
        [horizon] = ledger._store.horizons(["billing"]).values()
        other = Key("billing", "other")
        assert ledger.claim_many([_KEY, other], sent_at=[sent_at, horizon - 0.001]) == [
            TooOld(horizon, _KEY),
            TooOld(horizon, other),
        ]
        assert ledger.counts() == {}

    def test_removed_as_found(self, ledger: Ledger, clock: AdvancingClock) -> None:
        """Records removed one by one are forgotten up to the time when the newest was last seen."""
        for n in range(3):
            ledger.complete(granted(ledger.claim(Key("billing", str(n)))))
            clock.advance(100)
        found = [ledger.find(Key("billing", str(n))) for n in range(2)]
        records = [record for record in found if record is not None]
        assert len(ledger.purge_found(records)) == 2
        newest = records[1].last_seen
        assert isinstance(ledger.claim(records[1].key, sent_at=newest), TooOld)
        granted(ledger.claim(Key("billing", "other"), sent_at=newest + 0.001))

    def test_purged_by_another(self, ledger: Ledger, other: Ledger, clock: AdvancingClock) -> None:
        """The horizon that a ledger has read is valid only until another one purges."""
        sent_at = ledger.now()
        ledger.complete(granted(ledger.claim(_KEY, sent_at=sent_at)))
        for message_id in ("1", "2"):
            _purge_one(other, clock)
            assert isinstance(ledger.claim(_KEY, sent_at=sent_at), TooOld)
            granted(ledger.claim(Key("billing", message_id), sent_at=other.now()))

    def test_purged_while_some_are_there(
        self, ledger: Ledger, other: Ledger, clock: AdvancingClock
    ) -> None:
        """Of a batch, one is there; another needs no horizon, and is granted after a purge."""
        _purge_one(other, clock)
        there, new = Key("billing", "there"), Key("billing", "new")
        ledger.complete(granted(ledger.claim(there)))
        outcomes = ledger.claim_many([there, new], sent_at=[ledger.now(), None])
        assert [type(outcome) for outcome in outcomes] == [Duplicate, Granted]

    def test_purged_before_the_insert(
        self, store: Store, other: Ledger, clock: AdvancingClock
    ) -> None:
        """A purge between the look at the horizon and the claim is seen by the claim."""
        with closing(Ledger(meddling := MeddlingStore(store))) as ledger:
            granted(ledger.claim(Key("billing", "new"), sent_at=ledger.now()))
            sent_at = ledger.now()
            other.complete(granted(other.claim(_KEY)))
            meddling.once(lambda: _purge_one(other, clock))
            assert isinstance(ledger.claim(_KEY, sent_at=sent_at), TooOld)
            assert ledger.find(_KEY) is None


def _new(key: Key, **fields: object) -> Record:
    """A record as a first claim writes it, of a birth of its own."""
    return fresh(key.message_id, key.consumer, version=next(_versions) << 24, **fields)


def _purge_one(ledger: Ledger, clock: AdvancingClock) -> None:
    """Purge a message of "billing", so that the horizon is now."""
    ledger.complete(granted(ledger.claim(Key("billing", "purged"))))
    clock.advance(100)
    assert ledger.purge("50s") >= 1
