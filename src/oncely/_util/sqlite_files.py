"""SQLite files that several processes write to: commits that last, and waiting for the lock."""

import os
import sqlite3
import time
from collections.abc import Callable
from typing import Any, TypeVar

from oncely._util.clock import monotonic

BUSY_TIMEOUT_S = 30.0
"""How long to wait for another process that writes to the same file."""
_PATIENT = f"PRAGMA busy_timeout = {BUSY_TIMEOUT_S * 1000:.0f}"
_LOCKED = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
_RETRY_S = 0.001

T = TypeVar("T")


def prepare(connection: Any) -> None:
    """Make a new connection of the driver fit for a file that others write to as well."""
    # A program may have another for all connections of SQLAlchemy.
    connection.text_factory = str
    connection.isolation_level = None  # Else it would begin transactions of its own.
    connection.execute(_PATIENT)
    switch_to_wal(connection)
    # A commit that a power cut can undo would run its message twice.
    connection.execute("PRAGMA synchronous = FULL")


def when_free(cursor: Any, write: Callable[[], T]) -> T:
    """What `write` returns: a statement that takes the file's one write lock, and does nothing
    where another connection holds that. Raises OperationalError where it stays locked.
    """
    # SQLite's own busy timeout sleeps for up to a tenth of a second at a time, while the lock may
    # be free; with two writers that halves the rate.
    deadline = None
    cursor.execute("PRAGMA busy_timeout = 0")
    try:
        while True:
            try:
                return write()
            except sqlite3.OperationalError as error:
                deadline = deadline or monotonic() + BUSY_TIMEOUT_S
                if not is_locked(error) or monotonic() > deadline:
                    raise
                time.sleep(_RETRY_S)
    finally:
        cursor.execute(_PATIENT)


def is_locked(error: Exception) -> bool:
    """Whether an error says that another connection writes to the file, or has written to it since
    this transaction began to read.
    """
    # The low byte: the rest says why it is locked, such as a recovery going on.
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in _LOCKED


def is_denied(error: Exception, file: str | None) -> bool:
    """Whether an error says that this process may not read and write the file, or its folder."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code != sqlite3.SQLITE_CANTOPEN or file is None:
        return code == sqlite3.SQLITE_READONLY
    # It says so, too, where no more files can be opened for now.
    folder = os.path.dirname(os.path.abspath(file))  # noqa: PTH100, PTH120 - often.
    is_hidden = os.path.exists(file) and not os.access(file, os.R_OK | os.W_OK)  # noqa: PTH110
    return is_hidden or not os.access(folder, os.W_OK | os.X_OK)


def switch_to_wal(connection: Any) -> None:
    """Set WAL mode, which stays with the file. Raises OperationalError where it stays locked."""
    # The switch needs the file exclusively, and SQLite does not apply the busy timeout to it.
    deadline = monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if is_denied(error, None) or monotonic() > deadline:
                raise
            time.sleep(0.02)
