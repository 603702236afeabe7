"""A worker at a queue in PostgreSQL or Kafka, which is killed in the midst of its work."""

import sys
import time

import psycopg
from sqlalchemy import Connection, create_engine, text

from oncely import Consumer, Message, at_least_once, open_ledger
from oncely.core.errors import TransportError
from oncely.core.message import current

QUEUE, CONSUMER = "jobs", "campaign"
LEASE = "3s"
WINDOW = 10
FAILS_FIRST = 25
"""One message in so many fails once, and waits in the ledger for its next try."""
EFFECT = "INSERT INTO effects (id) VALUES ('{}')"


def consumer_at(url: str, transport: str) -> Consumer:
    """What all kinds of worker have in common."""
    consumer = (
        Consumer(transport, QUEUE)
        .idempotent(open_ledger(url), CONSUMER, policy=at_least_once(lease=LEASE))
        .tries(50)
        .backoff("100ms")
        .window(WINDOW)
    )
    return consumer.ordered() if transport.startswith("kafka:") else consumer


def work(url: str, kind: str, pause_s: float, transport: str) -> None:
    """Handle messages until it is stopped."""
    if kind == "transactional":
        engine = create_engine(url.replace("postgresql://", "postgresql+psycopg://"))

        def join(message: Message, connection: Connection) -> None:
            _take_time(message, pause_s)
            connection.execute(text(EFFECT.format(message.id)))

        while True:
            try:
                consumer_at(url, transport).transactional(engine).consume(
                    join, stop_on_signals=True
                )
                return
            except TransportError:
                time.sleep(0.1)  # The broker is away, and was when this began.
    else:
        with psycopg.connect(url, autocommit=True) as connection:

            def act(message: Message) -> None:
                _take_time(message, pause_s)
                connection.execute(EFFECT.format(message.id))

            consumer_at(url, transport).consume(act, stop_on_signals=True)


def _take_time(message: Message, pause_s: float) -> None:
    time.sleep(pause_s)
    if int(message.id) % FAILS_FIRST == 0 and current().claim.attempts == 1:
        raise ValueError("not yet")


if __name__ == "__main__":
    work(sys.argv[1], sys.argv[2], float(sys.argv[3]), sys.argv[4])
