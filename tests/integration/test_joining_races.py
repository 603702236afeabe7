# ruff: noqa: PT012 - what raises is the block.
"""Transactions that the ledger has joined, and that want the same message at the same time."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Barrier
from typing import Any

import pytest
from sqlalchemy import Connection, create_engine, text
from sqlalchemy.exc import IntegrityError
from tests.conditions import LIMIT_S, wait_until
from tests.integration.callers import Place, insertion, opened
from tests.records import granted

from oncely.core.commands import ClaimOutcome, Duplicate, Granted
from oncely.core.errors import ContentionError, EndedError, StoreError
from oncely.core.record import Key, State

KEY = Key("billing", "abc-123")
_RACERS = 8
_WAITING = {
    "postgresql": "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
    " AND datname = current_database()",
    "mysql": "SELECT count(*) FROM information_schema.innodb_trx WHERE trx_state = 'LOCK WAIT'",
}


def wait_for_waiting(place: Place, count: int) -> None:
    """Return when so many transactions wait for a lock. SQLite does not tell."""
    if place.kind not in _WAITING:
        return
    asked = _WAITING[place.kind]
    with place.engine.execution_options(isolation_level="AUTOCOMMIT").connect() as connection:
        # MariaDB looks again only after a tenth of a second without a question.
        wait_until(lambda: connection.exec_driver_sql(asked).scalar_one() >= count, pause_s=0.2)


def pay(place: Place, row: str, before: str | None = None) -> ClaimOutcome:
    """Deliver the message; `before` is work that the transaction does first."""
    with place.engine.begin() as connection:
        if before is not None:
            connection.execute(text(insertion(before)))
        with place.ledger.transaction(connection) as inbox:
            outcome = inbox.claim(KEY)
            connection.execute(text(insertion(row)))
            if isinstance(outcome, Granted):
                inbox.complete(outcome.claim)
    return outcome


@contextmanager
def holding(place: Place) -> Iterator[Connection]:
    """A transaction that holds the claim. It is rolled back unless it is committed."""
    with place.engine.connect() as connection:
        with place.ledger.transaction(connection) as inbox:
            inbox.complete(granted(inbox.claim(KEY)))
        yield connection


def kinds(outcomes: list[ClaimOutcome]) -> list[str]:
    """The names of outcomes, in order."""
    return sorted(type(outcome).__name__ for outcome in outcomes)


# ---- Racing ------------------------------------------------------------------------------------


def test_one_is_granted(place: Place, pool: ThreadPoolExecutor) -> None:
    """Of transactions that race for a message one is granted it; the others see what came of it,
    and commit what else they did.
    """
    start = Barrier(_RACERS)

    def race(number: int) -> ClaimOutcome:
        start.wait(LIMIT_S)
        return pay(place, str(number))

    outcomes = list(pool.map(race, range(_RACERS)))
    assert kinds(outcomes) == ["Duplicate"] * (_RACERS - 1) + ["Granted"]
    assert place.rows() == [str(number) for number in range(_RACERS)]
    assert place.find(KEY).duplicates == _RACERS - 1


@pytest.mark.parametrize(("end", "outcome"), [("commit", Duplicate), ("rollback", Granted)])
def test_loser(
    place: Place, pool: ThreadPoolExecutor, end: str, outcome: type[ClaimOutcome]
) -> None:
    """It waits, and is told of a duplicate, or granted the message where that is free again."""
    with holding(place) as connection:
        loser = pool.submit(pay, place, "loser", "before")
        wait_for_waiting(place, 1)
        getattr(connection, end)()
        assert isinstance(loser.result(LIMIT_S), outcome)
    assert place.rows() == ["before", "loser"]
    assert place.find(KEY).state is State.COMPLETED


@pytest.mark.parametrize("has_worked", [False, True])
def test_losers_of_one_that_rolls_back(
    place: Place, pool: ThreadPoolExecutor, has_worked: bool
) -> None:
    """One of several is granted the message. Where the server ends a transaction in which nothing
    else was done yet, it begins again by itself; what was done before cannot be done again for it,
    and ends in a ContentionError, if in any.
    """

    def deliver(number: int) -> ClaimOutcome:
        try:
            return pay(place, str(number), f"before {number}" if has_worked else None)
        except ContentionError:
            assert has_worked
            return deliver(number)

    with holding(place) as connection:
        losers = [pool.submit(deliver, number) for number in range(4)]
        wait_for_waiting(place, 4)
        connection.rollback()
        outcomes = [loser.result(LIMIT_S) for loser in losers]
    assert kinds(outcomes) == ["Duplicate"] * 3 + ["Granted"]
    before = [f"before {n}" for n in range(4)] if has_worked else []
    assert place.rows() == [str(n) for n in range(4)] + before


# ---- What is lost ------------------------------------------------------------------------------


def test_is_contention(place: Place) -> None:
    """What the caller's own statements raise can be told apart, too."""
    ledger = place.ledger
    assert ledger.is_contention(ContentionError("lost"))
    assert not ledger.is_contention(StoreError("broken"))
    assert not ledger.is_contention(KeyError(1213))
    with place.engine.begin() as connection:
        connection.execute(text("CREATE TABLE once_only (n INTEGER PRIMARY KEY)"))
        connection.execute(text("INSERT INTO once_only VALUES (1)"))
    with pytest.raises(IntegrityError) as twice, place.engine.begin() as connection:
        connection.execute(text("INSERT INTO once_only VALUES (1)"))
    assert not ledger.is_contention(twice.value)


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_stricter_isolation(level: Any, request: pytest.FixtureRequest) -> None:
    """A transaction of PostgreSQL that began before another's claim, and may not see it, has lost
    against that one.
    """
    with opened("postgresql", request) as place:
        engine = place.engine.execution_options(isolation_level=level)
        with pytest.raises(ContentionError), engine.begin() as connection:
            connection.execute(text("SELECT count(*) FROM effects"))
            pay(place, "other")
            with place.ledger.transaction(connection) as inbox:
                inbox.claim(KEY)


def test_swallowed_error(place: Place) -> None:
    """After an error of the database the transaction cannot be believed in: whoever swallows it
    is stopped when the block is left.
    """
    with pytest.raises(EndedError, match="missing"), place.engine.connect() as connection:
        connection.execute(text("DROP TABLE processed_messages"))
        with place.ledger.transaction(connection) as inbox, pytest.raises(StoreError):
            inbox.claim(KEY)


# ---- SQLite ------------------------------------------------------------------------------------


@pytest.fixture
def file(request: pytest.FixtureRequest) -> Iterator[Place]:
    """A place on SQLite."""
    with opened("sqlite", request) as place:
        yield place


def test_more_patience_than_the_caller_has(file: Place, pool: ThreadPoolExecutor) -> None:
    """While another writes, the ledger waits longer than the caller's own statements would, and
    leaves the caller's patience as it was.
    """
    engine = create_engine(file.url, connect_args={"timeout": 0.001})
    with file.engine.connect() as other, engine.connect() as connection:
        other.exec_driver_sql("BEGIN IMMEDIATE")
        asked: list[str] = []
        driver: Any = connection.connection.driver_connection
        driver.set_trace_callback(asked.append)
        joined = pool.submit(_claim, file, connection)
        wait_until(lambda: "BEGIN IMMEDIATE" in asked)
        assert not joined.done()
        other.rollback()
        assert isinstance(joined.result(LIMIT_S), Granted)
        assert connection.exec_driver_sql("PRAGMA busy_timeout").scalar_one() == 1
    engine.dispose()


def _claim(place: Place, connection: Connection) -> ClaimOutcome:
    with place.ledger.transaction(connection) as inbox:
        return inbox.claim(KEY)


def test_others_have_written_since(file: Place) -> None:
    """A transaction that has read before another wrote can never write: it is told at once."""
    with file.engine.connect() as connection:
        connection.exec_driver_sql("BEGIN")
        connection.execute(text("SELECT count(*) FROM effects")).all()
        pay(file, "other")
        with pytest.raises(ContentionError, match="another connection has written"):
            _claim(file, connection)
        connection.rollback()
        assert isinstance(_claim(file, connection), Duplicate)


# ---- Settings of sessions ----------------------------------------------------------------------

_FAR_AWAY: dict[str, Callable[[Connection], object]] = {
    "postgresql": lambda connection: connection.exec_driver_sql("SET TIME ZONE 'Asia/Tokyo'"),
    "mysql": lambda connection: connection.exec_driver_sql("SET time_zone = '+09:00'"),
}


@pytest.mark.parametrize("kind", list(_FAR_AWAY))
def test_time_zone_of_the_caller(kind: str, request: pytest.FixtureRequest) -> None:
    """Leases do not depend on the time zone of the caller's session."""
    with opened(kind, request) as place:
        with place.engine.begin() as connection:
            _FAR_AWAY[kind](connection)
            with place.ledger.transaction(connection) as inbox:
                inbox.claim(KEY, lease="1h")
        lease_until = place.find(KEY).lease_until
        assert lease_until is not None
        assert lease_until - place.ledger.now() == pytest.approx(3600, abs=60)
