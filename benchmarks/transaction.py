"""Messages in transactions of their own: the ledger inside them, beside the same ones without it.

All loads run in turn, several rounds, on tables without rows. What counts is the median of the
ratios within a round. Run with `make bench-transaction`; see `--help` for smaller runs.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import lru_cache, partial

from rich.progress import Progress
from tests import servers

from loads import Load, Process, Processes, one_by_one, windows
from rounds import Cell, arguments, cell_of, each_store, measure, show_table
from shop import CONNECTIONS, Shop

SERVERS: dict[str, type[servers.Server]] = {
    "postgresql": servers.Postgresql,
    "mariadb": servers.MariaDb,
}
WINDOW = 100
ONE, THREADS, PROCESSES = "1 connection", f"{CONNECTIONS} threads", f"{CONNECTIONS} processes"
WAYS: dict[str, Callable[[Shop], Process]] = {
    "insert": Shop.alone,
    "claim + insert": Shop.claimed,
    "once": Shop.decorated,
    "driver: insert": Shop.by_hand_alone,
    "driver: claim + insert": Shop.by_hand,
}
BASE = "insert"
WINDOWS = {
    f"insert, {WINDOW} together": Shop.window_alone,
    f"claim + insert, {WINDOW} together": Shop.window_claimed,
}
HEADINGS = ("store", "load", "messages/s", "p50 ms", "p99 ms", "of insert", "of insert, 1")


def process_of(url: str, way: str) -> Process:
    """A way to process messages, in a process of its own."""
    return WAYS[way](shop_at(url))


@lru_cache
def shop_at(url: str) -> Shop:
    """One shop for each process."""
    return Shop(url)


def loads_on(shop: Shop, url: str, processes: Processes) -> Iterator[tuple[str, Load]]:
    """Every load by its name, each on tables without rows."""
    for name, way in WAYS.items():
        make = partial(way, shop)
        for where, load in (
            (ONE, one_by_one(make, 1)),
            (THREADS, one_by_one(make, CONNECTIONS)),
            (PROCESSES, processes.one_by_one(partial(process_of, url, name))),
        ):
            shop.clear()
            yield f"{name}, {where}", load
    for name, window in WINDOWS.items():
        shop.clear()
        yield name, windows(partial(window, shop), WINDOW)


def measure_store(store: str, asked: argparse.Namespace, progress: Progress) -> list[Cell]:
    """The cells of one store."""

    def show(name: str, rate: float) -> None:
        progress.console.print(f"{store:10} {name:50} {rate:10,.0f}/s")

    with ExitStack() as stack:
        url = stack.enter_context(SERVERS[store]()).url
        shop = Shop(url)
        stack.callback(shop.close)
        shop.prepare()
        processes = stack.enter_context(Processes(CONNECTIONS))
        found = measure(partial(loads_on, shop, url, processes), asked, show)
    return [cell_of(store, 0, name, rounds) for name, rounds in found.items()]


def rows_of(cells: list[Cell]) -> Iterator[Sequence[str]]:
    """A row for each load; ratios to the insert alone on as many connections, and on one."""
    rates = {(cell.store, cell.load): cell.rates for cell in cells}
    for cell in cells:
        where = cell.load.rpartition(", ")[2]
        bases = (ONE if where.endswith("together") else where, ONE)
        yield (
            cell.store,
            cell.load,
            f"{cell.rate:,.0f}",
            f"{cell.p50_ms:.2f}",
            f"{cell.p99_ms:.2f}",
            *(f"{ratio(cell.rates, rates[cell.store, f'{BASE}, {base}']):.2f}" for base in bases),
        )


def ratio(rates: list[float], bases: list[float]) -> float:
    """The median of the ratios of both within a round, in which the machine was the same."""
    return statistics.median(rate / base for rate, base in zip(rates, bases, strict=True))


def main() -> int:
    """Measure and print."""
    parser = arguments(__doc__, tuple(SERVERS), "benchmarks/results/transaction.json")
    # Short rounds, but many: other work on the machine affects all loads alike.
    parser.set_defaults(rounds=7, seconds=1.0)
    cells = each_store(parser.parse_args(), measure_store)
    show_table(HEADINGS, rows_of(cells))
    return 0


if __name__ == "__main__":
    sys.exit(main())
