"""A queue in PostgreSQL, beside procrastinate and pgqueuer on the same work.

All publish the same small jobs, singly and in batches, and one worker process of each handles them
with a handler that does nothing; in turn, several rounds, on one server. What counts is the median
of the ratios within a round. Run with `make bench-queue`.
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
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import asyncpg  # type: ignore[import-untyped]
import procrastinate
import psycopg
from pgqueuer import AsyncpgDriver, Queries, QueueManager
from pgqueuer.types import QueueExecutionMode
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from tests import servers

from oncely import Consumer, Message, open_ledger, open_transport

BODY = b'{"order": 17, "to": "anna@example.org"}'
BATCH = 1_000
ONCELY, IDEMPOTENT = "oncely", "oncely, idempotent"
PROCRASTINATE, PGQUEUER = "procrastinate", "pgqueuer"
SINGLY, BATCHES, CONSUMED = "published singly", f"published by {BATCH:,}", "consumed"


class Work:
    """One library's queue, in a database of its own."""

    consumers: tuple[str, ...]
    """The names under which its consuming is shown."""

    def __init__(self, url: str) -> None:
        self.url = url

    def publish(self, messages: int, batch: int) -> None:
        """Publish so many messages."""
        raise NotImplementedError

    def consume(self, name: str) -> None:
        """Handle every message of the queue."""
        raise NotImplementedError


class Oncely(Work):
    """oncely, as users write it."""

    consumers = (ONCELY, IDEMPOTENT)

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._transport = open_transport(url)
        self._ledger = open_ledger(url)
        self._ledger.migrate()

    def publish(self, messages: int, batch: int) -> None:
        for _ in range(messages // batch):
            made = [Message(str(uuid.uuid4()), BODY, "order") for _ in range(batch)]
            self._transport.publish("jobs", made)

    def consume(self, name: str) -> None:
        consumer = Consumer(self.url, "jobs")
        if name == IDEMPOTENT:
            consumer.idempotent(self._ledger, "bench")
        consumer.consume(lambda _: None, drain=True)


class Procrastinate(Work):
    """As its documentation says: deferred by its sync connector, handled by async tasks."""

    consumers = (PROCRASTINATE,)

    def __init__(self, url: str) -> None:
        super().__init__(url)
        with self._opened() as (app, _):
            app.schema_manager.apply_schema()

    @contextmanager
    def _opened(
        self,
    ) -> Iterator[tuple[procrastinate.App, "procrastinate.tasks.Task[..., Any, Any]"]]:
        app = procrastinate.App(connector=procrastinate.SyncPsycopgConnector(conninfo=self.url))
        with app.open():
            yield app, _task_of(app)

    def publish(self, messages: int, batch: int) -> None:
        job = json.loads(BODY)
        with self._opened() as (_, task):
            for _ in range(messages // batch):
                if batch == 1:
                    task.defer(**job)
                else:
                    task.batch_defer(*[job] * batch)

    def consume(self, name: str) -> None:
        asyncio.run(self._consume())

    async def _consume(self) -> None:
        app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=self.url))
        _task_of(app)
        async with app.open_async():
            await app.run_worker_async(wait=False, concurrency=10, install_signal_handlers=False)


def _task_of(app: procrastinate.App) -> "procrastinate.tasks.Task[..., Any, Any]":
    async def nothing(order: int, to: str) -> None:
        pass

    return app.task(name="bench")(nothing)


class Pgqueuer(Work):
    """As its documentation says, with the fastest of its drivers."""

    consumers = (PGQUEUER,)

    def __init__(self, url: str) -> None:
        super().__init__(url)
        asyncio.run(self._install())

    async def _install(self) -> None:
        await Queries(AsyncpgDriver(await asyncpg.connect(self.url))).install()

    def publish(self, messages: int, batch: int) -> None:
        asyncio.run(self._publish(messages, batch))

    async def _publish(self, messages: int, batch: int) -> None:
        queries = Queries(AsyncpgDriver(await asyncpg.connect(self.url)))
        for _ in range(messages // batch):
            if batch == 1:
                await queries.enqueue("bench", BODY)
            else:
                await queries.enqueue(["bench"] * batch, [BODY] * batch, [0] * batch)

    def consume(self, name: str) -> None:
        asyncio.run(self._consume())

    async def _consume(self) -> None:
        manager = QueueManager(Queries(AsyncpgDriver(await asyncpg.connect(self.url))))

        async def nothing(job: object) -> None:
            pass

        manager.entrypoint("bench")(nothing)
        await manager.run(batch_size=100, mode=QueueExecutionMode.drain)


KINDS: dict[str, Callable[[str], Work]] = {
    ONCELY: Oncely,
    PROCRASTINATE: Procrastinate,
    PGQUEUER: Pgqueuer,
}


def database(url: str, numbers: Iterator[int] = count(1)) -> str:
    """The URL of an empty database on the server."""
    name = f"bench{next(numbers)}"
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    return f"{url.rpartition('/')[0]}/{name}"


def timed(messages: int, call: Callable[[], None]) -> float:
    """Messages a second."""
    began = time.perf_counter()
    call()
    return messages / (time.perf_counter() - began)


def measure(server: str, rounds: int, messages: int) -> dict[str, dict[str, list[float]]]:
    """Messages a second of each work, by name, in each round."""
    rates: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("measuring", total=rounds * len(KINDS))
        for _ in range(rounds):
            for name, kind in KINDS.items():
                progress.update(bar, description=name)
                work = kind(database(server))
                rate = timed(messages, lambda work=work: work.publish(messages, 1))  # type: ignore[misc]
                rates[SINGLY][name].append(rate)
                for consumer in work.consumers:
                    if consumer != work.consumers[0]:
                        work.publish(messages, BATCH)
                    rate = timed(messages, lambda w=work, c=consumer: w.consume(c))  # type: ignore[misc]
                    rates[CONSUMED][consumer].append(rate)
                rate = timed(messages, lambda work=work: work.publish(messages, BATCH))  # type: ignore[misc]
                rates[BATCHES][name].append(rate)
                progress.advance(bar)
    return rates


def ratio(rates: dict[str, list[float]], name: str, base: str) -> float:
    """The median of the ratios of both within a round, in which the machine was the same."""
    return statistics.median(a / b for a, b in zip(rates[name], rates[base], strict=True))


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--messages", type=int, default=20_000)
    parser.add_argument("--json", default="benchmarks/results/queues.json")
    asked = parser.parse_args()
    for name in ("pgqueuer", "procrastinate"):
        logging.getLogger(name).setLevel(logging.WARNING)
    with ExitStack() as stack:
        server = stack.enter_context(servers.Postgresql()).url
        rates = measure(server, asked.rounds, asked.messages)
    table = Table("work", "of", "messages/s", "x procrastinate", "x pgqueuer")
    for work, by_name in rates.items():
        for name, each in by_name.items():
            bases = (f"{ratio(by_name, name, base):.2f}" for base in (PROCRASTINATE, PGQUEUER))
            table.add_row(work, name, f"{statistics.median(each):,.0f}", *bases)
    Console().print(table)
    Path(asked.json).parent.mkdir(parents=True, exist_ok=True)
    Path(asked.json).write_text(json.dumps(rates, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
