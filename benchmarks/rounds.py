"""Loads in turn, in several rounds, on one store after the other; and their results."""

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from tests import servers

from loads import Load, Measured

_FILE_WIDTH = 160
"""Characters of a line in a file or a pipe, which have no width of their own."""


@dataclass
class Cell:
    """One load on one store: the median round."""

    store: str
    rows: int
    """Records there before."""
    load: str
    rate: float
    """Messages a second."""
    p50_ms: float
    """Of a message; of a batch, where there are batches."""
    p99_ms: float
    rates: list[float]


def arguments(description: str | None, stores: Sequence[str], json: str) -> argparse.ArgumentParser:
    """The arguments of every benchmark."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--stores", nargs="+", choices=stores, default=stores)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0, help="for one load in one round")
    parser.add_argument("--json", default=json, help="write every cell there")
    return parser


def measure(
    loads: Callable[[], Iterable[tuple[str, Load]]],
    asked: argparse.Namespace,
    show: Callable[[str, float], None],
) -> dict[str, list[Measured]]:
    """Every load in every round, in turn, after a short round that does not count."""
    found: dict[str, list[Measured]] = defaultdict(list)
    for number in range(asked.rounds + 1):
        for name, load in loads():
            measured = load(asked.seconds if number else asked.seconds / 4)
            show(name, measured.rate)
            if number:
                found[name].append(measured)
    return found


def cell_of(store: str, rows: int, load: str, rounds: list[Measured]) -> Cell:
    """The median of the rates, and the percentiles over all rounds."""
    latencies = [latency for measured in rounds for latency in measured.latencies_s]
    percentiles = statistics.quantiles(latencies, n=100) if len(latencies) > 1 else latencies * 99
    rates = [measured.rate for measured in rounds]
    return Cell(
        store=store,
        rows=rows,
        load=load,
        rate=statistics.median(rates),
        p50_ms=percentiles[49] * 1000,
        p99_ms=percentiles[98] * 1000,
        rates=rates,
    )


def each_store(
    asked: argparse.Namespace,
    measure_store: Callable[[str, argparse.Namespace, Progress], list[Cell]],
) -> list[Cell]:
    """The cells of every store that this machine can run, written to a file one by one."""
    Path(asked.json).parent.mkdir(parents=True, exist_ok=True)
    console = Console(stderr=True)
    cells: list[Cell] = []
    with Progress(console=console, transient=True) as progress:
        for store in asked.stores:
            try:
                cells += measure_store(store, asked, progress)
            except servers.MissingProgram as missing:
                console.print(f"{store} is left out: {missing}")
            # After each store: its cells stay, even if the next store fails.
            Path(asked.json).write_text(json.dumps([asdict(cell) for cell in cells], indent=1))
    return cells


def show_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a row for each load; words to the left, figures to the right."""
    table = Table(title="messages/s, medians", title_justify="left")
    for heading in headings:
        table.add_column(
            heading, justify="left" if heading in {"store", "load", "work"} else "right"
        )
    for row in rows:
        table.add_row(*row)
    console = Console()
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    console.print(table)
