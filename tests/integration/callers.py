"""Programs that hand their own transactions to a ledger: by every kind of connection."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, closing, contextmanager
from typing import Any, NamedTuple

import psycopg
import psycopg2
import pymysql
import pytest
from sqlalchemy import Connection, Engine, create_engine, make_url, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from tests.django_setup import set_up_django
from tests.integration.drivers import engine_on
from tests.records import record_of

from oncely.core.record import Key, Record
from oncely.ledger.ledger import Ledger, open_ledger

KINDS = ("sqlite", "postgresql", "mysql")

Execute = Callable[[str], object]
"""Executes a statement in the program's transaction."""
Work = Callable[[Any, Execute], object]
"""What a program does in a transaction, given what it hands over."""


class Place(NamedTuple):
    """A ledger, and a table of business rows in the same database."""

    kind: str
    url: str
    ledger: Ledger
    engine: Engine
    """The program's own."""

    def rows(self) -> list[str]:
        """The business rows."""
        with self.engine.connect() as connection:
            found = connection.execute(text("SELECT message FROM effects ORDER BY message"))
            return list(found.scalars())

    def find(self, key: Key) -> Record:
        """The record of `key`, as it is stored."""
        return record_of(self.ledger, key)


def opened(kind: str, request: pytest.FixtureRequest) -> AbstractContextManager[Place]:
    """A place of that kind of database."""
    return place_at(kind, str(request.getfixturevalue(f"{kind}_ledger_url")))


@contextmanager
def place_at(kind: str, url: str) -> Iterator[Place]:
    """A place in the database there."""
    engine = engine_on(url)
    with closing(open_ledger(url)) as ledger:
        ledger.migrate()
        with engine.begin() as connection:
            connection.execute(text("CREATE TABLE effects (message VARCHAR(255))"))
        yield Place(kind, url, ledger, engine)
    engine.dispose()


def insertion(message: str) -> str:
    """The program's own work."""
    return f"INSERT INTO effects (message) VALUES ('{message}')"


# ---- SQLAlchemy --------------------------------------------------------------------------------


def by_connection(driver: str) -> Callable[[Place, Work], None]:
    """With a Connection."""

    def run(place: Place, work: Work) -> None:
        engine = create_engine(make_url(place.url).set(drivername=driver))
        try:
            with engine.begin() as connection:
                work(connection, lambda statement: connection.execute(text(statement)))
        finally:
            engine.dispose()

    return run


def by_session(place: Place, work: Work) -> None:
    """With a Session."""
    with Session(place.engine) as session, session.begin():
        work(session, lambda statement: session.execute(text(statement)))


@asynccontextmanager
async def async_engine_on(place: Place, driver: str) -> AsyncIterator[AsyncEngine]:
    """A program's async engine."""
    engine = create_async_engine(make_url(place.url).set(drivername=driver))
    try:
        yield engine
    finally:
        await engine.dispose()


def by_async_connection(driver: str) -> Callable[[Place, Work], None]:
    """With what an AsyncConnection gives to `run_sync`."""

    async def run(place: Place, work: Work) -> None:
        async with async_engine_on(place, driver) as engine, engine.begin() as connection:
            await connection.run_sync(_with_text, work)

    return lambda place, work: asyncio.run(run(place, work))


def by_async_session(driver: str) -> Callable[[Place, Work], None]:
    """With what an AsyncSession gives to `run_sync`."""

    async def run(place: Place, work: Work) -> None:
        async with (
            async_engine_on(place, driver) as engine,
            AsyncSession(engine) as session,
            session.begin(),
        ):
            await session.run_sync(_with_text, work)

    return lambda place, work: asyncio.run(run(place, work))


def _with_text(handed: Connection | Session, work: Work) -> None:
    work(handed, lambda statement: handed.execute(text(statement)))


# ---- Drivers -----------------------------------------------------------------------------------


def by_psycopg(place: Place, work: Work) -> None:
    """With a connection of psycopg, whose rows and cursors are as the program wants them."""
    rows: Any = psycopg.rows.dict_row
    cursors: Any = psycopg.ClientCursor
    with psycopg.connect(place.url, row_factory=rows, cursor_factory=cursors) as connection:
        work(connection, connection.execute)


def by_psycopg_autocommit(place: Place, work: Work) -> None:
    """With psycopg's transaction block on a connection that else commits each statement."""
    with psycopg.connect(place.url, autocommit=True) as connection, connection.transaction():
        work(connection, connection.execute)


def by_psycopg2(place: Place, work: Work) -> None:
    """With a connection of psycopg2."""
    with (
        closing(psycopg2.connect(place.url)) as connection,
        connection,
        connection.cursor() as cursor,
    ):
        work(connection, cursor.execute)


def by_pymysql(place: Place, work: Work) -> None:
    """With a connection of PyMySQL, whose rows are as the program wants them."""
    at = make_url(place.url)
    with pymysql.connect(
        host=at.host,
        port=at.port or 3306,
        user=at.username,
        password=at.password or "",
        database=at.database,
        cursorclass=pymysql.cursors.DictCursor,
    ) as connection:
        with connection.cursor() as cursor:
            work(connection, cursor.execute)
        connection.commit()


def by_sqlite3(place: Place, work: Work) -> None:
    """With a connection of sqlite3, whose rows are as the program wants them."""
    file = make_url(place.url).database
    assert file is not None
    with closing(sqlite3.connect(file)) as connection, connection:
        connection.row_factory = lambda _, row: dict(enumerate(row, start=1))
        work(connection, connection.execute)


# ---- Django ------------------------------------------------------------------------------------


def by_django(place: Place, work: Work) -> None:
    """With Django's connection, inside `atomic`."""
    from django.db import transaction

    with (
        django_connection(place) as connection,
        transaction.atomic(connection.alias),
        connection.cursor() as cursor,
    ):
        work(connection, cursor.execute)


@contextmanager
def django_connection(place: Place) -> Iterator[Any]:
    """Django's connection to a database, under an alias of its own."""
    from django.db import connections

    set_up_django()
    at = make_url(place.url)
    engines = {"postgresql": "postgresql", "sqlite": "sqlite3"}
    connections.settings[place.kind] = connections.configure_settings(
        {
            "default": {},
            place.kind: {
                "ENGINE": f"django.db.backends.{engines[place.kind]}",
                "NAME": at.database,
                "USER": at.username,
                "PASSWORD": at.password,
                "HOST": at.host,
                "PORT": at.port,
            },
        }
    )[place.kind]
    try:
        yield connections[place.kind]
    finally:
        connections[place.kind].close()
        del connections[place.kind]


CALLERS: dict[str, tuple[str, Callable[[Place, Work], None]]] = {
    "sqlite connection": ("sqlite", by_connection("sqlite+pysqlite")),
    "sqlite session": ("sqlite", by_session),
    "aiosqlite connection": ("sqlite", by_async_connection("sqlite+aiosqlite")),
    "aiosqlite session": ("sqlite", by_async_session("sqlite+aiosqlite")),
    "sqlite3": ("sqlite", by_sqlite3),
    "sqlite django": ("sqlite", by_django),
    "psycopg connection": ("postgresql", by_connection("postgresql+psycopg")),
    "psycopg session": ("postgresql", by_session),
    "psycopg2 connection": ("postgresql", by_connection("postgresql+psycopg2")),
    "async psycopg connection": ("postgresql", by_async_connection("postgresql+psycopg")),
    "asyncpg connection": ("postgresql", by_async_connection("postgresql+asyncpg")),
    "asyncpg session": ("postgresql", by_async_session("postgresql+asyncpg")),
    "psycopg": ("postgresql", by_psycopg),
    "psycopg autocommit": ("postgresql", by_psycopg_autocommit),
    "psycopg2": ("postgresql", by_psycopg2),
    "postgresql django": ("postgresql", by_django),
    "pymysql connection": ("mysql", by_connection("mysql+pymysql")),
    "pymysql session": ("mysql", by_session),
    "asyncmy connection": ("mysql", by_async_connection("mysql+asyncmy")),
    "asyncmy session": ("mysql", by_async_session("mysql+asyncmy")),
    "pymysql": ("mysql", by_pymysql),
}
"""The kind of database of each, and how a transaction is run."""
