"""Keys that somebody's long transaction holds: only those who ask for them are told to wait."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, datetime

import pytest
from sqlalchemy import text
from tests.integration.callers import Place
from tests.records import granted

from oncely.core.commands import Busy, ClaimOutcome, Duplicate, Granted, Written
from oncely.core.errors import KeysLocked
from oncely.core.record import Key, State
from oncely.stores.sql import SqlStore

pytestmark = pytest.mark.parametrize("place", ["postgresql", "mysql"], indirect=True)

HELD = [Key("billing", f"held-{n}") for n in range(8)]


Holding = Callable[..., None]

_PATIENCE = {"postgresql": "SHOW lock_timeout", "mysql": "SELECT @@innodb_lock_wait_timeout"}
_CLAIM = (
    "INSERT INTO processed_messages (message_id, provider, status, first_processed_at,"
    " last_processed_at) VALUES (:id, 'billing', 'processing', :at, :at)"
)
_LOCK = "SELECT id FROM processed_messages WHERE message_id = :id FOR UPDATE"


@pytest.fixture
def holding(place: Place) -> Iterator[Holding]:
    """Another program holds keys until the end of the test, in a transaction of its own."""
    with closing(place.engine.connect()) as connection:

        def hold(keys: list[Key], statement: str = _CLAIM) -> None:
            at = datetime(2020, 1, 1, tzinfo=UTC)
            for key in keys:
                connection.execute(text(statement), {"id": key.message_id, "at": at})

        yield hold


def test_other_keys_go_on(place: Place, holding: Holding) -> None:
    """While eight keys are held and asked for, sixteen threads of the same ledger claim and
    complete others.
    """
    holding(HELD)
    with ThreadPoolExecutor(24) as threads:
        asked = [threads.submit(_ask, place, key) for key in HELD]
        others = [threads.submit(_handle, place, f"other-{n}") for n in range(200)]
        for other in others:
            other.result(timeout=60)
        outcomes = [each.result(timeout=60) for each in asked]
    assert {type(outcome) for outcome in outcomes} == {Busy}


def _ask(place: Place, key: Key) -> ClaimOutcome:
    return place.ledger.claim(key)


def _handle(place: Place, message_id: str) -> None:
    place.ledger.complete(granted(place.ledger.claim(Key("billing", message_id))))


@pytest.mark.parametrize("is_timed", [False, True])
def test_batch_with_held_keys(place: Place, holding: Holding, is_timed: bool) -> None:
    """Of many keys asked for together those that are held are busy, and all others are granted,
    whether or not it is known when their messages were sent.
    """
    holding(HELD[:2])
    keys = [Key("billing", str(n)) for n in range(98)] + HELD[:2]
    outcomes = place.ledger.claim_many(keys, sent_at=[1.0] * 100 if is_timed else None)
    assert [type(outcome) for outcome in outcomes] == [*[Granted] * 98, Busy, Busy]
    [*_, busy] = outcomes
    assert isinstance(busy, Busy)
    assert busy.retry_at is None
    assert (busy.record.key, busy.record.state) == (HELD[1], State.PROCESSING)


def test_held_record_is_shown_as_it_is(place: Place, holding: Holding) -> None:
    """A record that others see while it is held stands in the answer; a completed one is a
    duplicate, whoever holds it.
    """
    failed, done = Key("billing", "failed"), Key("billing", "done")
    place.ledger.fail(granted(place.ledger.claim(failed)), "no")
    place.ledger.complete(granted(place.ledger.claim(done)))
    holding([failed], _LOCK)
    with place.engine.connect() as connection, place.ledger.transaction(connection) as inbox:
        assert isinstance(inbox.claim(done), Duplicate)
        [busy, duplicate] = place.ledger.claim_many([failed, done])
    assert isinstance(busy, Busy)
    assert (busy.record.state, busy.record.error) == (State.FAILED, "no")
    assert isinstance(duplicate, Duplicate)


def test_completions_with_a_held_key(place: Place) -> None:
    """Of many that are completed together all are but those that are held, of which an error
    tells; to ask again later completes them.
    """
    claims = [granted(place.ledger.claim(Key("billing", str(n)))) for n in range(20)]
    with place.engine.connect() as connection:
        with place.ledger.transaction(connection) as inbox:
            assert isinstance(inbox.claim(claims[7].key), Busy)
            with pytest.raises(KeysLocked, match="'7'") as locked:
                place.ledger.complete_many(claims)
        connection.rollback()
    assert locked.value.keys == {claims[7].key}
    states = [place.find(claim.key).state for claim in claims]
    assert states.count(State.COMPLETED) == 19
    assert {type(each) for each in place.ledger.complete_many(claims)} == {Written}


def test_sessions_wait_as_before_afterwards(place: Place, holding: Holding) -> None:
    """Statements wait for a moment, also on a session on which others hardly waited before."""
    store = place.ledger._store
    assert isinstance(store, SqlStore)

    def patience() -> object:
        with store._engine.connect() as session:
            return session.exec_driver_sql(_PATIENCE[place.kind]).scalar_one()

    place.ledger.claim(Key("billing", "0"))
    before = patience()
    holding(HELD[:2])
    place.ledger.claim_many([*HELD[:2], Key("billing", "1")])
    assert patience() == before


@pytest.mark.parametrize("call", ["purge", "keep_retention"])
def test_consumer_that_is_being_made_known(place: Place, call: str) -> None:
    """A transaction that is the first to ask for a consumer's horizon, and goes on, keeps others
    waiting for a moment at most.
    """
    calls: dict[str, Callable[[], object]] = {
        "purge": lambda: place.ledger.purge("0s"),
        "keep_retention": lambda: place.ledger.keep_retention("billing", "7d"),
    }
    place.ledger.complete(granted(place.ledger.claim(Key("billing", "old"))))
    strict = place.engine.execution_options(isolation_level="REPEATABLE READ")
    with ThreadPoolExecutor(1) as threads, strict.connect() as connection:
        connection.execute(text("SELECT count(*) FROM effects"))
        with place.ledger.transaction(connection) as inbox:
            granted(inbox.claim(Key("billing", "new"), sent_at=place.ledger.now()))
            called = threads.submit(calls[call])
            error = called.exception(timeout=60)
        connection.rollback()
    assert error is None or isinstance(error, KeysLocked)
    calls[call]()
