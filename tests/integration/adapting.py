"""What tests of the adapters share: effects that are counted, workers in processes."""

import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pika
from pika.adapters.blocking_connection import BlockingChannel
from sqlalchemy import Engine, text
from tests.conditions import LIMIT_S
from tests.integration.drivers import engine_on
from tests.records import record_of

from oncely.core.record import Key, Record
from oncely.ledger.ledger import Ledger, open_ledger

ROOT = Path(__file__).parents[2]


class Effects:
    """What handlers have done, in a database of its own: each effect is stored at once."""

    def __init__(self, folder: Path | str) -> None:
        self._path = Path(folder) / "effects.db"
        with self._opened() as connection:
            connection.execute("CREATE TABLE IF NOT EXISTS effects (name TEXT)")

    def add(self, name: str) -> int:
        """Let it happen; how often it has happened now."""
        with self._opened() as connection:
            connection.execute("INSERT INTO effects VALUES (?)", (name,))
        return self.count(name)

    def count(self, name: str) -> int:
        """How often it has happened."""
        with self._opened() as connection:
            found = connection.execute("SELECT count(*) FROM effects WHERE name = ?", (name,))
            return int(found.fetchone()[0])

    @contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self._path, timeout=LIMIT_S)) as connection, connection:
            yield connection


def found(ledger: Ledger, consumer: str, message_id: str) -> Record:
    """The record of a message that has one."""
    return record_of(ledger, Key(consumer, message_id))


# ---- Rows beside the ledger --------------------------------------------------------------------


class Bank(NamedTuple):
    """A ledger, and rows in the same database."""

    ledger: Ledger
    engine: Engine

    def rows(self) -> list[str]:
        """What handlers have written, and is stored."""
        with self.engine.connect() as connection:
            return sorted(connection.scalars(text("SELECT name FROM rows_of_handlers")))


WRITE = text("INSERT INTO rows_of_handlers VALUES (:name)")


@contextmanager
def bank_at(url: str) -> Iterator[Bank]:
    """A bank without rows, in the database there."""
    engine = engine_on(url)
    with closing(open_ledger(url)) as ledger:
        ledger.migrate()
        with engine.begin() as connection:
            connection.execute(text("CREATE TABLE rows_of_handlers (name VARCHAR(255))"))
        yield Bank(ledger, engine)
    engine.dispose()


# ---- RabbitMQ ----------------------------------------------------------------------------------


@contextmanager
def channel_to(url: str) -> Iterator[BlockingChannel]:
    """A channel of a connection of its own."""
    connection = pika.BlockingConnection(pika.URLParameters(url))
    try:
        yield connection.channel()
    finally:
        # A test may have closed it, to see what goes back.
        if connection.is_open:
            connection.close()


def declare(channel: BlockingChannel, queue: str, dead: str) -> None:
    """A queue whose rejected messages go to `dead`."""
    channel.queue_declare(dead, durable=True)
    rejected = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": dead}
    channel.queue_declare(queue, durable=True, arguments={"x-queue-type": "quorum", **rejected})


def publish(
    channel: BlockingChannel,
    queue: str,
    message_id: str | None,
    body: bytes = b"",
    **properties: Any,
) -> None:
    """Publish one message to a queue."""
    written = pika.BasicProperties(message_id=message_id, **properties)
    channel.basic_publish("", queue, body, written)


def waiting(url: str, queue: str) -> int:
    """How many messages are in a queue, and with no consumer."""
    with channel_to(url) as channel:
        count: int = channel.queue_declare(queue, passive=True).method.message_count
        return count


# ---- Workers in processes ----------------------------------------------------------------------


@contextmanager
def process(
    *arguments: str, environment: Mapping[str, str], stderr: int | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """`python -m arguments`, with all that it starts killed in the end."""
    started = subprocess.Popen(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        stderr=stderr,
        start_new_session=True,
    )
    try:
        yield started
    finally:
        kill(started)


def kill(started: subprocess.Popen[bytes]) -> None:
    """Kill a process and all that it has started, which say nothing to anybody any more."""
    with suppress(ProcessLookupError):
        os.killpg(started.pid, signal.SIGKILL)
    started.wait(LIMIT_S)
