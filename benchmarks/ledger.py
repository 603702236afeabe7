"""The ledger on every store, beside the hand-written flow and each store's own limit.

All loads of one store run in turn, several rounds, on its empty tables and then with rows in them;
the medians and their ratios count. Run with `make bench-ledger`; see `--help` for smaller runs.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from uuid import uuid4

from rich.progress import Progress
from tests import servers

import hand_written
from loads import Load, batches, one_by_one, raw_limit, single_calls, tasks
from oncely import Granted, Key, Ledger, open_ledger
from rounds import Cell, arguments, cell_of, each_store, measure, show_table

BY_HAND = "by hand, 8 connections"
LIMIT = "bare keys, by 1,000"
HEADINGS = ("store", "rows", "load", "messages/s", "p50 ms", "p99 ms", "of by hand", "of limit")
PRELOAD_BATCH = 5_000


class Subject:
    """A store to measure, and what it is measured against."""

    def __init__(self, url: str, by_hand: hand_written.HandWritten | None) -> None:
        self._url = url
        self._opened: list[Ledger] = []
        self.by_hand = by_hand

    def fresh(self) -> Ledger:
        """A ledger without records, its table never analysed."""
        ledger = open_ledger(self._url, table=f"bench_{len(self._opened)}")
        ledger.migrate()
        self._opened.append(ledger)
        return ledger

    def close(self) -> None:
        """Close every ledger."""
        for ledger in self._opened:
            ledger.close()


@contextmanager
def opened(store: str, folder: Path) -> Iterator[Subject]:
    """The store, on a server of its own where it needs one."""
    with ExitStack() as stack:
        by_hand: hand_written.HandWritten | None = None
        match store:
            case "memory":
                url = "memory://"
            case "sqlite":
                url = f"sqlite:///{folder}/ledger.db"
                by_hand = hand_written.Sqlite(folder / "by-hand.db")
            case "postgresql":
                url = stack.enter_context(servers.Postgresql()).url
                by_hand = hand_written.Postgresql(url)
            case "mariadb":
                url = stack.enter_context(servers.MariaDb()).url
                by_hand = hand_written.MariaDb(url)
            case _:
                url = stack.enter_context(servers.Redis()).url
                by_hand = hand_written.Redis(url)
        subject = Subject(url, by_hand)
        stack.callback(subject.close)
        yield subject


LOADS: dict[str, Callable[[Ledger], Load]] = {
    "single calls, 1 thread": lambda ledger: single_calls(ledger, 1),
    "single calls, 8 threads": lambda ledger: single_calls(ledger, 8),
    "single calls, 64 tasks": lambda ledger: tasks(ledger, 64),
    "batches of 100": lambda ledger: batches(ledger, 100),
    "batches of 500": lambda ledger: batches(ledger, 500),
    "batches of 1,000": lambda ledger: batches(ledger, 1_000),
}
HAND_LOADS: dict[str, Callable[[hand_written.HandWritten], Load]] = {
    "by hand, 1 connection": lambda by_hand: one_by_one(by_hand.connect, 1),
    BY_HAND: lambda by_hand: one_by_one(by_hand.connect, 8),
    LIMIT: lambda by_hand: raw_limit(by_hand.write_keys),
}


def preload(ledger: Ledger, rows: int, progress: Progress, title: str) -> None:
    """Complete so many messages that no load will ask for."""
    bar = progress.add_task(title, total=rows)
    for start in range(0, rows, PRELOAD_BATCH):
        keys = [Key("bench", str(uuid4())) for _ in range(min(PRELOAD_BATCH, rows - start))]
        outcomes = ledger.claim_many(keys)
        ledger.complete_many([o.claim for o in outcomes if isinstance(o, Granted)])
        progress.advance(bar, len(keys))


def loads_on(subject: Subject, preloaded: Ledger | None) -> Iterator[tuple[str, Load]]:
    """Every load by its name, each on a table without records unless one is given."""
    for name, load_on in LOADS.items():
        yield name, load_on(preloaded or subject.fresh())
    if subject.by_hand is not None:
        if preloaded is None:
            subject.by_hand.prepare(0)
        for name, by_hand_on in HAND_LOADS.items():
            yield name, by_hand_on(subject.by_hand)


def measure_store(store: str, asked: argparse.Namespace, progress: Progress) -> list[Cell]:
    """The cells of one store: without records before, and with many."""
    cells = []
    with tempfile.TemporaryDirectory() as folder, opened(store, Path(folder)) as subject:
        for rows in sorted({0, asked.rows}):
            preloaded = None
            if rows:
                preloaded = subject.fresh()
                preload(preloaded, rows, progress, f"{store}: {rows:,} rows")
                if subject.by_hand is not None:
                    subject.by_hand.prepare(rows)

            def show(name: str, rate: float, rows: int = rows) -> None:
                progress.console.print(f"{store:10} {rows:9,} rows  {name:24} {rate:10,.0f}/s")

            found = measure(partial(loads_on, subject, preloaded), asked, show)
            cells += [cell_of(store, rows, name, rounds) for name, rounds in found.items()]
    return cells


def rows_of(cells: list[Cell]) -> Iterator[Sequence[str]]:
    """A row for each load; ratios to the hand-written flow and to the store's limit."""
    rates = {(cell.store, cell.rows, cell.load): cell.rate for cell in cells}
    for cell in cells:
        against = [
            f"{cell.rate / rates[cell.store, cell.rows, base]:.2f}"
            if (cell.store, cell.rows, base) in rates
            else ""
            for base in (BY_HAND, LIMIT)
        ]
        yield (
            cell.store,
            f"{cell.rows:,}",
            cell.load,
            f"{cell.rate:,.0f}",
            f"{cell.p50_ms:.2f}",
            f"{cell.p99_ms:.2f}",
            *against,
        )


def main() -> int:
    """Measure and print."""
    every = ("memory", "sqlite", "postgresql", "mariadb", "redis")
    parser = arguments(__doc__, every, "benchmarks/results/ledger.json")
    parser.add_argument("--rows", type=int, default=1_000_000, help="records there before")
    cells = each_store(parser.parse_args(), measure_store)
    show_table(HEADINGS, rows_of(cells))
    return 0


if __name__ == "__main__":
    sys.exit(main())
