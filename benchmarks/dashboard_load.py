"""The dashboard, asked by many at once while a consumer works at full speed.

A consumer in a process of its own takes messages out of a queue in PostgreSQL, with a ledger there;
`oncely web` serves the dashboard from another process. In each round the consumer's rate is taken
without requests, then while so many requests are made at once, over all pages in turn: a burst
every few seconds, and burst after burst. What counts is the median of the ratios within a round.
Run with `make bench-dashboard`; it fails where a request is not answered with 200.
"""

import argparse
import asyncio
import json
import logging
import os
import secrets
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from itertools import cycle, islice
from multiprocessing import get_context
from pathlib import Path
from threading import Thread
from typing import Any
from uuid import uuid4

import httpx
from rich.console import Console
from rich.table import Table
from tests import servers

from oncely import Consumer, Key, Message, Policy, open_ledger, open_transport

QUEUE, CONSUMER = "jobs", "bench"
BODY = b'{"order": 17, "to": "anna@example.org"}'
PAGES = (
    *("/", "/in-doubt", "/failed", "/waiting", "/outbox", "/queues", "/consumers", "/messages"),
    *("/workers", "/runs", "/audit", "/message?id=trouble-0"),
)
TOKEN = secrets.token_urlsafe()
TROUBLE = 200
"""Messages in doubt, and as many dead letters: pages have something to show."""
FASTEST = 15_000
"""Messages a second: no consumer here handles more."""
_AT_ONCE = 1_000
_FRESH = get_context("spawn")


@dataclass
class Loaded:
    """What came of the requests of one kind of load."""

    load: str
    alone: list[float] = field(default_factory=list)
    """Messages a second without requests, by round."""
    beside: list[float] = field(default_factory=list)
    """The same with requests."""
    took_s: list[float] = field(default_factory=list)
    """Of each request."""
    wrong: Counter[str] = field(default_factory=Counter)
    """What was answered that is not 200, or why there is no answer."""

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        # Not by `asdict`, which makes keys of pairs out of a Counter.
        return {**vars(self), "wrong": dict(self.wrong)}

    @property
    def ratio(self) -> float:
        """The median within a round, in which the machine was the same."""
        return statistics.median(b / a for a, b in zip(self.alone, self.beside, strict=True))

    def took_ms(self, percent: int) -> float:
        """A percentile of the requests' times."""
        return statistics.quantiles(self.took_s, n=100)[percent - 1] * 1_000


# ---- The consumer ------------------------------------------------------------------------------


def consume(url: str, handled: Any, stop: Any) -> None:
    """Handle what comes until it is told to stop, counting it."""
    with closing(open_ledger(url)) as ledger, closing(open_transport(url)) as transport:
        consumer = Consumer(transport, QUEUE).idempotent(ledger, CONSUMER)

        def handle(_: Message) -> None:
            handled.value += 1

        def end() -> None:
            stop.wait()
            consumer.stop()

        Thread(target=end, daemon=True).start()
        consumer.consume(handle)


class Work:
    """A consumer at work, and what it still has to do."""

    def __init__(self, url: str, stack: ExitStack) -> None:
        self._transport = stack.enter_context(closing(open_transport(url)))
        self._published = 0
        self._handled = _FRESH.RawValue("q", 0)
        stop = _FRESH.Event()
        process = _FRESH.Process(target=consume, args=(url, self._handled, stop))
        process.start()
        stack.callback(process.join)
        stack.callback(stop.set)
        self._process = process

    def fill(self, messages: int) -> None:
        """Let so many messages wait, and the consumer be at work."""
        while self._published - self._handled.value < messages:
            made = [Message(uuid4().hex, BODY, "order") for _ in range(_AT_ONCE)]
            self._transport.publish(QUEUE, made)
            self._published += _AT_ONCE
        before = self._handled.value
        while self._handled.value == before:
            if not self._process.is_alive():
                raise SystemExit("the consumer has ended")
            time.sleep(0.01)

    @contextmanager
    def measured(self, into: list[float]) -> Iterator[None]:
        """Add the consumer's rate meanwhile."""
        before, began = self._handled.value, time.monotonic()
        yield
        took_s = time.monotonic() - began
        into.append((self._handled.value - before) / took_s)
        if self._handled.value == self._published:
            raise SystemExit("the consumer had nothing to do: the figures say nothing")


# ---- The dashboard -----------------------------------------------------------------------------


def trouble(url: str) -> None:
    """Messages in doubt and dead letters, for the pages to show."""
    with closing(open_ledger(url)) as ledger:
        ledger.migrate()
        ledger.claim_many([Key(CONSUMER, f"trouble-{n}") for n in range(TROUBLE)], lease=0.001)

        def fail(message: Message) -> None:
            raise ValueError(f"card ending in {message.id[-4:]} was declined")

        transport = open_transport(url)
        transport.publish("failing", [Message(f"dead-{n:04}", BODY) for n in range(TROUBLE)])
        failing = Consumer(transport, "failing").idempotent(
            ledger, "failing", policy=Policy(tries=1)
        )
        failing.consume(fail, drain=True)
        transport.close()


@contextmanager
def served(url: str) -> Iterator[str]:
    """`oncely web`, and where it is."""
    command = [sys.executable, "-m", "oncely", "web", "--json", "--port", "0", "--ledger", url]
    environment = {**os.environ, "ONCELY_WEB_TOKEN": TOKEN}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())["url"].rstrip("/")
        finally:
            process.terminate()


async def ask(client: httpx.AsyncClient, url: str, found: Loaded) -> None:
    """One request."""
    began = time.monotonic()
    try:
        answer = await client.get(url)
        said = str(answer.status_code)
    except httpx.HTTPError as error:
        said = type(error).__name__
    found.took_s.append(time.monotonic() - began)
    if said != "200":
        found.wrong[f"{said} {url.rpartition('/')[2]}"] += 1


async def burst_after_burst(
    site: str, at_once: int, every_s: float, seconds: float, found: Loaded
) -> None:
    """Make so many requests at once, again and again for that long."""
    limits = httpx.Limits(max_connections=at_once, max_keepalive_connections=at_once)
    pages = cycle(PAGES)
    # Certificates, which loopback does not need, would take their time to be read.
    headers = {"authorization": f"Bearer {TOKEN}"}
    async with httpx.AsyncClient(
        headers=headers, limits=limits, timeout=60, verify=False
    ) as client:
        until = time.monotonic() + seconds
        while (began := time.monotonic()) < until:
            asked = [ask(client, site + page, found) for page in islice(pages, at_once)]
            await asyncio.gather(*asked)
            now = time.monotonic()
            await asyncio.sleep(max(0.0, min(began + every_s, until) - now))


# ---- Measuring ---------------------------------------------------------------------------------


def measure(url: str, asked: argparse.Namespace) -> Sequence[Loaded]:
    """Each load in each round, after the same time without requests."""
    loads = {
        f"{asked.requests} at once every {asked.every:g} s": asked.every,
        f"{asked.requests} at once, again and again": 0.0,
    }
    found = {name: Loaded(name) for name in loads}
    trouble(url)
    with ExitStack() as stack:
        site = stack.enter_context(served(url))
        work = Work(url, stack)
        for _ in range(asked.rounds):
            for name, every_s in loads.items():
                loaded = found[name]
                work.fill(int(2 * asked.seconds * FASTEST))
                with work.measured(loaded.alone):
                    time.sleep(asked.seconds)
                with work.measured(loaded.beside):
                    asyncio.run(
                        burst_after_burst(site, asked.requests, every_s, asked.seconds, loaded)
                    )
    return [*found.values()]


def show(found: Sequence[Loaded]) -> None:
    """Print a row for each load."""
    columns = ("messages/s", "with requests", "of it", "requests", "p50 ms", "p95 ms", "not 200")
    table = Table("load", *columns)
    for each in found:
        table.add_row(
            each.load,
            f"{statistics.median(each.alone):,.0f}",
            f"{statistics.median(each.beside):,.0f}",
            f"{each.ratio:.0%}",
            f"{len(each.took_s):,}",
            *(f"{each.took_ms(percent):,.0f}" for percent in (50, 95)),
            f"{each.wrong.total():,}",
        )
    Console().print(table)
    for each in found:
        for said, count in each.wrong.most_common():
            print(f"{each.load}: {count:,} times {said}", file=sys.stderr)


def main() -> int:
    """Measure and print; 1 where a request went wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10.0, help="for one load in one round")
    parser.add_argument("--requests", type=int, default=100, help="at once")
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two bursts")
    parser.add_argument("--url", help="a database to use, instead of a server of its own")
    parser.add_argument("--json", default="benchmarks/results/dashboard_load.json")
    asked = parser.parse_args()
    # The dead letters' errors, which are meant.
    logging.getLogger("oncely.consumer").setLevel(logging.CRITICAL)
    with ExitStack() as stack:
        url = asked.url or stack.enter_context(servers.Postgresql()).url
        found = measure(url, asked)
    show(found)
    Path(asked.json).parent.mkdir(parents=True, exist_ok=True)
    Path(asked.json).write_text(json.dumps([each.as_dict() for each in found], indent=1))
    return int(any(each.wrong for each in found))


if __name__ == "__main__":
    sys.exit(main())
