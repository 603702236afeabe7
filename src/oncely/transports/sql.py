"""A durable queue in one SQLite file that several processes share."""

import json
import logging
import os
import secrets
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from oncely._util import sqlite_files
from oncely.core.errors import PublishRefused, TransportError
from oncely.core.message import Message
from oncely.core.verdicts import Ack, DeadLetter, Delay, Requeue, Verdict
from oncely.transports.transport import Clock, DeadLettered, Delivery, Features, Limits, refusals

_log = logging.getLogger(__name__)

_POLL_S = 0.02
"""How often a receiver looks again: nobody tells it what another process has published."""

# A message waits from `visible_at` on (0: it has always been). One that is held or delayed has a
# `visible_at` to come; `holder` is who has received it. Ids are never given twice, so that a late
# settle never meets another message.
_SCHEMA = (
    """CREATE TABLE IF NOT EXISTS queue_messages (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        queue TEXT NOT NULL,
        visible_at REAL NOT NULL DEFAULT 0,
        holder TEXT,
        count INTEGER NOT NULL DEFAULT 0,
        envelope TEXT NOT NULL,
        body BLOB NOT NULL
    )""",
    "CREATE INDEX IF NOT EXISTS queue_messages_next ON queue_messages (queue, visible_at)",
    """CREATE TABLE IF NOT EXISTS queue_dead_letters (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        queue TEXT NOT NULL,
        reason TEXT NOT NULL,
        count INTEGER NOT NULL,
        envelope TEXT NOT NULL,
        body BLOB NOT NULL
    )""",
)
_PUBLISH = "INSERT INTO queue_messages (queue, envelope, body) VALUES (?, ?, ?)"
_IS_READY = "SELECT EXISTS (SELECT 1 FROM queue_messages WHERE queue = ? AND visible_at <= ?)"
_BRING_BACK = (
    "UPDATE queue_messages SET visible_at = 0, holder = NULL"
    " WHERE queue = ? AND visible_at > 0 AND visible_at <= ?"
)
_FIRST = (
    "SELECT id, count + 1, envelope, body FROM queue_messages"
    " WHERE queue = ? AND visible_at = 0 ORDER BY id LIMIT ?"
)
_HOLD = "UPDATE queue_messages SET count = ?, visible_at = ?, holder = ? WHERE id = ?"
_GIVE_BACK = (
    "UPDATE queue_messages SET visible_at = 0, holder = NULL"
    " WHERE queue = ? AND visible_at > 0 AND holder = ?"
)
_HELD = "id = ? AND count = ? AND holder = ?"
_REMOVE = f"DELETE FROM queue_messages WHERE {_HELD}"
_PUT_OFF = f"UPDATE queue_messages SET visible_at = ?, holder = NULL WHERE {_HELD}"
_SET_ASIDE = (
    "INSERT INTO queue_dead_letters (queue, reason, count, envelope, body)"
    f" SELECT queue, ?, count, envelope, body FROM queue_messages WHERE {_HELD}"
)
_IS_DRAINED = "SELECT NOT EXISTS (SELECT 1 FROM queue_messages WHERE queue = ?)"
_DEAD = (
    "SELECT envelope, body, queue, reason, count, id FROM queue_dead_letters"
    " WHERE queue = ? ORDER BY id LIMIT ?"
)
_PUBLISH_DEAD = (
    "INSERT INTO queue_messages (queue, envelope, body)"
    " SELECT queue, envelope, body FROM queue_dead_letters WHERE id = ?"
)
_REMOVE_DEAD = "DELETE FROM queue_dead_letters WHERE id = ?"


class SqliteTransport:
    """A connection to the queues in a file. `clock` tells seconds since 1970."""

    def __init__(self, file: Path, limits: Limits = Limits(), clock: Clock = time.time) -> None:
        self.features = Features(
            delays=True, ordered=True, counts_deliveries=True, **limits._asdict()
        )
        self._limits = limits
        self._file = file
        self._clock = clock
        self._link = _Link(file)

    def receive(self, queue: str, max_messages: int, wait_s: float) -> Sequence[Delivery]:
        until = time.monotonic() + wait_s
        link = self._linked()
        with suppress(_ClosedError):
            while not (taken := self._take(link, queue, max_messages)):
                left_s = until - time.monotonic()
                if left_s <= 0:
                    break
                time.sleep(min(left_s, _POLL_S))
            return taken
        return []

    def settle(self, verdicts: Sequence[tuple[Delivery, Verdict]]) -> None:
        with self._linked().writing() as connection:
            settled = [self._settle(connection, *pair) for pair in verdicts]
        if not all(settled):
            _log.info("settled_too_late", extra={"count": settled.count(False)})

    def publish(self, queue: str, messages: Sequence[Message]) -> None:
        refused = refusals(messages, self._limits.max_bytes)
        rows = [
            (queue, _encoded(message), message.body)
            for place, message in enumerate(messages)
            if place not in refused
        ]
        with self._linked().writing() as connection:
            connection.executemany(_PUBLISH, rows)
        if refused:
            raise PublishRefused(refused)

    def subscribe(self, queue: str, types: Sequence[str]) -> None:
        pass  # Whoever publishes names the queue.

    def is_drained(self, queue: str) -> bool:
        with self._linked().connected() as connection:
            return _said(connection, _IS_DRAINED, queue)

    def dead_letters(self, queue: str, limit: int = 100) -> Sequence[DeadLettered]:
        with self._linked().connected() as connection:
            rows = connection.execute(_DEAD, (queue, limit)).fetchall()
        return [DeadLettered(_decoded(envelope, body), *rest) for envelope, body, *rest in rows]

    def retry(self, letters: Sequence[DeadLettered]) -> int:
        ids = [(letter.tag,) for letter in letters]
        with self._linked().writing() as connection:
            connection.executemany(_PUBLISH_DEAD, ids)
            return connection.executemany(_REMOVE_DEAD, ids).rowcount

    def close(self) -> None:
        link = self._linked()
        self._link = _Link(self._file)
        link.close()

    def _linked(self) -> "_Link":
        if self._link.pid != os.getpid():
            # A forked child: SQLite's connections, and the deliveries, are the parent's.
            self._link = _Link(self._file)
        return self._link

    def _take(self, link: "_Link", queue: str, limit: int) -> Sequence[Delivery]:
        # Whoever waits must not keep those from writing who have something to write.
        with link.connected() as connection:
            if not _said(connection, _IS_READY, queue, self._clock()):
                return []
        with link.writing() as connection:
            now = self._clock()
            connection.execute(_BRING_BACK, (queue, now))
            rows = connection.execute(_FIRST, (queue, limit)).fetchall()
            until = now + self._limits.visibility_s
            held = [(count, until, link.holder, id_) for id_, count, _, _ in rows]
            connection.executemany(_HOLD, held)
            link.queues.add(queue)
        return [
            Delivery(_decoded(envelope, body), queue, count, (id_, count, link.holder))
            for id_, count, envelope, body in rows
        ]

    def _settle(self, connection: sqlite3.Connection, delivery: Delivery, verdict: Verdict) -> bool:
        """Whether it was still held, as it was delivered."""
        held = delivery.tag
        match verdict:
            case Ack():
                done = connection.execute(_REMOVE, held)
            case Requeue():
                done = connection.execute(_PUT_OFF, (0, *held))
            case Delay(delay_s):
                done = connection.execute(_PUT_OFF, (self._clock() + delay_s, *held))
            case DeadLetter(reason):
                connection.execute(_SET_ASIDE, (reason, *held))
                done = connection.execute(_REMOVE, held)
        return done.rowcount == 1


class _ClosedError(TransportError):
    """The link was closed by another thread."""


class _Link:
    """A connection to the file, which threads use one after another."""

    def __init__(self, file: Path) -> None:
        self.pid = os.getpid()
        self.holder = secrets.token_hex(8)
        """Under which deliveries are held that were received through this."""
        self.queues: set[str] = set()
        """From which they were received."""
        self._file = file
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._is_closed = False

    @contextmanager
    def connected(self) -> Iterator[sqlite3.Connection]:
        """The connection. Raises TransportError for what goes wrong with it."""
        with self._lock, self._ended_by_errors():
            if self._is_closed:
                raise _ClosedError(f"{self._file}: the transport was closed meanwhile")
            yield self._connect()

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """The connection, in a transaction that holds the file's one write lock."""
        with self.connected() as connection:
            sqlite_files.begin(connection)
            yield connection
            connection.execute("COMMIT")

    def close(self) -> None:
        """Give back what is held; from now on nobody can use this."""
        with self._lock, self._ended_by_errors():
            self._is_closed = True
            if self._connection is not None:
                held = [(queue, self.holder) for queue in self.queues]
                self._connection.executemany(_GIVE_BACK, held)
                self._disconnect()

    def _connect(self) -> sqlite3.Connection:
        if self._connection is None:
            self._connection = sqlite3.connect(self._file, check_same_thread=False)
            sqlite_files.prepare(self._connection)
            for statement in _SCHEMA:
                self._connection.execute(statement)
        return self._connection

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    @contextmanager
    def _ended_by_errors(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            # A transaction that was broken off, by whatever, ends with its connection.
            self._disconnect()
            if isinstance(error, sqlite3.Error):
                raise TransportError(f"{self._file}: {error}") from error
            raise


def _encoded(message: Message) -> str:
    """All of `message` but its body, as one JSON object. Pure ASCII, whatever is in it."""
    return json.dumps(
        {
            "id": message.id,
            "type": message.type,
            "headers": dict(message.headers),
            "source": message.source,
            "time": message.time and message.time.isoformat(),
            "content_type": message.content_type,
            "key": message.key,
        }
    )


def _decoded(envelope: str, body: bytes) -> Message:
    fields = json.loads(envelope)
    time = fields.pop("time")
    return Message(body=body, time=time and datetime.fromisoformat(time), **fields)


def _said(connection: sqlite3.Connection, question: str, *values: object) -> bool:
    """What the database answers to a question of yes or no."""
    return bool(connection.execute(question, values).fetchone()[0])
