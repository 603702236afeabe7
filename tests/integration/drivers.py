"""Connections as a program has them that knows nothing of oncely."""

from typing import TYPE_CHECKING, Any

import psycopg
import pymysql
from sqlalchemy import URL, Engine, create_engine, make_url

Psycopg = psycopg.Connection[tuple[Any, ...]]
if TYPE_CHECKING:
    PyMysql = pymysql.Connection[pymysql.cursors.Cursor]
else:
    PyMysql = pymysql.Connection  # At run time it takes no parameter.


def connect_postgresql(url: str, **settings: Any) -> Psycopg:
    """A connection that commits each statement."""
    return psycopg.connect(url, autocommit=True, **settings)


def connect_mysql(url: str, **settings: Any) -> PyMysql:
    """A connection that commits each statement."""
    at = make_url(url)
    assert at.username
    assert at.port
    return pymysql.connect(
        host=at.host,
        port=at.port,
        user=at.username,
        password=at.password or "",
        database=at.database,
        autocommit=True,
        **settings,
    )


def rows_of(connection: PyMysql, statement: str, *values: object) -> tuple[tuple[Any, ...], ...]:
    """What a statement returns."""
    with connection.cursor() as cursor:
        cursor.execute(statement, values)
        return cursor.fetchall()


DRIVERS = {"postgresql": "postgresql+psycopg", "mysql": "mysql+pymysql", "sqlite": "sqlite"}


def engine_on(url: str, **settings: Any) -> Engine:
    """An engine as a program has one that knows nothing of oncely."""
    at, more = as_a_program(url)
    return create_engine(at.set(drivername=DRIVERS[at.get_backend_name()]), **more, **settings)


def as_a_program(url: str) -> tuple[URL, dict[str, Any]]:
    """Where a ledger's URL leads, and the settings of an engine: behind a pooler it prepares
    nothing.
    """
    at = make_url(url)
    if "prepare_threshold" not in at.query:
        return at, {}
    threshold = {"prepare_threshold": None}
    return at.difference_update_query(list(threshold)), {"connect_args": threshold}
