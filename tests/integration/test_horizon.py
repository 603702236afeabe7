"""Messages that are purged while somebody asks for them, on real databases."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import Connection, text
from tests.conditions import LIMIT_S
from tests.integration.callers import Place
from tests.integration.test_joining_races import wait_for_waiting
from tests.records import granted

from oncely.core.commands import ClaimOutcome, TooOld
from oncely.core.errors import ContentionError
from oncely.core.record import Key

KEY = Key("billing", "abc-123")
_RACERS = 6
_LEVELS: dict[str, list[Any]] = {
    "sqlite": [None],
    "postgresql": ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"],
    "mysql": ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"],
}
_DELETED = "DELETE FROM processed_messages WHERE message_id = 'abc-123'"
_RAISED = {
    "first": "INSERT INTO message_consumers (provider, forgotten_until) VALUES ('billing', {})",
    "later": "UPDATE message_consumers SET forgotten_until = {} WHERE provider = 'billing'",
}


@pytest.fixture(params=["first", "later"])
def turn(request: pytest.FixtureRequest, place: Place) -> str:
    """Whether the purge of the test is the first of its consumer."""
    if request.param == "later":
        place.ledger.complete(granted(place.ledger.claim(Key("billing", "another"))))
        purge_all(place)
    return str(request.param)


@pytest.fixture
def sent_at(place: Place, turn: str) -> float:
    """When the message was sent that is completed."""
    sent_at = place.ledger.now()
    place.ledger.complete(granted(place.ledger.claim(KEY)))
    while place.ledger.now() == sent_at:
        pass  # SQLite's clock goes by milliseconds.
    return sent_at


def purge_all(place: Place) -> None:
    """Purge what was completed just now."""
    while not place.ledger.purge("0s"):  # SQLite's clock goes by milliseconds.
        pass


@contextmanager
def purging(place: Place, turn: str) -> Iterator[Connection]:
    """A purge of the message that is not committed yet."""
    with place.engine.connect() as connection:
        if place.kind == "sqlite":
            connection.exec_driver_sql("BEGIN IMMEDIATE")
        connection.execute(text(_DELETED))
        connection.execute(text(_RAISED[turn].format(place.ledger.now())))
        yield connection


def levels(place: Place) -> list[Any]:
    """The isolation levels that a transaction of the caller's may have."""
    return _LEVELS[place.kind]


def claim_inside(place: Place, level: Any, sent_at: float, before: Any = None) -> ClaimOutcome:
    """Claim in a transaction that has read before, where it does something `before`."""
    engine = (
        place.engine if level is None else place.engine.execution_options(isolation_level=level)
    )
    try:
        with engine.begin() as connection:
            if before is not None:
                connection.execute(text("SELECT count(*) FROM effects")).scalar_one()
                before()
            with place.ledger.transaction(connection) as inbox:
                return inbox.claim(KEY, sent_at=sent_at)
    except ContentionError:
        # It has lost against the purge, and sees that when it begins again.
        return claim_inside(place, level, sent_at)


# ---- One purge ---------------------------------------------------------------------------------


def test_claim_that_waits_for_a_purge(
    place: Place, pool: ThreadPoolExecutor, turn: str, sent_at: float
) -> None:
    """It sees what the purge has forgotten, also where it had looked at the horizon before."""
    place.ledger.complete(granted(place.ledger.claim(Key("billing", "x"), sent_at=sent_at)))
    with purging(place, turn) as purge:
        claim = pool.submit(place.ledger.claim, KEY, sent_at=sent_at)
        if place.kind != "sqlite":
            wait_for_waiting(place, 1)
        purge.commit()
        assert isinstance(claim.result(LIMIT_S), TooOld)
    assert place.ledger.find(KEY) is None


@pytest.mark.parametrize("reads", [False, True])
def test_claim_inside_that_waits_for_a_purge(
    place: Place, pool: ThreadPoolExecutor, turn: str, sent_at: float, reads: bool
) -> None:
    """So it does in a transaction of the caller's, of each isolation level; and where that has
    read, it does not go by what it has read.
    """
    for level in levels(place):
        with purging(place, turn) as purge:
            before = (lambda: None) if reads else None
            claim = pool.submit(claim_inside, place, level, sent_at, before)
            if place.kind != "sqlite":
                wait_for_waiting(place, 1)
            purge.commit()
            assert isinstance(claim.result(LIMIT_S), TooOld)
        _start_over(place, turn)


def test_purge_after_the_transaction_has_read(place: Place, turn: str, sent_at: float) -> None:
    """A purge in the midst of a transaction, before its claim, is seen by the claim."""
    for level in levels(place):
        outcome = claim_inside(place, level, sent_at, lambda: purge_all(place))
        assert isinstance(outcome, TooOld)
        _start_over(place, turn)


def _start_over(place: Place, turn: str) -> None:
    with place.engine.begin() as connection:
        written = "DELETE FROM" if turn == "first" else "UPDATE"
        how = "" if turn == "first" else " SET forgotten_until = 1"
        connection.execute(text(f"{written} message_consumers{how}"))
    place.ledger._settler.beliefs.horizons.clear()
    place.ledger.complete(granted(place.ledger.claim(KEY)))


# SQLite has one writer at a time.
@pytest.mark.parametrize("place", ["postgresql", "mysql"], indirect=True)
def test_purge_waits_for_no_transaction(
    place: Place, pool: ThreadPoolExecutor, turn: str, sent_at: float
) -> None:
    """A transaction that began with a claim, and goes on, does not hold a purge up."""
    for level in levels(place):
        if (place.kind, level) == ("mysql", "SERIALIZABLE"):
            continue  # There, whatever is read is locked.
        granted(place.ledger.claim(Key("billing", f"{turn} {level}"), sent_at=place.ledger.now()))
        engine = place.engine.execution_options(isolation_level=level)
        with engine.connect() as connection:
            with place.ledger.transaction(connection) as inbox:
                granted(inbox.claim(Key("billing", "long"), sent_at=place.ledger.now()))
            purged = pool.submit(place.ledger.purge, "0s")
            assert purged.result(LIMIT_S) == 1
            connection.rollback()
        assert isinstance(place.ledger.claim(KEY, sent_at=sent_at), TooOld)
        place.ledger.complete(granted(place.ledger.claim(KEY)))
