"""What a ledger in PostgreSQL needs: bytes a record, log and flushes a message, connections.

Fills a ledger step by step, so that what grows in line with the records can be told from what does
not; lets messages be processed in several ways, just after a checkpoint and later; and counts the
sessions of programs at work. Run with `make bench-capacity`.
"""

import argparse
import asyncio
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from functools import partial
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from threading import Event, Thread
from typing import Any, NamedTuple
from uuid import uuid4

import httpx
import psycopg
from rich.console import Console
from rich.table import Table
from sqlalchemy import Connection, create_engine
from sqlalchemy import text as sql
from tests.servers import Postgresql, free_port

from oncely import Consumer, Granted, Key, Message, once, open_ledger, open_transport
from oncely.ledger.ledger import Ledger

CONSUMER = "billing"
_BATCH = 1_000
_AT_WORK_S = 60.0
_FRESH = get_context("spawn")

Ids = Callable[[], str]


def random_ids() -> Ids:
    """As most producers make them."""
    return lambda: str(uuid4())


def growing_ids() -> Ids:
    """As long, and in the order of time, as those of UUIDv7."""
    numbers = count(time.time_ns())
    return lambda: f"{next(numbers):036d}"


def processed(ledger: Ledger, messages: int, ids: Ids) -> None:
    """Claim and complete so many new messages in batches."""
    for _ in range(messages // _BATCH):
        outcomes = ledger.claim_many([Key(CONSUMER, ids()) for _ in range(_BATCH)])
        ledger.complete_many([each.claim for each in outcomes if isinstance(each, Granted)])


# ---- Space -------------------------------------------------------------------------------------


def asked(server: psycopg.Connection[Any], question: str) -> Any:
    """The one row of an answer, or the one value in it."""
    row = server.execute(question).fetchone()
    assert row is not None
    return row[0] if len(row) == 1 else row


def indexes(server: psycopg.Connection[Any]) -> Sequence[str]:
    """Their names, the largest first."""
    found = server.execute(
        "SELECT indexrelid::regclass::text FROM pg_index WHERE indrelid ="
        " 'processed_messages'::regclass ORDER BY pg_relation_size(indexrelid) DESC"
    )
    return [name for (name,) in found]


def sizes(server: psycopg.Connection[Any]) -> tuple[int, list[tuple[str, int]]]:
    """Bytes of the table, and of each of its indexes."""
    heap = asked(server, "SELECT pg_relation_size('processed_messages')")
    of = "SELECT pg_relation_size('{}')"
    return heap, [(name, asked(server, of.format(name))) for name in indexes(server)]


def logged(server: psycopg.Connection[Any]) -> int:
    """Bytes of log so far."""
    return int(asked(server, "SELECT pg_current_wal_lsn() - '0/0'::pg_lsn"))


def space(
    ledger: Ledger, server: psycopg.Connection[Any], steps: Sequence[int], ids: Ids
) -> Iterator[list[str]]:
    """A row for each size of the ledger, and one for half of it purged."""
    there = 0
    for records in steps:
        began = logged(server)
        processed(ledger, records - there, ids)
        filled = logged(server)
        dead = asked(
            server,
            "SELECT n_dead_tup FROM pg_stat_user_tables WHERE relname = 'processed_messages'",
        )
        heap, others = sizes(server)
        started = time.perf_counter()
        server.execute("VACUUM processed_messages")
        took_s = time.perf_counter() - started
        yield [
            f"{records:,}",
            f"{heap / records:.0f}",
            *(f"{size / records:.1f}" for _, size in others),
            f"{(filled - began) / (records - there):.0f}",
            f"{dead:,}",
            f"{took_s:.2f}",
            f"{(logged(server) - filled) / (records - there):.0f}",
        ]
        there = records


def purged(ledger: Ledger, server: psycopg.Connection[Any]) -> Iterator[str]:
    """What a purge of all, and then as many new records, do to the size."""
    server.execute("ALTER TABLE processed_messages RESET (autovacuum_enabled)")
    heap, [(_, key), *_] = sizes(server)
    records = asked(server, "SELECT count(*) FROM processed_messages")
    began = time.perf_counter()
    ledger.purge("0s")
    took_s = time.perf_counter() - began
    began = time.perf_counter()
    server.execute("VACUUM processed_messages")
    vacuum_s = time.perf_counter() - began
    yield f"purge of {records:,}: {took_s:.1f} s; VACUUM after it: {vacuum_s:.1f} s"
    processed(ledger, records, random_ids())
    after, [(_, key_after), *_] = sizes(server)
    yield (
        f"table and index before: {heap / 1e6:.0f}, {key / 1e6:.0f} MB; after purge, VACUUM and as"
        f" many new records: {after / 1e6:.0f}, {key_after / 1e6:.0f} MB"
    )


# ---- What a message writes ---------------------------------------------------------------------


class Written(NamedTuple):
    """What a message made the server write."""

    bytes: float
    pages: float
    """Whole pages of the table or its indexes in the log."""
    flushes: float


def written(server: psycopg.Connection[Any], messages: int, work: Callable[[], None]) -> Written:
    """For each message of `work`."""
    question = "SELECT wal_bytes::bigint, wal_fpi, wal_sync FROM pg_stat_wal"
    server.execute("SELECT pg_stat_reset_shared('wal')")
    work()
    # A session tells when it has been idle for a moment.
    time.sleep(1.5)
    return Written(*(each / messages for each in asked(server, question)))


def ways(url: str, ledger: Ledger) -> dict[str, tuple[int, Callable[[Ids], None]]]:
    """How messages are processed, how many."""
    engine = create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
    with engine.begin() as connection:
        connection.execute(sql("CREATE TABLE IF NOT EXISTS orders (id text)"))

    @once(ledger, consumer=CONSUMER, key=str, transaction=engine)
    def book(id_: str, connection: Connection) -> None:
        connection.execute(sql("INSERT INTO orders VALUES (:id)"), {"id": id_})

    @once(ledger, consumer=CONSUMER, key=str)
    def call(_: str) -> None:
        pass

    def singly(work: Callable[[str], None], messages: int, threads: int = 1) -> Any:
        def run(ids: Ids) -> None:
            with ThreadPoolExecutor(threads) as pool:
                [*pool.map(work, [ids() for _ in range(messages)])]

        return messages, run

    transport = open_transport(url)

    def queued(ids: Ids) -> None:
        for _ in range(5):
            transport.publish("orders", [Message(ids(), b"{}") for _ in range(_BATCH)])
        consumer = Consumer(transport, "orders").idempotent(ledger, CONSUMER)
        consumer.consume(lambda message: None, drain=True)

    def deferred(ids: Ids) -> None:
        broker = open_transport("memory://outbox")
        broker.subscribe("sent", [])
        broker.publish("orders", [Message(ids(), b"{}") for _ in range(_BATCH)])
        consumer = Consumer(broker, "orders").idempotent(ledger, "sender")
        report = consumer.consume(lambda message: message.send("sent", {}), drain=True)
        assert report.deferred_sent == _BATCH

    return {
        "batches of 1,000": (20_000, lambda ids: processed(ledger, 20_000, ids)),
        "once, 1 thread": singly(call, 2_000),
        "once, 64 threads": singly(call, 5_000, 64),
        "once in a transaction with a row, 1 thread": singly(book, 2_000),
        "queue in the database: publish 1,000, consume": (5_000, queued),
        "outbox: a consumer whose handler sends a message": (_BATCH, deferred),
    }


def writes(url: str, ledger: Ledger, server: psycopg.Connection[Any]) -> Iterator[list[str]]:
    """A row for each way and kind of ids."""
    # Its log is measured apart.
    server.execute("ALTER TABLE processed_messages SET (autovacuum_enabled = false)")
    server.execute("ALTER TABLE waiting_messages SET (autovacuum_enabled = false)")
    for kind, ids in (("random", random_ids()), ("growing", growing_ids())):
        for name, (messages, work) in ways(url, ledger).items():
            server.execute("CHECKPOINT")
            first, later = (written(server, messages, partial(work, ids)) for _ in range(2))
            yield [
                name,
                kind,
                *(f"{each:,.0f}" for each in (first.bytes, later.bytes)),
                *(f"{each:.2f}" for each in (first.pages, later.pages)),
                f"{later.flushes:.3f}",
            ]


# ---- Connections -------------------------------------------------------------------------------


def _handle(_: Any) -> None:
    time.sleep(0.02)


def consume(url: str, broker: str, concurrency: int) -> None:
    """A consumer whose handlers wait, until its queue is empty."""
    with closing(open_ledger(url)) as ledger, closing(open_transport(broker)) as transport:
        transport.publish("work", [Message(str(uuid4()), b"{}") for _ in range(50 * concurrency)])
        consumer = Consumer(transport, "work").idempotent(ledger, "work")
        consumer.concurrency(concurrency).consume(_handle, drain=True)


def consume_transactional(url: str, concurrency: int) -> None:
    """The same with a transaction for each message."""
    engine = create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
    with closing(open_ledger(url)) as ledger, closing(open_transport("memory://t")) as transport:
        transport.publish("work", [Message(str(uuid4()), b"{}") for _ in range(50 * concurrency)])
        consumer = Consumer(transport, "work").idempotent(ledger, "booked").transactional(engine)
        consumer.concurrency(concurrency).consume(lambda _, __: time.sleep(0.02), drain=True)


def call_in_threads(url: str, threads: int) -> None:
    """Functions under `once`."""
    with closing(open_ledger(url)) as ledger, ThreadPoolExecutor(threads) as pool:
        call = once(ledger, consumer=CONSUMER, key=str)(_handle)
        [*pool.map(call, [str(uuid4()) for _ in range(100 * threads)])]


def call_in_transactions(url: str, threads: int) -> None:
    """The same in a transaction, in an engine as SQLAlchemy makes it."""
    engine = create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
    with closing(open_ledger(url)) as ledger, ThreadPoolExecutor(threads) as pool:

        @once(ledger, consumer=CONSUMER, key=str, transaction=engine)
        def call(_: str, connection: Connection) -> None:
            connection.execute(sql("SELECT 1"))
            time.sleep(0.02)

        [*pool.map(call, [str(uuid4()) for _ in range(100 * threads)])]


def call_in_tasks(url: str, tasks: int) -> None:
    """Coroutines under `once`."""
    with closing(open_ledger(url)) as ledger:

        @once(ledger, consumer=CONSUMER, key=str)
        async def call(_: str) -> None:
            await asyncio.sleep(0.02)

        async def all_of_them() -> None:
            for _ in range(50):
                await asyncio.gather(*(call(str(uuid4())) for _ in range(tasks)))

        asyncio.run(all_of_them())


def _commanded(*words: str) -> None:
    oncely = Path(sys.executable).with_name("oncely")
    # Requests that are cut off at its end would be told at length.
    quiet = subprocess.DEVNULL
    with subprocess.Popen([oncely, *words], stdout=quiet, stderr=quiet) as process:
        with suppress(subprocess.TimeoutExpired):
            process.wait(_AT_WORK_S)
        process.terminate()


def relay(url: str, to: str) -> None:
    """A relay at work."""
    _commanded("relay", "--ledger", url, "--transport", to)


def visit(url: str) -> None:
    """The dashboard, with 40 requests at once."""
    port = free_port()
    with ThreadPoolExecutor(41) as pool:
        served = pool.submit(
            _commanded, "web", "--ledger", url, "--port", str(port), "--user-header", "X-User"
        )
        paths = ("/", "/consumers", "/in-doubt", "/failed", "/waiting", "/messages", "/workers")

        def ask(number: int) -> None:
            while not served.done():
                with suppress(httpx.HTTPError):
                    path = paths[number % len(paths)]
                    address = f"http://127.0.0.1:{port}{path}?visit={uuid4()}"
                    httpx.get(address, headers={"X-User": "ann"}, timeout=5).raise_for_status()

        [*pool.map(ask, range(40))]


@contextmanager
def watched(url: str, most: list[int]) -> Iterator[None]:
    """While programs are at work, the most sessions of others at one moment."""
    ended = Event()

    def look() -> None:
        with closing(psycopg.connect(url, autocommit=True)) as server:
            while not ended.wait(0.02):
                most[0] = max(
                    most[0],
                    asked(
                        server,
                        "SELECT count(*) FROM pg_stat_activity WHERE backend_type ="
                        " 'client backend' AND pid <> pg_backend_pid()",
                    ),
                )

    thread = Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def connections(url: str, folder: Path) -> Iterator[list[str]]:
    """A row for each kind of program; a queue of one is in the folder."""
    programs: list[tuple[str, Callable[..., None], tuple[Any, ...]]] = [
        *((f"once, {n} threads", call_in_threads, (url, n)) for n in (1, 8, 64)),
        *((f"once in a transaction, {n} threads", call_in_transactions, (url, n)) for n in (1, 8)),
        ("once, 64 tasks", call_in_tasks, (url, 64)),
        *((f"consumer, concurrency {n}", consume, (url, "memory://c", n)) for n in (1, 8, 64)),
        ("consumer of a queue in the same database", consume, (url, url, 8)),
        ("transactional consumer, concurrency 8", consume_transactional, (url, 8)),
        ("relay to another broker", relay, (url, f"sqlite:///{folder}/queue.db")),
        ("relay into a queue of the same database", relay, (url, url)),
        ("oncely web, 40 requests at once", visit, (url,)),
    ]
    for name, program, arguments in programs:
        most = [0]
        process = _FRESH.Process(target=program, args=arguments)
        with watched(url, most):
            process.start()
            process.join()
        assert process.exitcode == 0, name
        yield [name, str(most[0])]


# ---- All of it ---------------------------------------------------------------------------------


def shown(heading: Sequence[str], rows: Iterator[list[str]]) -> None:
    """Print a table when its last row is there, and each row as it comes."""
    table = Table(*heading)
    console = Console()
    for row in rows:
        table.add_row(*row)
        print(*row, sep=" | ", file=sys.stderr, flush=True)
    console.width = max(console.width, 140)
    console.print(table)


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, nargs="+", default=[100_000, 300_000, 1_000_000])
    parser.add_argument("--parts", nargs="+", default=["space", "writes", "connections"])
    parsed = parser.parse_args()
    with (
        Postgresql() as place,
        closing(open_ledger(place.url)) as ledger,
        closing(psycopg.connect(place.url, autocommit=True)) as server,
    ):
        ledger.migrate()
        if "space" in parsed.parts:
            heading = ("records", "table, bytes each", *indexes(server))
            more = ("WAL, bytes a message", "dead rows", "VACUUM, s", "its WAL a message")
            shown([*heading, *more], space(ledger, server, parsed.records, random_ids()))
        if "writes" in parsed.parts:
            if "space" not in parsed.parts:
                processed(ledger, parsed.records[-1], random_ids())
            heading = (
                *("way", "ids", "WAL after a checkpoint", "later", "pages after a checkpoint"),
                *("later", "flushes"),
            )
            shown(heading, writes(place.url, ledger, server))
        if "space" in parsed.parts:
            for line in purged(ledger, server):
                print(line)
        ledger.close()
        server.close()
        if "connections" in parsed.parts:
            shown(("program", "connections"), connections(place.url, place.folder))


if __name__ == "__main__":
    main()
