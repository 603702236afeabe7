# ruff: noqa: PT012, SIM117 - what raises is the block, and which of two matters.
"""What `Ledger.transaction` refuses: no connections, and transactions that are ended inside."""

import asyncio
import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import Connection, create_engine, make_url, text
from sqlalchemy.orm import Session, sessionmaker
from tests.integration.callers import (
    Place,
    async_engine_on,
    by_psycopg,
    by_pymysql,
    by_sqlite3,
    django_connection,
    insertion,
    opened,
)
from tests.records import granted

from oncely.core.errors import ConfigError, EndedError, FencedError, StoreError
from oncely.core.record import Key, State
from oncely.ledger.inbox import Inbox
from oncely.ledger.ledger import Ledger

KEY = Key("billing", "abc-123")
OTHER = Key("billing", "def-456")
_BARE = {"sqlite": by_sqlite3, "postgresql": by_psycopg, "mysql": by_pymysql}


@pytest.fixture
def sqlite_place(request: pytest.FixtureRequest) -> Any:
    """A place on SQLite."""
    with opened("sqlite", request) as place:
        yield place


def refusal(ledger: Ledger, connection: Any) -> str:
    """What the refusal to join says."""
    with pytest.raises(ConfigError) as refused, ledger.transaction(connection):
        pass
    return str(refused.value)


# ---- What is handed over -----------------------------------------------------------------------


def test_no_connection(sqlite_place: Place) -> None:
    """What is not a connection is refused, and it is said what is to be handed over."""
    engine = sqlite_place.engine
    for wrong in (engine, sessionmaker(engine), sqlite_place.url, None, Session):
        said = refusal(sqlite_place.ledger, wrong)
        assert "is not a connection; hand over a SQLAlchemy Connection or Session" in said


def test_async_connection_without_async_with(sqlite_place: Place) -> None:
    """`with` on an async connection, and `async with` on another, is told which to write."""

    async def run() -> None:
        ledger = sqlite_place.ledger
        async with async_engine_on(sqlite_place, "sqlite+aiosqlite") as engine:
            async with engine.connect() as connection:
                assert "write `async with`" in refusal(ledger, connection)
            with sqlite_place.engine.connect() as plain, pytest.raises(ConfigError, match="`with`"):
                await ledger.transaction(plain).__aenter__()

    asyncio.run(run())


def test_commits_each_statement(place: Place) -> None:
    """A connection in AUTOCOMMIT has no transaction that could be joined."""
    engine = place.engine.execution_options(isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        assert "not AUTOCOMMIT" in refusal(place.ledger, connection)


def test_bare_connection(sqlite_place: Place, request: pytest.FixtureRequest) -> None:
    """Nor has a driver's connection where autocommit is on, and nothing was begun; or Django's,
    outside of `atomic`. One in a pipeline does not wait for answers, and cannot tell whether a
    claim was granted. One to a database where the ledger cannot be is refused, too.
    """
    file = make_url(sqlite_place.url).database
    assert file is not None
    with closing(sqlite3.connect(file, isolation_level=None)) as plain:
        assert "switch autocommit off" in refusal(sqlite_place.ledger, plain)
    with django_connection(sqlite_place) as connection:
        assert "transaction.atomic()" in refusal(sqlite_place.ledger, connection)
    with opened("postgresql", request) as place:
        with psycopg.connect(place.url, autocommit=True) as psql:
            assert "switch autocommit off" in refusal(place.ledger, psql)
        with psycopg.connect(place.url) as psql:
            said = refusal(sqlite_place.ledger, psql)
            assert "a connection to postgresql, and the ledger is in sqlite" in said
            with psql.pipeline():
                assert "in a pipeline" in refusal(place.ledger, psql)


def test_another_database(place: Place, tmp_path: Path) -> None:
    """In another database of that kind the ledger's table is missing, and that is said."""
    # What the servers of tests have besides.
    other = {"sqlite": str(tmp_path / "other.db"), "postgresql": "postgres", "mysql": "oncely"}
    engine = create_engine(place.engine.url.set(database=other[place.kind]))
    with pytest.raises(StoreError, match="missing"):
        with engine.begin() as connection, place.ledger.transaction(connection) as inbox:
            inbox.claim(KEY)
    engine.dispose()


# ---- Ended inside: SQLAlchemy ------------------------------------------------------------------


def _commit(connection: Connection) -> None:
    connection.commit()


def _commit_the_transaction(connection: Connection) -> None:
    transaction = connection.get_transaction()
    assert transaction is not None
    transaction.commit()


@pytest.mark.parametrize("commit", [_commit, _commit_the_transaction])
def test_commit_is_noticed(place: Place, commit: Callable[[Connection], None]) -> None:
    """A commit inside the block stores the claim as what it is, and the work so far with it; what
    comes after is not stored.
    """
    with pytest.raises(EndedError), place.engine.connect() as connection:
        with place.ledger.transaction(connection) as inbox:
            inbox.claim(KEY, lease="1h")
            connection.execute(text(insertion("abc-123")))
            commit(connection)
            connection.execute(text(insertion("after")))
    assert place.find(KEY).state is State.PROCESSING
    assert place.rows() == ["abc-123"]


def test_commit_of_a_session_is_noticed(place: Place) -> None:
    """The same with a Session, which begins anew by itself: its inbox answers nothing more."""
    with Session(place.engine) as session:
        with pytest.raises(EndedError), place.ledger.transaction(session) as inbox:
            inbox.claim(KEY, lease="1h")
            session.execute(text(insertion("abc-123")))
            session.commit()
            session.execute(text(insertion("after")))
            with pytest.raises(EndedError):
                inbox.claim(OTHER)
        session.rollback()
        assert place.rows() == ["abc-123"]
        # The session is good for another transaction.
        with place.ledger.transaction(session) as inbox:
            inbox.complete(granted(inbox.claim(OTHER)))
        session.commit()
    assert place.find(KEY).state is State.PROCESSING
    assert place.find(OTHER).state is State.COMPLETED


def test_rollback_is_noticed(place: Place) -> None:
    """After a rollback inside the block the inbox answers nothing, and leaving it raises."""
    with place.engine.connect() as connection:
        with pytest.raises(EndedError), place.ledger.transaction(connection) as inbox:
            claim = granted(inbox.claim(KEY))
            connection.rollback()
            with pytest.raises(EndedError):
                inbox.complete(claim)
        connection.rollback()
    assert place.ledger.find(KEY) is None


def test_outside_its_block(place: Place) -> None:
    """An inbox is of no use once its block was left, and its transaction may be committed."""
    with place.engine.connect() as connection:
        with place.ledger.transaction(connection) as inbox:
            claim = granted(inbox.claim(KEY))
        for call in (lambda: inbox.complete(claim), lambda: inbox.claim(OTHER)):
            with pytest.raises(ConfigError, match="inside its `with` block"):
                call()
        connection.commit()
    assert place.find(KEY).state is State.PROCESSING


# ---- Ended inside: others ----------------------------------------------------------------------


@pytest.mark.parametrize("end", ["commit", "rollback", "commit, and begin again"])
def test_bare_connection_ended_inside(place: Place, end: str) -> None:
    """Of a driver's own connection the end is noticed when the block is left."""

    def work(connection: Any, execute: Callable[[str], object]) -> None:
        with place.ledger.transaction(connection) as inbox:
            inbox.claim(KEY)
            getattr(connection, end.partition(",")[0])()
            if "again" in end:
                execute(insertion("abc-123"))

    with pytest.raises(EndedError):
        _BARE[place.kind](place, work)
    assert place.rows() == []


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_django_refuses_itself(kind: str, request: pytest.FixtureRequest) -> None:
    """Inside `atomic` Django lets nobody commit; what it marks for rollback is noticed."""
    from django.db import transaction

    with opened(kind, request) as place, django_connection(place) as connection:
        with pytest.raises(transaction.TransactionManagementError):
            with transaction.atomic(kind), place.ledger.transaction(connection) as inbox:
                inbox.claim(KEY)
                connection.commit()
        with pytest.raises(EndedError):
            with transaction.atomic(kind), place.ledger.transaction(connection) as inbox:
                inbox.claim(KEY)
                connection.set_rollback(True)
        assert place.ledger.find(KEY) is None


# ---- Savepoints --------------------------------------------------------------------------------


def _sqlalchemy(place: Place, work: Callable[[Inbox, Callable[[], Any]], None]) -> None:
    with Session(place.engine) as session:
        with place.ledger.transaction(session) as inbox:
            work(inbox, session.begin_nested)
        session.commit()


def _django(place: Place, work: Callable[[Inbox, Callable[[], Any]], None]) -> None:
    from django.db import transaction

    with (
        django_connection(place) as connection,
        transaction.atomic(place.kind),
        place.ledger.transaction(connection) as inbox,
    ):
        work(inbox, lambda: transaction.atomic(place.kind))


@pytest.fixture(params=["sqlite", "postgresql", "mysql", "django"])
def with_savepoints(request: pytest.FixtureRequest) -> Any:
    """Runs work that may begin savepoints; and the place where it is done."""
    django = request.param == "django"
    with opened("postgresql" if django else request.param, request) as place:
        run = _django if django else _sqlalchemy
        yield place, lambda work: run(place, work)


def _break_off(savepoint: Callable[[], Any], work: Callable[[], None]) -> None:
    with suppress(ZeroDivisionError), savepoint():
        work()
        raise ZeroDivisionError


def test_savepoint_takes_back_a_claim(with_savepoints: Any) -> None:
    """A claim made after a savepoint is gone with it: it completes nothing, and can be asked for
    again.
    """
    place, run = with_savepoints
    claims = []

    def work(inbox: Inbox, savepoint: Callable[[], Any]) -> None:
        _break_off(savepoint, lambda: claims.append(granted(inbox.claim(KEY))))
        with pytest.raises(FencedError):
            inbox.complete(claims[0])
        _break_off(savepoint, lambda: inbox.complete(granted(inbox.claim(OTHER))))
        inbox.complete(granted(inbox.claim(KEY)))

    run(work)
    assert place.find(KEY).state is State.COMPLETED
    assert place.ledger.find(OTHER) is None


def test_savepoint_takes_back_a_completion(with_savepoints: Any) -> None:
    """A completion made after a savepoint is gone with it, and the claim from before it is not:
    else a message would be done without its work.
    """
    place, run = with_savepoints

    def work(inbox: Inbox, savepoint: Callable[[], Any]) -> None:
        first, second = (granted(outcome) for outcome in inbox.claim_many([KEY, OTHER]))
        _break_off(savepoint, lambda: inbox.complete(first))
        with savepoint():
            inbox.complete(second)

    run(work)
    assert place.find(KEY).state is State.PROCESSING
    assert place.find(OTHER).state is State.COMPLETED


def test_joined_within_a_savepoint(place: Place) -> None:
    """A savepoint from before the block may not be rolled back inside it."""
    with Session(place.engine) as session, session.begin():
        nested = session.begin_nested()
        with pytest.raises(EndedError), place.ledger.transaction(session) as inbox:
            inbox.claim(KEY)
            nested.rollback()
        session.execute(text(insertion("other work")))
    assert place.ledger.find(KEY) is None
    assert place.rows() == ["other work"]
