"""The ledger on every store, beside the hand-written flow and beside its own statements without it.

All ways of one store run in turn, several rounds; the medians and their ratios count. Run with
`make bench-ledger`; `--stores`, `--rounds` and `--seconds` make it shorter.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

from rich.progress import Progress
from tests import servers

import hand_written
from loads import DUPLICATES, Load, batches, one_by_one, single_calls, tasks, windows
from oncely import Granted, Key, Ledger, open_ledger
from rounds import Cell, arguments, cell_of, each_store, measure, show_table
from same_statements import recorded

STORES = ("memory", "sqlite", "postgresql", "mariadb", "redis")
CONNECTIONS = (1, 8)
"""Of the hand-written flow."""
HEADINGS = (
    *("store", "work", "by hand, 1 / 8 connections", "same statements", "oncely"),
    *("oncely / by hand", "oncely / same"),
)
BATCH = 1_000
PRELOAD_BATCH = 5_000


class Subject:
    """A store to measure, and what it is compared with."""

    def __init__(self, url: str, by_hand: hand_written.HandWritten | None) -> None:
        self.url = url
        self.by_hand = by_hand
        self._count = 0

    @contextmanager
    def fresh(self) -> Iterator[Ledger]:
        """A ledger without records, its table never analysed."""
        self._count += 1
        with closing(open_ledger(self.url, table=f"bench_{self._count}")) as ledger:
            ledger.migrate()
            yield ledger


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
        yield Subject(url, by_hand)


class Work(NamedTuple):
    """Some messages in some way."""

    name: str
    through: Callable[..., Load]
    """The load through a ledger, of `callers` and `copies`."""
    callers: int
    size: int | None = 1
    """How many messages each caller's statements have; None: the ledger decides that."""
    copies: int = 0
    """One delivery in so many is a duplicate; 0: none."""
    stores: Collection[str] = STORES


in_batches = partial(batches, size=BATCH)
POSTGRESQL = ("postgresql",)
WORKS = (
    Work("batches of 1,000", in_batches, 1, BATCH),
    Work("batches of 1,000, 2 threads", in_batches, 2, BATCH, stores=POSTGRESQL),
    Work("batches of 1,000, a tenth duplicates", in_batches, 1, None, copies=DUPLICATES),
    Work("single calls, 1 thread", single_calls, 1),
    Work("single calls, 2 threads", single_calls, 2, stores=("postgresql", "mariadb")),
    Work("single calls, 8 threads", single_calls, 8),
    Work("single calls, 64 threads", single_calls, 64, stores=POSTGRESQL),
    Work("single calls, 64 tasks", tasks, 64, None, stores=POSTGRESQL),
)


def by_hand_name(connections: int, copies: int) -> str:
    """The name of a load of the hand-written flow."""
    return f"by hand, connections: {connections}{', a tenth duplicates' if copies else ''}"


def same_name(work: Work) -> str:
    """The name of the load of a work's statements without the ledger."""
    return f"same statements, {work.name}"


def preload(ledger: Ledger, rows: int, progress: Progress, title: str) -> None:
    """Complete so many messages, with ids that no load uses."""
    bar = progress.add_task(title, total=rows)
    for start in range(0, rows, PRELOAD_BATCH):
        keys = [Key("bench", str(uuid4())) for _ in range(min(PRELOAD_BATCH, rows - start))]
        outcomes = ledger.claim_many(keys)
        ledger.complete_many([o.claim for o in outcomes if isinstance(o, Granted)])
        progress.advance(bar, len(keys))


def loads_on(store: str, subject: Subject, preloaded: Ledger | None) -> Iterator[tuple[str, Load]]:
    """Every load by its name, each on a table without records unless a ledger is given."""
    for work in WORKS:
        if store not in work.stores:
            continue
        with nullcontext(preloaded) if preloaded else subject.fresh() as ledger:
            yield work.name, work.through(ledger, callers=work.callers, copies=work.copies)
        if subject.by_hand is None or work.size is None:
            continue
        with nullcontext(preloaded) if preloaded else subject.fresh() as ledger:
            same = recorded(ledger, subject.url, work.size)
            yield same_name(work), windows(same.connect, work.size, work.callers, work.copies)
    if subject.by_hand is not None:
        for copies in sorted({work.copies for work in WORKS}):
            for connections in CONNECTIONS:
                if preloaded is None:
                    subject.by_hand.prepare(0)
                by_hand = one_by_one(subject.by_hand.connect, connections, copies)
                yield by_hand_name(connections, copies), by_hand


def measure_store(store: str, asked: argparse.Namespace, progress: Progress) -> list[Cell]:
    """The cells of one store."""

    def show(name: str, rate: float) -> None:
        progress.console.print(f"{store:10} {name:53} {rate:10,.0f}/s")

    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        subject = stack.enter_context(opened(store, Path(folder)))
        preloaded = None
        if asked.rows:
            # First the table by hand: in Redis, that removes everything.
            if subject.by_hand is not None:
                subject.by_hand.prepare(asked.rows)
            preloaded = stack.enter_context(subject.fresh())
            preload(preloaded, asked.rows, progress, f"{store}: {asked.rows:,} rows")
        found = measure(partial(loads_on, store, subject, preloaded), asked, show)
    return [cell_of(store, asked.rows, name, rounds) for name, rounds in found.items()]


def rows_of(cells: list[Cell]) -> Iterator[Sequence[str]]:
    """A row for each work of each store; rates, and the ledger's ratios to the others."""
    rates = {(cell.store, cell.load): cell.rate for cell in cells}
    for store in dict.fromkeys(cell.store for cell in cells):
        for work in WORKS:
            ours = rates.get((store, work.name))
            if ours is None:
                continue
            names = [by_hand_name(connections, work.copies) for connections in CONNECTIONS]
            by_hand = [rates[store, name] for name in names if (store, name) in rates]
            same = [rates[store, name] for name in [same_name(work)] if (store, name) in rates]
            yield (
                *(store, work.name),
                *(_joined(by_hand), _joined(same), _joined([ours])),
                *(_joined([ours / rate for rate in others]) for others in (by_hand, same)),
            )


def _joined(figures: Sequence[float]) -> str:
    return " / ".join(f"{figure:,.{0 if figure >= 10 else 2}f}" for figure in figures)


def main() -> int:
    """Measure and print."""
    parser = arguments(__doc__, STORES, "benchmarks/results/ledger.json")
    # So that all takes six minutes.
    parser.set_defaults(seconds=1.5)
    parser.add_argument("--rows", type=int, default=0, help="records there before")
    cells = each_store(parser.parse_args(), measure_store)
    show_table(HEADINGS, rows_of(cells))
    return 0


if __name__ == "__main__":
    sys.exit(main())
