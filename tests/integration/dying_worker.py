"""A worker that one of its messages kills, or that is killed from outside."""

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sqlalchemy import create_engine, text

from oncely import Consumer, Message, Policy, open_ledger

QUEUE, CONSUMER, TRIES, LEASE = "jobs", "campaign", 3, "2s"
INSERT = text("INSERT INTO effects (id) VALUES (:id)")


def engine_url(ledger_url: str) -> str:
    """The URL as SQLAlchemy wants it."""
    return ledger_url.replace("postgresql://", "postgresql+psycopg://")


def work(ledger_url: str, queue_url: str, kind: str, log: str, pause_s: str) -> None:
    """Handle all messages. Those whose body says so kill this process. Each run of a handler is a
    line of the log.
    """
    ledger, engine = open_ledger(ledger_url), create_engine(engine_url(ledger_url))
    consumer = Consumer(queue_url, QUEUE).tries(TRIES).backoff("100ms")
    consumer.idempotent(ledger, CONSUMER, policy=Policy(lease=LEASE))

    def begin(message: Message) -> None:
        with Path(log).open("a") as lines:
            print(message.id, os.getpid(), file=lines)
        time.sleep(float(pause_s))
        if message.body == b"abort":
            os.abort()
        if message.body == b"kill":
            os.kill(os.getpid(), signal.SIGKILL)

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
    handlers: dict[str, Any] = {"plain": plain, "transactional": joined, "together": together}
    consumer.consume(handlers[kind], drain=True)


if __name__ == "__main__":
    work(*sys.argv[1:])
