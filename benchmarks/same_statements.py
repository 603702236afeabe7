"""What a store sends for a claim and a completion, sent by its driver alone.

The exchanges are recorded while the ledger itself makes them on the table that is measured: their
texts, their order, and the shape of their parameters. So they cannot drift from the ledger's.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from unittest.mock import patch
from uuid import uuid4

from sqlalchemy import Connection

from loads import Window
from oncely import Granted, Key, Ledger
from oncely.stores import redis_server

_WARM_BATCHES = 2
"""The first claim also asks for things that are then known."""

Fill = Callable[[Sequence[str]], Any]
"""The parameters for the messages with these ids."""


class Recorded(ABC):
    """The exchanges for a claim and a completion of so many new messages."""

    @abstractmethod
    def connect(self) -> Window:
        """A bare connection of its own, which sends them for other messages."""


def recorded(ledger: Ledger, url: str, size: int) -> Recorded:
    """What the ledger at `url` sends for so many new messages at a time."""
    for _ in range(_WARM_BATCHES):
        _process(ledger, _new_ids(size))
    ids = _new_ids(size)
    kind = _OfRedis if url.startswith("redis:") else _OfSql
    return kind(url, ids, lambda: _process(ledger, ids))


def _new_ids(size: int) -> list[str]:
    return sorted(str(uuid4()) for _ in range(size))


def _process(ledger: Ledger, ids: Sequence[str]) -> None:
    keys = [Key("bench", message_id) for message_id in ids]
    outcomes = ledger.claim_many(keys) if len(keys) > 1 else [ledger.claim(keys[0])]
    claims = [outcome.claim for outcome in outcomes if isinstance(outcome, Granted)]
    if len(claims) > 1:
        ledger.complete_many(claims)
    else:
        ledger.complete(claims[0])


def _check_writes(count: int) -> None:
    """Raise RuntimeError unless all was recorded: the claim and the completion each write once."""
    if count != 2:
        raise RuntimeError(f"a claim and a completion of new messages have written {count} times")


# ---- Databases -------------------------------------------------------------------------------


class _Exchange(NamedTuple):
    statement: str
    values: Any
    options: Mapping[str, Any]
    rows: int
    """How many the statement wrote."""


class _OfSql(Recorded):
    def __init__(self, _: str, ids: Sequence[str], process: Callable[[], None]) -> None:
        self._pool: Any = None
        exchanges: list[_Exchange] = []

        pooled: Any = Connection.connection

        def recording(link: Connection) -> _Pooled:
            self._pool = link.engine.pool
            return _Pooled(pooled.fget(link), exchanges)

        with patch.object(Connection, "connection", property(recording)):
            process()
        _check_writes(sum(exchange.rows == len(ids) for exchange in exchanges))
        self._exchanges = [(exchange, _filled(exchange.values, ids)) for exchange in exchanges]

    def connect(self) -> Window:
        # As the engine makes its connections, so with the same settings.
        pooled = self._pool.recreate().connect()
        cursor = pooled.driver_connection.cursor()
        pooled.detach()

        def window(ids: Sequence[str]) -> None:
            ids = sorted(ids)
            for (statement, _, options, rows), fill in self._exchanges:
                cursor.execute(statement, fill(ids), **options)
                if cursor.rowcount != rows:
                    raise RuntimeError(f"{cursor.rowcount} rows, not {rows}: {statement}")

        return window


class _Pooled:
    """A connection of the pool, whose cursors are recorded."""

    def __init__(self, connection: Any, exchanges: list[_Exchange]) -> None:
        self._connection = connection
        self._exchanges = exchanges

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def cursor(self) -> "_Cursor":
        return _Cursor(self._connection.cursor(), self._exchanges)


class _Cursor:
    """A cursor of the driver, whose exchanges are recorded."""

    def __init__(self, cursor: Any, exchanges: list[_Exchange]) -> None:
        self._cursor = cursor
        self._exchanges = exchanges

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cursor, name)

    def execute(self, statement: str, values: Any = (), **options: Any) -> Any:
        answer = self._cursor.execute(statement, values, **options)
        # How long to wait for SQLite's lock: a bare connection waits as its driver does.
        if not statement.startswith("PRAGMA"):
            rows = self._cursor.rowcount
            self._exchanges.append(_Exchange(statement, values, options, rows))
        return answer


def _filled(values: Any, ids: Sequence[str]) -> Fill:
    """Fills in other ids where these are."""
    if ids[0] not in repr(values):
        return lambda _: values
    if "rows" in values and ids[0] in values["rows"]:
        given = json.loads(values["rows"])
        if given == ids:
            return lambda others: {**values, "rows": json.dumps(others, ensure_ascii=False)}
        if given == [[message_id] for message_id in ids]:
            return lambda others: {
                **values,
                "rows": json.dumps([*zip(others, strict=True)], ensure_ascii=False),
            }
    elif values.get("message_id") == ids:
        return lambda others: {**values, "message_id": others}
    elif values.get("message_id") == ids[0]:
        return lambda others: {**values, "message_id": others[0]}
    raise RuntimeError(f"not only the ids differ from message to message: {values!r:.300}")


# ---- Redis -----------------------------------------------------------------------------------


class _OfRedis(Recorded):
    def __init__(self, url: str, ids: Sequence[str], process: Callable[[], None]) -> None:
        self._url = url
        self._calls: list[tuple[Sequence[str], Mapping[str, Any]]] = []
        call = redis_server._call

        def recording(connection: Any, *words: str) -> Any:
            *before, asked = words
            values = json.loads(asked)
            if values["ids"] != ids:
                raise RuntimeError(f"not a call for these messages: {asked:.300}")
            self._calls.append((before, values))
            return call(connection, *words)

        with patch.object(redis_server, "_call", recording):
            process()
        _check_writes(len(self._calls))

    def connect(self) -> Window:
        import redis

        client: Any = redis.Redis.from_url(self._url, protocol=2, decode_responses=True)

        def window(ids: Sequence[str]) -> None:
            for words, values in self._calls:
                written = client.execute_command(*words, json.dumps({**values, "ids": ids}))
                if written != "1" * len(ids):
                    raise RuntimeError(f"not all were written by {words[:2]}")

        return window
