"""Settling for callers who know nothing of each other: whose error is whose, and what is stored."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from tests.meddling import MeddlingStore
from tests.records import granted

from oncely.core.cases import Case, Row
from oncely.core.commands import (
    Command,
    Complete,
    Extend,
    Fail,
    Granted,
    Release,
    Written,
)
from oncely.core.errors import ContentionError, StoreError, StoreUnavailable
from oncely.core.policy import Policy
from oncely.core.record import Claim, Key, State
from oncely.engine.asking import to_claim
from oncely.engine.settle import Settler
from oncely.ledger import Ledger
from oncely.stores.store import Store


class PickyStore(MeddlingStore):
    """Refuses a whole write for one bad record in it; it may have stored others before that."""

    def __init__(self, store: Store, stores_some: bool = False) -> None:
        super().__init__(store)
        self._stores_some = stores_some

    def _good(self, case: Case) -> Sequence[Row]:
        """Those in which nothing is bad, of all rows or of each."""
        fields: Mapping[str, object] = case.change.fields
        of_all = {name: value for name, value in fields.items() if name not in case.own}
        return [row for row in case.rows if "bad" not in repr((of_all, row[3:]))]

    def insert(self, case: Case, believed: Mapping[str, float | None] | None = None) -> set[Key]:
        good = self._good(case)
        if len(good) == len(case.rows):
            return super().insert(case, believed)
        if self._stores_some:
            self.store.insert(case._replace(rows=good[::2]))
        raise StoreError("a record is bad")

    def update(self, case: Case) -> set[Key]:
        good = self._good(case)
        if len(good) == len(case.rows):
            return super().update(case)
        if self._stores_some:
            self.store.update(case._replace(rows=good[::2]))
        raise StoreError("a record is bad")


def asks(number: int, bad: Sequence[int] = ()) -> list[Command]:
    """First claims of so many messages, those at `bad` such as no PickyStore stores."""
    keys = [Key("billing", str(n)) for n in range(number)]
    marks = ["bad" if n in bad else "good" for n in range(number)]
    return [*to_claim(keys, "60s", Policy(), marks, None, None, None)]


def claims_of(settler: Settler, number: int) -> list[Claim]:
    return [granted(outcome) for outcome in settler.settle(asks(number))]


def kinds(results: Sequence[object]) -> list[type]:
    return [type(result) for result in results]


def away(*_: Any) -> Any:
    """What a store does that cannot be reached."""
    raise StoreUnavailable("the store is away")


@pytest.fixture
def settler(meddling: MeddlingStore) -> Settler:
    """Settles in `meddling`."""
    return Settler(meddling)


@pytest.mark.parametrize("stores_some", [False, True], ids=["none stored", "some stored"])
def test_error_of_one_claim(meddling: MeddlingStore, rival: Ledger, stores_some: bool) -> None:
    """A claim that cannot be stored is its caller's error; all others are granted, and not busy."""
    settler = Settler(PickyStore(meddling.store, stores_some))
    results = settler.settle_each(asks(7, bad=[2, 5]))
    assert kinds(results) == [
        *[Granted, Granted, StoreError, Granted, Granted, StoreError, Granted]
    ]
    assert results[2] is not results[5]
    claims = [granted(result) for result in results if isinstance(result, Granted)]
    assert kinds(rival.complete_many(claims)) == [Written] * 5


@pytest.mark.parametrize("stores_some", [False, True], ids=["none stored", "some stored"])
def test_error_of_one_write(meddling: MeddlingStore, rival: Ledger, stores_some: bool) -> None:
    """Of writes of any kind the bad one is an error, and every other is stored, once."""
    settler = Settler(PickyStore(meddling.store, stores_some))
    claims = claims_of(settler, 5)
    commands = [
        Release(claims[0]),
        Complete(claims[1], "done"),
        Fail(claims[2], "bad"),
        Extend(claims[3], 90.0),
        Fail(claims[4], "no"),
    ]
    results = settler.settle_each(commands)
    assert kinds(results) == [Written, Written, StoreError, Written, Written]
    states = {record.key.message_id: record.state for record in rival.scan()}
    assert states == {
        "1": State.COMPLETED,
        "2": State.PROCESSING,
        "3": State.PROCESSING,
        "4": State.FAILED,
    }


def test_store_away(settler: Settler, meddling: MeddlingStore) -> None:
    """When the store cannot be reached all are told, each by an error of its own, and at once."""
    meddling.meddle = away
    results = settler.settle_each(asks(5))
    assert kinds(results) == [StoreUnavailable] * 5
    assert len({id(result) for result in results}) == 5
    assert {str(result) for result in results} == {"the store is away"}
    assert meddling.calls == ["insert"]


def test_store_away_for_those_that_lost(
    settler: Settler, meddling: MeddlingStore, rival: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claims that were stored are granted, though the store is away for one that lost its race."""
    meddling.once(lambda: rival.claim(Key("billing", "1")))
    monkeypatch.setattr(meddling, "load", away)
    results = settler.settle_each(asks(3))
    assert kinds(results) == [Granted, StoreUnavailable, Granted]


def test_many_writes_of_one_claim(settler: Settler, rival: Ledger) -> None:
    """More writes under one claim than rounds are all carried out."""
    [claim] = claims_of(settler, 1)
    results = settler.settle_each([Extend(claim, float(n)) for n in range(1, 120)])
    assert kinds(results) == [Written] * 119


def test_contention_of_one(settler: Settler, meddling: MeddlingStore, rival: Ledger) -> None:
    """A record that changes again and again is an error for its caller alone."""
    claims = claims_of(settler, 3)
    meddling.meddle = lambda: rival.extend(claims[1], "60s")
    results = settler.settle_each([Complete(claim) for claim in claims])
    assert kinds(results) == [Written, ContentionError, Written]


def test_what_has_records_is_looked_up_first(settler: Settler, meddling: MeddlingStore) -> None:
    """Where most of the last claims met records, those of the next are looked up before anything is
    written; where they met none, they are taken for new.
    """
    calls = []
    for number in (4, 4, 4, 9, 9, 40, 80):
        meddling.calls.clear()
        settler.settle(asks(number))
        calls.append([call for call in meddling.calls if call != "horizons"])
    new, loses, known, mixed = ["insert"], ["insert", "load"], ["load"], ["load", "insert"]
    assert calls == [new, loses, known, mixed, loses, mixed, loses]
