"""A worker at a topic of Kafka, which is killed in the midst of its work."""

import sys
import time

from sqlalchemy import Connection, create_engine, text

from oncely import Consumer, Message, at_least_once, open_ledger
from oncely.core.errors import TransportError

QUEUE, CONSUMER = "kafka-jobs", "campaign"
LEASE = "10s"
EFFECT = text("INSERT INTO effects (id, key, number) VALUES (:id, :key, :number)")


def work(kafka: str, database: str) -> None:
    """Handle messages, each key's in their order, until it is stopped."""
    engine = create_engine(database.replace("postgresql://", "postgresql+psycopg://"))

    def join(message: Message, connection: Connection) -> None:
        number = message.json()["number"]
        connection.execute(EFFECT, {"id": message.id, "key": message.key, "number": number})

    consumer = Consumer(kafka, QUEUE).idempotent(
        open_ledger(database), CONSUMER, policy=at_least_once(lease=LEASE)
    )
    consumer.tries(100).backoff("100ms").window(50).concurrency(4).ordered()
    consumer.transactional(engine)
    while True:
        try:
            consumer.consume(join, stop_on_signals=True)
            return
        except TransportError:
            time.sleep(0.1)  # The broker is away, and was when this began.


if __name__ == "__main__":
    work(*sys.argv[1:])
