"""Transactions that callers began, one class for each kind of connection."""

import sqlite3
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.exc import InvalidRequestError, SQLAlchemyError
from sqlalchemy.orm import Session, scoped_session

from oncely.core.errors import ConfigError
from oncely.stores.sql.drivers import driver_of, own_connection

_WANTED = (
    "a SQLAlchemy Connection or Session (for asyncio an AsyncConnection or AsyncSession), "
    "django.db.connection, or a connection of psycopg, PyMySQL or sqlite3"
)


class JoinedConnection(ABC):
    """A transaction that its owner begins and ends, while it is joined.

    Raises ConfigError where there is none to join.
    """

    raw: Any
    """The driver's connection, or SQLAlchemy's adapter of an async one."""

    @property
    @abstractmethod
    def has_ended(self) -> bool:
        """Whether its owner knows that it is over, or can only be rolled back. Then `raw` may
        already be in use by others.
        """

    def prepare(self) -> None:  # noqa: B027 - most are prepared.
        """Do what the owner has put off until the next statement."""

    def lose(self) -> None:  # noqa: B027 - other owners find out by themselves.
        """Tell its owner that the connection is gone."""


def foreign(connection: Any) -> JoinedConnection:
    """The transaction of a connection or session that a caller has handed over."""
    if isinstance(connection, scoped_session):
        connection = connection()
    if isinstance(connection, (Connection, Session)):
        return _SqlAlchemy(connection)
    if hasattr(connection, "in_atomic_block"):
        return _Django(connection)
    if driver_of(connection) is not None and own_connection(connection) is connection:
        return _Bare(connection)
    what = connection if isinstance(connection, type) else type(connection)
    raise ConfigError(f"transaction: {what.__name__} is not a connection; hand over {_WANTED}")


class _SqlAlchemy(JoinedConnection):
    """The transaction of a Connection, or of a Session's. One that has not begun is begun."""

    def __init__(self, connection: Connection | Session) -> None:
        self._session = connection if isinstance(connection, Session) else None
        self._connection = _begun(connection)
        self._transaction = (
            self._connection.get_nested_transaction() or self._connection.get_transaction()
        )
        self.raw = self._connection.connection.dbapi_connection

    @property
    def has_ended(self) -> bool:
        return (
            self._transaction is None
            or not self._transaction.is_active
            or self._connection.closed
            or self._connection.invalidated
        )

    def prepare(self) -> None:
        # A session begins a savepoint with the first statement after it.
        if self._session is not None:
            self._session.connection()

    def lose(self) -> None:
        # Else its rollback would fail, and that error would hide the one that is raised.
        if self._connection.closed or self._connection.invalidated:
            return
        try:
            if self._connection.dialect.name == "sqlite":
                # Closing it leaves the file locked while anyone has a cursor, as a traceback does.
                with suppress(SQLAlchemyError, sqlite3.Error):
                    self.raw.rollback()
        finally:
            self._connection.invalidate()


def _begun(connection: Connection | Session) -> Connection:
    try:
        if isinstance(connection, Session):
            return connection.connection()
        if not connection.in_transaction():
            connection.begin()
        return connection
    except InvalidRequestError as error:
        raise ConfigError(f"transaction: this cannot be joined: {error}") from error


class _Django(JoinedConnection):
    """The transaction of Django's `atomic`, which itself forbids commit and rollback inside."""

    def __init__(self, connection: Any) -> None:
        if not connection.in_atomic_block:
            raise ConfigError(
                "transaction: no transaction of Django is open; write `with transaction.atomic():` "
                "around it"
            )
        self._connection = connection
        self.raw = connection.connection

    @property
    def has_ended(self) -> bool:
        return bool(self._connection.needs_rollback or not self._connection.in_atomic_block)

    def lose(self) -> None:
        # Django would keep it: it looks for ended connections only, and after a request only.
        self._connection.close()


class _Bare(JoinedConnection):
    """The transaction of a driver's own connection."""

    has_ended = False

    def __init__(self, connection: Any) -> None:
        self.raw = connection
