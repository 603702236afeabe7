"""A consumer on Kafka and PostgreSQL, beside the driver alone and FastStream without a ledger.

All ways read the same topic, each in a group of its own, in turn, several rounds. What counts is
the median of the ratios within a round; one more round first does not count. Run with
`make bench-consumer`.
"""

import argparse
import asyncio
import json
import logging
import statistics
import sys
import time
import uuid
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import confluent_kafka
from faststream import AckPolicy
from faststream.kafka import KafkaBroker
from rich.console import Console
from rich.table import Table
from tests import servers

from oncely import Consumer, Message, open_transport
from shop import Shop

BODY = b"x" * 1024
COPIES = 0.05
TOGETHER = 500
"""Messages of a call of the driver alone, whose offsets are committed then."""
_COPIED_FROM = 1_000


class Bench:
    """The servers, and a topic with messages, some of them duplicates."""

    def __init__(self, stack: ExitStack, messages: int) -> None:
        self.messages = messages
        self.url = stack.enter_context(servers.Kafka()).url
        self.address = self.url.removeprefix("kafka://")
        self.shop = Shop(stack.enter_context(servers.Postgresql()).url)
        stack.callback(self.shop.close)
        self.shop.prepare()
        self.topic = "bench"
        random, ids = Random(messages), list[str]()
        for _ in range(messages):
            is_copy = bool(ids) and random.random() < COPIES
            ids.append(random.choice(ids[-_COPIED_FROM:]) if is_copy else str(uuid.uuid4()))
        transport = open_transport(self.url)
        transport.publish(self.topic, [Message(id_, BODY, "bench.message") for id_ in ids])
        transport.close()


def alone(bench: Bench, group: str) -> None:
    """The limit: the driver alone."""
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": bench.address,
            "group.id": group,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
        }
    )
    consumer.subscribe([bench.topic])
    left = bench.messages
    while left:
        if taken := consumer.consume(TOGETHER, timeout=1.0):
            consumer.commit(asynchronous=False)
            left -= len(taken)
    consumer.close()


def faststream(bench: Bench, group: str, **policy: Any) -> None:
    """A subscriber that does nothing; duplicates are not detected."""

    async def run() -> None:
        broker, done, left = (
            KafkaBroker(bench.address, logger=None),
            asyncio.Event(),
            bench.messages,
        )

        async def handle(_: bytes) -> None:
            nonlocal left
            left -= 1
            if not left:
                done.set()

        subscriber = broker.subscriber(
            bench.topic, group_id=group, auto_offset_reset="earliest", **policy
        )
        subscriber(handle)
        async with broker:
            await broker.start()
            await done.wait()

    asyncio.run(run())


def once(bench: Bench, group: str) -> None:
    """A handler that does nothing, with a ledger."""
    consumer = Consumer(f"{bench.url}?group={group}", bench.topic)
    consumer.idempotent(bench.shop.ledger, group).consume(lambda _: None, drain=True)


LIMIT, FASTSTREAM, ONCE = "confluent-kafka alone", "FastStream, no ledger", "consumer"
WAYS: dict[str, Callable[[Bench, str], None]] = {
    LIMIT: alone,
    # By its default it acknowledges messages before they are handled.
    FASTSTREAM: faststream,
    "FastStream, each acknowledged": partial(faststream, ack_policy=AckPolicy.ACK),
    ONCE: once,
}
FEW = {"FastStream, each acknowledged"}
"""Slow ways, which take a twentieth of the messages."""


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--messages", type=int, default=50_000)
    parser.add_argument("--json", default="benchmarks/results/kafka.json")
    asked = parser.parse_args()
    logging.getLogger("oncely").addHandler(logging.NullHandler())
    rates: dict[str, list[float]] = defaultdict(list)
    with ExitStack() as stack:
        bench = Bench(stack, asked.messages)
        for number in range(asked.rounds + 1):
            for place, (name, way) in enumerate(WAYS.items()):
                bench.messages = asked.messages // (20 if name in FEW else 1)
                began = time.perf_counter()
                way(bench, f"group-{number}-{place}")
                rate = bench.messages / (time.perf_counter() - began)
                print(f"{name:30} {rate:10,.0f}/s", file=sys.stderr)
                if number:
                    rates[name].append(rate)
    table = Table("way", "messages/s", "of confluent-kafka alone", "x FastStream")
    for name, each in rates.items():
        ratios = (
            statistics.median(a / b for a, b in zip(each, rates[base], strict=True))
            for base in (LIMIT, FASTSTREAM)
        )
        table.add_row(name, f"{statistics.median(each):,.0f}", *(f"{r:.2f}" for r in ratios))
    Console().print(table)
    Path(asked.json).parent.mkdir(parents=True, exist_ok=True)
    Path(asked.json).write_text(json.dumps(rates, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
