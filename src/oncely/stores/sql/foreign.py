"""Foreign: transactions that somebody else began, by what is handed over to join them."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.exc import InvalidRequestError
from sqlalchemy.orm import Session, scoped_session

from oncely.core.errors import ConfigError, EndedError
from oncely.stores.sql.drivers import driver_of

_WANTED = (
    "a SQLAlchemy Connection or Session (for asyncio an AsyncConnection or AsyncSession), "
    "django.db.connection, or a connection of psycopg, PyMySQL or sqlite3"
)


def _nothing() -> None:
    pass


class Foreign(ABC):
    """A transaction that its owner begins and ends, while it is joined.

    Raises ConfigError where there is none to join.
    """

    raw: Any
    """The driver's connection, or SQLAlchemy's adapter of an async one."""
    is_guarded = True
    """Whether a commit is refused while it is joined."""
    on_savepoint: Callable[[], None] = staticmethod(_nothing)
    on_undo: Callable[[], None] = staticmethod(_nothing)
    """What `Joined.watch` is given."""

    @property
    @abstractmethod
    def has_ended(self) -> bool:
        """Whether it can be told that it is over, or can only be rolled back."""

    def prepare(self) -> None:  # noqa: B027 - most are prepared.
        """Do what the owner has put off until the next statement."""

    def lose(self) -> None:  # noqa: B027 - others find out.
        """Let its owner know that the connection is gone."""

    def leave(self) -> None:  # noqa: B027 - not all watch their connection.
        """Watch it no more."""


def foreign(connection: Any) -> Foreign:
    """The transaction of what a caller has handed over."""
    if isinstance(connection, scoped_session):
        connection = connection()
    if isinstance(connection, (Connection, Session)):
        return _SqlAlchemy(connection)
    if hasattr(connection, "in_atomic_block"):
        return _Django(connection)
    driver = driver_of(connection)
    if driver is not None and driver.commits_each is not None:
        return _Bare(connection, driver.is_idle(connection) and driver.commits_each(connection))
    what = connection if isinstance(connection, type) else type(connection)
    raise ConfigError(f"transaction: {what.__name__} is no connection; hand over {_WANTED}")


# ---- SQLAlchemy --------------------------------------------------------------------------------


class _SqlAlchemy(Foreign):
    """That of a Connection, or of the one that a Session works on. One that waits is begun."""

    def __init__(self, connection: Connection | Session) -> None:
        self._session = connection if isinstance(connection, Session) else None
        self._is_told = False
        self._connection = _begun(connection)
        if self._connection._is_autocommit_isolation():
            raise ConfigError(
                "transaction: this connection commits each statement; take one whose isolation "
                "level is not AUTOCOMMIT"
            )
        self._transaction = (
            self._connection.get_nested_transaction() or self._connection.get_transaction()
        )
        self.raw = self._connection.connection.dbapi_connection
        those = _joined.setdefault(self._connection, [])
        if not those:
            _watch(self._connection)
        those.append(self)

    @property
    def has_ended(self) -> bool:
        return self._transaction is None or not self._transaction.is_active

    def prepare(self) -> None:
        # A session begins a savepoint with the first statement after it. We may be called from
        # there: it must not be asked again meanwhile.
        if self._session is not None and not self._is_told:
            self._session.connection()

    def tell_savepoint(self) -> None:
        """One is about to begin."""
        self._is_told = True
        try:
            self.on_savepoint()
        finally:
            self._is_told = False

    def lose(self) -> None:
        # Else its rollback would fail, and hide what it is told.
        self._connection.invalidate()

    def leave(self) -> None:
        those = _joined[self._connection]
        those.remove(self)
        if not those:
            del _joined[self._connection]
            _unwatch(self._connection)


def _begun(connection: Connection | Session) -> Connection:
    try:
        if isinstance(connection, Session):
            return connection.connection()
        if not connection.in_transaction():
            connection.begin()
        return connection
    except InvalidRequestError as error:
        raise ConfigError(f"transaction: this cannot be joined: {error}") from error


_joined: dict[Connection, list[_SqlAlchemy]] = {}


def _watch(connection: Connection) -> None:
    for name, tell in _TOLD.items():
        setattr(connection, name, partial(_told, tell, name, connection))


def _unwatch(connection: Connection) -> None:
    for name in _TOLD:
        delattr(connection, name)


def _told(tell: Callable[..., None], name: str, connection: Connection, *args: Any) -> Any:
    tell(connection, *args)
    return getattr(type(connection), name)(connection, *args)


def _on_commit(connection: Connection) -> None:
    if connection in _joined:
        # SQLAlchemy takes a commit that raises for the end, and would not roll back any more.
        connection.connection.rollback()
        raise _refusal()


def _on_prepare(connection: Connection, _: object) -> None:
    if connection in _joined:
        raise _refusal()


def _refusal() -> EndedError:
    return EndedError(
        "nothing is committed: the transaction is not to be ended inside the block that joined "
        "it; leave that to whoever began it"
    )


def _on_savepoint(connection: Connection, *_: object) -> None:
    for transaction in _joined.get(connection, ()):
        transaction.tell_savepoint()


def _on_undo(connection: Connection, *_: object) -> None:
    for transaction in _joined.get(connection, ()):
        transaction.on_undo()


_TOLD: dict[str, Callable[..., None]] = {
    "_commit_impl": _on_commit,
    "_prepare_twophase_impl": _on_prepare,
    "_savepoint_impl": _on_savepoint,
    "_rollback_to_savepoint_impl": _on_undo,
}
"""Methods of a Connection, and who is told before they do their work.

They are SQLAlchemy's own, for want of a cheaper way: an engine that is listened to takes an eighth
longer over each of its transactions, joined or not; to listen to one connection while it is joined
costs more than a statement does.
"""


# ---- Django ------------------------------------------------------------------------------------


class _Django(Foreign):
    """That of `atomic`, which itself forbids commit and rollback inside."""

    def __init__(self, connection: Any) -> None:
        if not connection.in_atomic_block:
            raise ConfigError(
                "transaction: no transaction of Django is open; write `with transaction.atomic():` "
                "around it"
            )
        self._connection = connection
        self.raw = connection.connection
        self._watching = connection.execute_wrapper(self._watch)
        self._watching.__enter__()

    @property
    def has_ended(self) -> bool:
        return bool(self._connection.needs_rollback or not self._connection.in_atomic_block)

    def leave(self) -> None:
        self._watching.__exit__(None, None, None)

    def _watch(self, execute: Any, sql: Any, *rest: Any) -> Any:
        if str(sql).startswith("SAVEPOINT"):
            self.on_savepoint()
        elif str(sql).startswith("ROLLBACK TO"):
            self.on_undo()
        return execute(sql, *rest)


# ---- Connections of drivers --------------------------------------------------------------------


class _Bare(Foreign):
    """That of a driver's own connection, which tells nobody of a commit."""

    is_guarded = False
    has_ended = False

    def __init__(self, connection: Any, commits_each: bool) -> None:
        if commits_each:
            raise ConfigError(
                "transaction: this connection commits each statement; switch autocommit off, or "
                "begin a transaction first"
            )
        self.raw = connection
