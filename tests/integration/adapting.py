"""What tests of the adapters share: effects that are counted, workers in processes."""

import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pika
from pika.adapters.blocking_connection import BlockingChannel
from sqlalchemy import text
from tests.conditions import LIMIT_S
from tests.records import record_of

from oncely.core.record import Key, Record
from oncely.ledger.ledger import Ledger

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


WRITE = text("INSERT INTO effects VALUES (:name)")
"""Into the rows of a `Place`."""


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
