"""A worker that one of its messages kills, or that is killed from outside."""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sqlalchemy import create_engine, text

from oncely import Consumer, Message, Policy, effectively_once, open_ledger

QUEUE, CONSUMER, TRIES, LEASE = "jobs", "campaign", 3, "2s"
DEATHS: dict[str, Callable[[], object]] = {
    "abort": os.abort,
    "segfault": lambda: ctypes.string_at(0),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
}
"""Ways to die. The kernel kills in the last way whoever takes too much memory."""
INSERT = text("INSERT INTO effects (id) VALUES (:id)")


def engine_url(ledger_url: str) -> str:
    """The URL as SQLAlchemy wants it."""
    return ledger_url.replace("postgresql://", "postgresql+psycopg://")


def work(ledger_url: str, queue_url: str, kind: str, log: str, pause_s: str) -> None:
    """Handle all messages. Their bodies say what each run does, of which the last repeats: some
    kill this process. Each run of a handler is a line of the log.
    """
    ledger, engine = open_ledger(ledger_url), create_engine(engine_url(ledger_url))
    consumer = Consumer(queue_url, QUEUE).tries(TRIES).backoff("100ms")
    policy = effectively_once(lease=LEASE) if kind == "held" else Policy(lease=LEASE)
    consumer.idempotent(ledger, CONSUMER, policy=policy)

    def begin(message: Message) -> None:
        with Path(log).open("a") as lines:
            print(message.id, os.getpid(), file=lines)
        time.sleep(float(pause_s))
        said = message.body.decode().split()
        runs = [line.split()[0] for line in Path(log).read_text().splitlines()].count(message.id)
        what = said[min(runs, len(said)) - 1]
        if what in DEATHS:
            DEATHS[what]()
        if what == "raise":
            raise ValueError("not yet")

    def plain(message: Message) -> None:
        begin(message)
        with engine.begin() as connection:
            connection.execute(INSERT, {"id": message.id})

    def joined(message: Message, connection: Any) -> None:
        begin(message)
        connection.execute(INSERT, {"id": message.id})

    def together(messages: Sequence[Message], connection: Any) -> None:
        for message in messages:
            joined(message, connection)

    if kind != "plain":
        consumer.transactional(engine, together=kind == "together")
    handlers: dict[str, Any] = {"plain": plain, "together": together}
    consumer.consume(handlers.get(kind, joined), drain=True)


if __name__ == "__main__":
    work(*sys.argv[1:])
