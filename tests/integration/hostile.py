"""Handlers that do to their transaction what real code does: a table of them."""

import os
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import Enum, auto
from typing import Any, NamedTuple

import pytest
from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from tests.conditions import wait_until
from tests.records import granted

from oncely.core.commands import Busy
from oncely.core.record import Key
from oncely.ledger.ledger import Ledger
from oncely.testing import ManualClock

CONSUMER = "billing"
_DEADLINE_S = 120


class End(Enum):
    """What comes of a hostile run."""

    DONE = auto()
    """It is stored, and recorded."""
    UNDONE = auto()
    """Nothing of it is stored, which is known: the message runs again at once."""
    DOUBT = auto()
    """Nobody knows what of it is stored, and its record says so."""


class Scene(NamedTuple):
    """Where a handler is at work."""

    kind: str
    clock: ManualClock
    """The ledger's."""
    ledger: Ledger
    engine: Engine
    """The one that its transaction is of."""
    other: Engine
    """Of another program, on the same database."""
    message_id: str


Act = Callable[[Scene, Connection], object]


class Hostile(NamedTuple):
    """What a handler does between its first effect and its second, and what comes of it."""

    act: Act
    ends: Mapping[str, End]
    """By the kind of database."""
    comes_last: bool = False
    """After both effects."""


# ---- Ends of the transaction -------------------------------------------------------------------


def _says(*statements: str) -> Act:
    """By raw text."""

    def act(_: Scene, connection: Connection) -> None:
        for statement in statements:
            connection.exec_driver_sql(statement)

    return act


def _swallows(*statements: str) -> Act:
    def act(scene: Scene, connection: Connection) -> None:
        with suppress(SQLAlchemyError):
            _says(*statements)(scene, connection)

    return act


def _raises_after(act: Act) -> Act:
    def raising(scene: Scene, connection: Connection) -> None:
        act(scene, connection)
        raise ValueError("declined")

    return raising


def _driver(connection: Connection) -> Any:
    return connection.connection.driver_connection


# ---- Errors of the database --------------------------------------------------------------------


def _deadlock(scene: Scene, connection: Connection) -> None:
    """Is chosen as its victim, and goes on."""
    holds, ended = threading.Event(), threading.Event()

    def hold() -> None:
        with scene.other.begin() as other:
            if scene.kind == "mysql":
                # The server takes the transaction that has written less.
                for _ in range(3):
                    other.execute(text("INSERT INTO heavy SELECT 0 FROM heavy LIMIT 200"))
            other.execute(text("UPDATE accounts SET total = total + 1 WHERE id = 1"))
            holds.set()
            other.execute(text("UPDATE accounts SET total = total + 1 WHERE id = 0"))
        ended.set()

    if scene.kind == "postgresql":
        connection.execute(text("SET LOCAL deadlock_timeout = '50ms'"))
    connection.execute(text("UPDATE accounts SET total = total + 1 WHERE id = 0"))
    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    assert holds.wait(_DEADLINE_S)
    _await_lock(scene)
    with pytest.raises(DBAPIError) as victim:
        connection.execute(text("UPDATE accounts SET total = total + 1 WHERE id = 1"))
    assert scene.ledger.is_contention(victim.value)
    assert ended.wait(_DEADLINE_S)


def _await_lock(scene: Scene) -> None:
    """Wait until the other waits for a lock."""
    waiting = {
        "postgresql": "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
        " AND datname = current_database()",
        "mysql": "SELECT count(*) FROM information_schema.innodb_trx WHERE trx_state = 'LOCK WAIT'",
    }[scene.kind]
    with scene.other.execution_options(isolation_level="AUTOCOMMIT").connect() as connection:
        wait_until(
            lambda: connection.exec_driver_sql(waiting).scalar_one(),
            pause_s=0.15,  # MariaDB looks again only after a tenth of a second.
        )


def _lock_timeout(scene: Scene, connection: Connection) -> None:
    if scene.kind == "postgresql":
        connection.execute(text("SET LOCAL lock_timeout = '50ms'"))
    else:
        connection.execute(text("SET innodb_lock_wait_timeout = 1"))
    locked = "SELECT total FROM accounts WHERE id = 0 FOR UPDATE"
    with scene.other.begin() as other:
        other.execute(text(locked))
        with suppress(DBAPIError):
            connection.execute(text(locked))
            raise AssertionError("it was not locked")


_TIMEOUT = {
    "postgresql": ("SET LOCAL statement_timeout = '50ms'", "SELECT pg_sleep(5)"),
    "mysql": ("SET STATEMENT max_statement_time = 0.05 FOR SELECT SLEEP(5)",),
}


# ---- The connection ----------------------------------------------------------------------------


def _autocommit(_: Scene, connection: Connection) -> None:
    """Switched on in the driver, where that lets it be."""
    own = _driver(connection)
    with suppress(Exception):
        if hasattr(own, "get_autocommit"):
            own.autocommit(True)
        elif hasattr(own, "in_transaction"):
            own.isolation_level = None
        else:
            own.autocommit = True


def _autocommit_after_rollback(scene: Scene, connection: Connection) -> None:
    """What it writes then is stored by itself."""
    _driver(connection).rollback()
    _autocommit(scene, connection)


def _isolation_level(_: Scene, connection: Connection) -> None:
    with suppress(SQLAlchemyError):
        connection.execution_options(isolation_level="SERIALIZABLE")


# ---- Savepoints, threads, processes ------------------------------------------------------------


def _savepoints(_: Scene, connection: Connection) -> None:
    connection.exec_driver_sql("SAVEPOINT mine")
    connection.execute(text("INSERT INTO noise VALUES (1)"))
    connection.exec_driver_sql("ROLLBACK TO SAVEPOINT mine")
    with suppress(ZeroDivisionError), connection.begin_nested():
        connection.execute(text("INSERT INTO noise VALUES (1)"))
        raise ZeroDivisionError
    with connection.begin_nested():
        pass


def _thread(scene: Scene, _: Connection) -> None:
    if scene.kind == "sqlite":
        return  # It would wait for the file's one lock.

    def work() -> None:
        key = Key(CONSUMER, f"{scene.message_id} in a thread")
        scene.ledger.complete(granted(scene.ledger.claim(key)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(_DEADLINE_S)
    assert not thread.is_alive()


def _fork(_: Scene, __: Connection) -> None:
    child = os.fork()
    if child == 0:
        sys.exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def _fork_and_return(_: Scene, connection: Connection) -> None:
    child = os.fork()
    if child == 0:
        # The child goes on, too, but must not write through its parent's connection.
        connection.execute = lambda *_: None  # type: ignore[assignment,method-assign]
        return
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# ---- The ledger within itself ------------------------------------------------------------------


def _same_key(scene: Scene, connection: Connection) -> None:
    with scene.ledger.transaction(connection) as inbox:
        assert isinstance(inbox.claim(Key(CONSUMER, scene.message_id)), Busy)


def _another_key(scene: Scene, connection: Connection) -> None:
    with scene.ledger.transaction(connection) as inbox:
        inbox.complete(granted(inbox.claim(Key(CONSUMER, f"{scene.message_id} within"))))


def _another_transaction(scene: Scene, _: Connection) -> None:
    key = Key(CONSUMER, f"{scene.message_id} beside")
    with scene.other.begin() as other, scene.ledger.transaction(other) as inbox:
        inbox.complete(granted(inbox.claim(key)))


def _all(end: End) -> Mapping[str, End]:
    return dict.fromkeys(("postgresql", "mysql", "sqlite"), end)


def _on(**ends: End) -> Mapping[str, End]:
    return ends


_DDL = "ALTER TABLE noise ADD COLUMN more INTEGER"

HANDLERS: Mapping[str, Hostile] = {
    # It ends the transaction.
    "commits": Hostile(lambda _, c: c.commit(), _all(End.DOUBT)),
    "commits by text": Hostile(_says("COMMIT"), _all(End.DOUBT)),
    "commits and begins": Hostile(_says("COMMIT", "BEGIN"), _all(End.DOUBT)),
    "commits by the driver": Hostile(lambda _, c: _driver(c).commit(), _all(End.DOUBT)),
    "commits and raises": Hostile(_raises_after(_says("COMMIT")), _all(End.DOUBT)),
    "commits, last": Hostile(lambda _, c: c.commit(), _all(End.DOUBT), comes_last=True),
    "commits by text, last": Hostile(_says("COMMIT"), _all(End.DOUBT), comes_last=True),
    # SQLAlchemy lets nothing be done after it.
    "rolls back": Hostile(lambda _, c: c.rollback(), _all(End.UNDONE)),
    "rolls back, last": Hostile(lambda _, c: c.rollback(), _all(End.DOUBT), comes_last=True),
    "rolls back by text": Hostile(_says("ROLLBACK"), _all(End.DOUBT)),
    "rolls back and begins": Hostile(_says("ROLLBACK", "BEGIN"), _all(End.DOUBT)),
    "rolls back by the driver": Hostile(lambda _, c: _driver(c).rollback(), _all(End.DOUBT)),
    "rolls back and raises": Hostile(_raises_after(_says("ROLLBACK")), _all(End.UNDONE)),
    # It commits implicitly.
    "DDL": Hostile(_says(_DDL), _on(mysql=End.DOUBT, postgresql=End.DONE, sqlite=End.DONE)),
    "DDL and raises": Hostile(
        _raises_after(_says(_DDL)),
        _on(mysql=End.DOUBT, postgresql=End.UNDONE, sqlite=End.UNDONE),
    ),
    "TRUNCATE": Hostile(_says("TRUNCATE noise"), _on(mysql=End.DOUBT, postgresql=End.DONE)),
    "TRUNCATE and raises": Hostile(
        _raises_after(_says("TRUNCATE noise")), _on(mysql=End.DOUBT, postgresql=End.UNDONE)
    ),
    "LOCK TABLES": Hostile(_says("LOCK TABLES effects WRITE"), _on(mysql=End.DOUBT)),
    "LOCK TABLES and raises": Hostile(
        _raises_after(_says("LOCK TABLES effects WRITE")), _on(mysql=End.DOUBT)
    ),
    "ALTER USER": Hostile(_says("ALTER USER current_user() ACCOUNT UNLOCK"), _on(mysql=End.DOUBT)),
    "BEGIN": Hostile(
        _swallows("BEGIN"), _on(mysql=End.DOUBT, postgresql=End.DONE, sqlite=End.DONE)
    ),
    # It swallows what the database says.
    "deadlock": Hostile(_deadlock, _on(mysql=End.DOUBT, postgresql=End.UNDONE)),
    "lock timeout": Hostile(_lock_timeout, _on(mysql=End.DONE, postgresql=End.UNDONE)),
    "statement timeout": Hostile(
        lambda scene, c: _swallows(*_TIMEOUT[scene.kind])(scene, c),
        _on(mysql=End.DONE, postgresql=End.UNDONE),
    ),
    "unique violation": Hostile(
        _swallows("INSERT INTO accounts VALUES (0, 0)"),
        _on(mysql=End.DONE, postgresql=End.UNDONE, sqlite=End.DONE),
    ),
    "unique violation that rolls back": Hostile(
        _swallows("INSERT OR ROLLBACK INTO accounts VALUES (0, 0)"), _on(sqlite=End.DOUBT)
    ),
    # It opens savepoints, and goes back to them.
    "savepoints": Hostile(_savepoints, _all(End.DONE)),
    # It meddles with the connection.
    "closes": Hostile(lambda _, c: c.close(), _all(End.UNDONE)),
    "closes, last": Hostile(lambda _, c: c.close(), _all(End.DOUBT), comes_last=True),
    "closes the driver's, last": Hostile(
        lambda _, c: _driver(c).close(), _all(End.DOUBT), comes_last=True
    ),
    "invalidates, last": Hostile(lambda _, c: c.invalidate(), _all(End.DOUBT), comes_last=True),
    "isolation level": Hostile(_isolation_level, _all(End.DONE)),
    "autocommit": Hostile(_autocommit, _on(mysql=End.DOUBT, postgresql=End.DONE, sqlite=End.DOUBT)),
    "autocommit after a rollback": Hostile(_autocommit_after_rollback, _all(End.DOUBT)),
    "SET ROLE": Hostile(_says("SET ROLE nobody_else"), _on(postgresql=End.DONE)),
    "DISCARD ALL": Hostile(_swallows("DISCARD ALL"), _on(postgresql=End.UNDONE)),
    "DISCARD ALL after a commit": Hostile(
        _says("COMMIT", "DISCARD ALL"), _on(postgresql=End.DOUBT)
    ),
    # It starts others.
    "thread": Hostile(_thread, _on(mysql=End.DONE, postgresql=End.DONE)),
    "fork": Hostile(_fork, _all(End.DONE)),
    "fork that returns": Hostile(_fork_and_return, _all(End.DONE)),
    # It takes the ledger within itself.
    "same key": Hostile(_same_key, _all(End.DONE)),
    "another key": Hostile(_another_key, _all(End.DONE)),
    "another transaction": Hostile(_another_transaction, _on(mysql=End.DONE, postgresql=End.DONE)),
}
