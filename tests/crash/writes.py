"""Writes as a crash point: a process that is watched reaches it before each of its writes."""

import re
import sqlite3
from typing import Any

import psycopg
from sqlalchemy import Engine, event

from oncely._util.crash_points import reached

POINT = "write"
_WRITE = re.compile(r"\s*(INSERT|UPDATE|DELETE|WITH|COMMIT)\b", re.IGNORECASE)


def watch(*engines: Engine) -> None:
    """From now on reach the point before each write of these, and of this process's queues."""
    for engine in engines:
        event.listen(engine, "connect", lambda connection, _: _watch(connection))
    connect = sqlite3.connect

    def watched(*args: Any, **options: Any) -> sqlite3.Connection:
        connection: sqlite3.Connection = connect(*args, **options)
        _watch(connection)
        return connection

    sqlite3.connect = watched  # type: ignore[assignment]


def _watch(connection: Any) -> None:
    if isinstance(connection, sqlite3.Connection):
        connection.set_trace_callback(_look_at)
    else:
        connection.cursor_factory = _Cursor


class _Cursor(psycopg.Cursor[Any]):
    def execute(self, query: Any, *args: Any, **options: Any) -> Any:
        _look_at(str(query))
        return super().execute(query, *args, **options)

    def executemany(self, query: Any, *args: Any, **options: Any) -> None:
        _look_at(str(query))
        super().executemany(query, *args, **options)


def _look_at(statement: str) -> None:
    if _WRITE.match(statement):
        reached(POINT)
