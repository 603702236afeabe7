"""What operators ask of a large ledger, and how long the answer takes.

Fills a ledger in PostgreSQL and one in SQLite with completed records of some consumers, and a few
that failed, are in doubt, or wait; then asks what the command line, the metrics and the dashboard
ask, many times. Run with `make bench-large`.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from itertools import count
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sqlalchemy import create_engine, text
from starlette.testclient import TestClient
from tests.servers import Postgresql

from oncely import Key, ops
from oncely.core.commands import Granted
from oncely.ledger.ledger import Ledger, open_ledger
from oncely.metrics import Metrics
from oncely.web import dashboard

_AT_ONCE = 500_000
_CONSUMERS = 12
_ROWS = {
    "postgresql": (
        "INSERT INTO processed_messages (message_id, provider, status, attempts,"
        " first_processed_at, last_processed_at, fence, version, exhausted, duplicates)"
        " SELECT gen_random_uuid()::text, 'consumer-' || floor(random() * :consumers)::int, 'sent',"
        " 1, now() - random() * interval '30 days', now() - random() * interval '30 days', 1, 2,"
        " false, 0 FROM generate_series(1, :rows)"
    ),
    "sqlite": (
        "INSERT INTO processed_messages (message_id, provider, status, attempts,"
        " first_processed_at, last_processed_at, fence, version, exhausted, duplicates)"
        " WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < :rows)"
        " SELECT lower(hex(randomblob(16))), 'consumer-' || (abs(random()) % :consumers), 'sent',"
        " 1, 1.7e9 + i, 1.7e9 + i, 1, 2, false, 0 FROM n"
    ),
}


def fill(url: str, kind: str, rows: int) -> None:
    """Write so many completed records past the ledger, which would take an hour."""
    engine = create_engine(url)
    try:
        for _ in track(range(-(-rows // _AT_ONCE)), f"{kind}: {rows:,} records"):
            with engine.begin() as connection:
                values = {"rows": min(rows, _AT_ONCE), "consumers": _CONSUMERS}
                connection.execute(text(_ROWS[kind]), values)
        if kind == "postgresql":
            with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
                connection.execute(text("VACUUM (ANALYZE) processed_messages"))
    finally:
        engine.dispose()


def trouble(ledger: Ledger) -> None:
    """Some messages that failed, are in doubt, or are at work."""
    for consumer in (f"consumer-{n}" for n in range(_CONSUMERS)):
        ledger.keep_retention(consumer, "30d")
        keys = [Key(consumer, f"trouble-{n}") for n in range(200)]
        outcomes = ledger.claim_many(keys, lease=0.001)
        claims = [each.claim for each in outcomes if isinstance(each, Granted)]
        ledger.fail_many(claims[:100], ["ConnectionError: no route"] * 100)


def asked(ledger: Ledger) -> Mapping[str, Callable[[], object]]:
    """What is measured, by its name."""
    registry = CollectorRegistry()
    Metrics(registry).watch(ledger)
    doubtful = ops.Selection(states=[ops.IN_DOUBT])
    failed = ops.Selection(states=["failed"], consumer="consumer-3")
    rare = ops.Selection(text="trouble-199")
    nobody = ops.Selection(consumer="consumer-99")
    old = ops.Selection(consumer="consumer-3", older_than="3650d")
    done = ops.Selection(consumer="consumer-3", states=["completed"])
    return {
        "status": lambda: ops.status(ledger),
        "metrics": lambda: generate_latest(registry),
        "in doubt": lambda: ops.select(ledger, doubtful),
        "failed": lambda: ops.select(ledger, failed),
        "search, all": lambda: ops.search(ledger, ops.Selection()),
        "search, beginning": lambda: ops.search(ledger, ops.Selection(), begins="7f"),
        "search, rare text": lambda: ops.search(ledger, rare),
        "search, no consumer": lambda: ops.search(ledger, nobody),
        "search, no age": lambda: ops.search(ledger, old),
        "search, completed": lambda: ops.search(ledger, done),
        "search, failed": lambda: ops.search(ledger, failed),
        "search, further on": lambda: ops.search(ledger, rare, after="7f"),
        "one message": lambda: ops.find(ledger, "trouble-7"),
        "dead letters": lambda: ops.dead_letters(ledger),
        "activity": lambda: ops.activity(ledger),
        "workers": lambda: ops.workers(ledger),
    }


_PAGES = {
    "overview": "/",
    "consumers": "/consumers",
    "in doubt": "/in-doubt",
    "failed": "/failed",
    "waiting": "/waiting",
    "outbox": "/outbox",
    "queues": "/queues",
    "messages": "/messages",
    "messages, a part of an id": "/messages?how=contains&text=rouble-19",
    "messages of a consumer": "/messages?consumer=consumer-3",
    "messages that failed": "/messages?state=failed",
    "one message": "/message?id=trouble-7&consumer=consumer-3",
    "workers": "/workers",
    "runs": "/runs",
    "audit": "/audit",
}


def visited(ledger: Ledger) -> Mapping[str, Callable[[], object]]:
    """The dashboard's pages, by their names; each has to succeed."""
    client = TestClient(dashboard(ledger), base_url="http://localhost")
    visits = count()

    def visit(path: str) -> None:
        # Each has an address of its own: a page is made once for all who ask for one in a moment.
        client.get(f"{path}{'&' if '?' in path else '?'}visit={next(visits)}").raise_for_status()

    return {f"page: {name}": partial(visit, path) for name, path in _PAGES.items()}


def measured(ask: Callable[[], object], times: int) -> list[float]:
    """How many milliseconds each took, in order."""
    took = []
    for _ in range(times):
        began = time.perf_counter()
        ask()
        took.append(1_000 * (time.perf_counter() - began))
    return sorted(took)


@contextmanager
def ledgers(parsed: argparse.Namespace) -> Iterator[Mapping[str, tuple[str, int]]]:
    """The URL and the size of each."""
    with tempfile.TemporaryDirectory() as folder:
        file = f"sqlite:///{Path(folder, 'large.db')}"
        sizes = {"sqlite": (file, parsed.sqlite)}
        if not parsed.postgresql:
            yield sizes
            return
        with Postgresql() as server:
            yield {"postgresql": (server.url, parsed.postgresql), **sizes}


def main() -> None:
    """Fill, ask, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--postgresql", type=int, default=30_000_000, help="records there")
    parser.add_argument("--sqlite", type=int, default=5_000_000, help="records there")
    parser.add_argument("--times", type=int, default=40, help="of each question")
    parsed = parser.parse_args()
    table = Table("store", "records", "question", "median ms", "p95 ms", "worst ms")
    with ledgers(parsed) as places:
        for kind, (url, rows) in places.items():
            with closing(open_ledger(url)) as ledger:
                ledger.migrate()
                fill(url, kind, rows)
                trouble(ledger)
                for name, ask in {**asked(ledger), **visited(ledger)}.items():
                    took = measured(ask, parsed.times)
                    p95 = took[round(0.95 * (len(took) - 1))]
                    figures = (statistics.median(took), p95, took[-1])
                    table.add_row(kind, f"{rows:,}", name, *(f"{each:.1f}" for each in figures))
    Console().print(table)


if __name__ == "__main__":
    main()
