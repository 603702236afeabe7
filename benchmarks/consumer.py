"""A consumer on RabbitMQ and PostgreSQL, beside loops of the driver with and without a ledger.

All ways take the same messages out of a queue of their own, in turn, several rounds. What counts is
the median of the ratios within a round. Run with `make bench-consumer`.
"""

import argparse
import json
import logging
import statistics
import sys
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from random import Random

from rich.console import Console
from rich.table import Table
from sqlalchemy import Connection, text
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker
from tests import servers

import bare_pika
import hand_written
from oncely import Consumer, Message, open_transport
from shop import Shop

BODY = b"x" * 1024
COPIES = 0.1
ACKNOWLEDGED = 100
"""Together, by the driver alone."""
_COPIED_FROM = 1_000


class _Base(DeclarativeBase):
    pass


class Order(_Base):
    """A business row."""

    __tablename__ = "orders"

    id: Mapped[int] = mapped_column(primary_key=True)
    content: Mapped[str]


class Bench:
    """The servers, and what all ways share."""

    def __init__(self, stack: ExitStack, messages: int) -> None:
        self.messages = messages
        self.url = stack.enter_context(servers.Rabbitmq()).url
        database = stack.enter_context(servers.Postgresql()).url
        self.by_hand = hand_written.Postgresql(database)
        self.by_hand.prepare(0)
        self.shop = Shop(database)
        stack.callback(self.shop.close)
        self.shop.prepare()
        self._transport = open_transport(self.url)
        stack.callback(self._transport.close)
        self._numbers = count(1)
        self.ids: set[str] = set()
        """Of the messages of the queue that was filled last."""

    def fill(self, messages: int) -> str:
        """A queue with messages, some of them duplicates."""
        random = Random(messages)
        queue = f"bench-{next(self._numbers)}"
        ids: list[str] = []
        for _ in range(messages):
            is_copy = bool(ids) and random.random() < COPIES
            ids.append(random.choice(ids[-_COPIED_FROM:]) if is_copy else str(uuid.uuid4()))
        self.ids = set(ids)
        self._transport.subscribe(queue, [])
        self._transport.publish(queue, [Message(id_, BODY, "bench.message") for id_ in ids])
        return queue

    def consumer(self, queue: str, name: str = "bench") -> Consumer:
        """A consumer as users write it."""
        return Consumer(self.url, queue).idempotent(self.shop.ledger, name)


def acknowledging(bench: Bench, queue: str) -> None:
    """The limit: the driver alone."""
    bare_pika.take(bench.url, queue, bench.messages, together=ACKNOWLEDGED)


def seed(bench: Bench, queue: str) -> None:
    """The statements that teams write by hand, for each message."""
    bare_pika.take(bench.url, queue, bench.messages, bench.by_hand.connect())


def business(bench: Bench, queue: str) -> None:
    """An insert and its commit for each message; duplicates are not detected."""
    bare_pika.take(bench.url, queue, bench.messages, bench.shop.by_hand_alone())


def once(bench: Bench, queue: str) -> None:
    """A handler that does nothing."""
    bench.consumer(queue).consume(lambda _: None, drain=True)


def failing(percent: int) -> Callable[[Bench, str], None]:
    """A handler that fails for `percent` of the messages, until all others are handled."""

    def way(bench: Bench, queue: str) -> None:
        others = sum(not fails(id_, percent) for id_ in bench.ids)

        def handle(message: Message) -> None:
            nonlocal others
            if fails(message.id, percent):
                raise ValueError("no such customer")
            others -= 1
            if not others:
                consumer.stop()

        # Other ways are not to wait for messages that wait for a retry.
        consumer = bench.consumer(queue, queue)
        consumer.consume(handle)

    return way


def fails(message_id: str, percent: int) -> bool:
    """Whether a message is to fail."""
    return int(message_id[:8], 16) % 100 < percent


def transactional(bench: Bench, queue: str) -> None:
    """A handler that adds a row to its session, in the transaction of its window."""

    def add(message: Message, session: Session) -> None:
        session.add(Order(content=message.id))

    consumer = bench.consumer(queue).transactional(sessionmaker(bench.shop.engine))
    consumer.consume(add, drain=True)


def together(bench: Bench, queue: str) -> None:
    """A handler that inserts the rows of its window's messages with one statement."""
    statement = text("INSERT INTO orders (content) SELECT unnest(CAST(:ids AS text[]))")

    def insert_all(messages: Sequence[Message], connection: Connection) -> None:
        connection.execute(statement, {"ids": [message.id for message in messages]})

    consumer = bench.consumer(queue).transactional(bench.shop.engine, together=True)
    consumer.consume(insert_all, drain=True)


def session_each(bench: Bench, queue: str) -> None:
    """The same handler's work with a session and a commit for each message, and no ledger."""
    sessions = sessionmaker(bench.shop.plain)

    def add(message_id: str) -> None:
        with sessions.begin() as session:
            session.add(Order(content=message_id))

    bare_pika.take(bench.url, queue, bench.messages, add)


LIMIT, SEED, BUSINESS = "pika alone", "pika, three statements", "pika, insert and commit"
SESSION = "pika, session and commit"
ONCE = "consumer"
FAILING = {percent: f"consumer, {percent}% failing" for percent in (1, 5)}
TRANSACTIONAL = "consumer, session of a window"
TOGETHER = "consumer, window together"
WAYS: dict[str, Callable[[Bench, str], None]] = {
    LIMIT: acknowledging,
    SEED: seed,
    BUSINESS: business,
    SESSION: session_each,
    ONCE: once,
    **{name: failing(percent) for percent, name in FAILING.items()},
    TRANSACTIONAL: transactional,
    TOGETHER: together,
}
FEW = {SEED, BUSINESS, SESSION}
"""Slow ways, which take a twentieth of the messages."""


def measure(bench: Bench, rounds: int, messages: int) -> dict[str, list[float]]:
    """Messages a second of each way in each round; one more round first, which does not count."""
    rates: dict[str, list[float]] = defaultdict(list)
    for number in range(rounds + 1):
        for name, way in WAYS.items():
            bench.messages = messages // 20 if name in FEW or not number else messages
            queue = bench.fill(bench.messages)
            began = time.perf_counter()
            way(bench, queue)
            rate = bench.messages / (time.perf_counter() - began)
            print(f"{name:30} {rate:10,.0f}/s", file=sys.stderr)
            if number:
                rates[name].append(rate)
    return rates


def ratio(rates: dict[str, list[float]], name: str, base: str) -> float:
    """The median of the ratios of both within a round, in which the machine was the same."""
    return statistics.median(a / b for a, b in zip(rates[name], rates[base], strict=True))


def latencies_ms(bench: Bench, rate: int, seconds: float, percent: int = 0) -> list[float]:
    """Times from publishing to the handler, of messages that do not fail. `rate` messages a second
    are published, of which `percent` fail.
    """
    queue = bench.fill(0)
    took: list[float] = []

    def publish() -> None:
        transport = open_transport(bench.url)
        began = time.perf_counter()
        for number in range(int(rate * seconds)):
            time.sleep(max(0.0, began + number / rate - time.perf_counter()))
            body = str(time.perf_counter()).encode().ljust(len(BODY))
            transport.publish(queue, [Message(str(uuid.uuid4()), body, "bench.message")])
        transport.close()
        consumer.stop()

    def handle(message: Message) -> None:
        if fails(message.id, percent):
            raise ValueError("no such customer")
        took.append(time.perf_counter() - float(message.body))

    consumer = bench.consumer(queue, queue)
    thread = threading.Thread(target=publish)
    thread.start()
    consumer.consume(handle)
    thread.join()
    return sorted(1000 * each for each in took)


def rows(rates: dict[str, list[float]]) -> Iterator[tuple[str, ...]]:
    """A row for each way."""
    for name, each in rates.items():
        shown = [f"{ratio(rates, name, base):.2f}" for base in (LIMIT, SEED, BUSINESS, SESSION)]
        yield (name, f"{statistics.median(each):,.0f}", *shown)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--messages", type=int, default=50_000)
    parser.add_argument("--rate", type=int, default=200, help="messages/s, for how long they take")
    parser.add_argument("--json", default="benchmarks/results/consumer.json")
    asked = parser.parse_args()
    # Logging would add a cost that depends on the log's handler.
    logging.getLogger("oncely").addHandler(logging.NullHandler())
    with ExitStack() as stack:
        bench = Bench(stack, asked.messages)
        rates = measure(bench, asked.rounds, asked.messages)
        took = {percent: latencies_ms(bench, asked.rate, 20.0, percent) for percent in (0, 1, 5)}
    table = Table("way", "messages/s", "of pika alone", "x three", "x insert", "x session")
    for row in rows(rates):
        table.add_row(*row)
    Console().print(table)
    for percent, each in took.items():
        p50, p99 = (statistics.quantiles(each, n=100)[place] for place in (49, 98))
        print(
            f"from publishing to the handler, at {asked.rate}/s with {percent}% failing: "
            f"p50 {p50:.1f} ms, p99 {p99:.1f} ms"
        )
    for name in FAILING.values():
        print(f"{name}: {ratio(rates, name, ONCE):.3f} of what it is without")
    Path(asked.json).parent.mkdir(parents=True, exist_ok=True)
    Path(asked.json).write_text(json.dumps({**rates, "latencies_ms": took}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
