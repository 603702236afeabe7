"""What a key in the commit adds to an append of 100,000 rows, beside the same append without it, in
Delta and in Iceberg.

Both write in turn, each to its own table, which grows with every append. Processor time and time
are medians over all appends. A catalog in SQLite and files in `--folder` stand for the real ones,
which take longer for both.
"""

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
from deltalake import write_deltalake
from pyiceberg.catalog.sql import SqlCatalog
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from oncely import lake

Append = Callable[[int], object]
"""Appends the rows; is given the number of the call."""


def _rows(number: int) -> pa.Table:
    chance = random.Random(1)
    return pa.table(
        {
            "id": [f"{chance.randrange(2**60):016x}" for _ in range(number)],
            "account": [chance.randrange(10**6) for _ in range(number)],
            "cents": pa.array([chance.randrange(10**5) for _ in range(number)], pa.int32()),
            "day": ["2026-11-27"] * number,
            "note": [f"note {each % 1_000}" for each in range(number)],
        }
    )


def _appends(rows: pa.Table, folder: Path) -> Iterator[tuple[str, Append, Append]]:
    """Each format with an append without a key, and one with it."""
    bare, keyed = str(folder / "bare"), str(folder / "keyed")
    for path in (bare, keyed):
        write_deltalake(path, rows.slice(0, 0))
    yield (
        "Delta",
        lambda _: write_deltalake(bare, rows, mode="append"),
        lambda number: lake.write_delta(keyed, rows, key=f"batch {number}"),
    )
    catalog = SqlCatalog("own", uri=f"sqlite:///{folder}/catalog", warehouse=f"file://{folder}/own")
    catalog.create_namespace("shop")
    alone, other = (catalog.create_table(f"shop.{name}", rows.schema) for name in ("bare", "keyed"))
    yield (
        "Iceberg",
        lambda _: alone.append(rows),
        lambda number: lake.write_iceberg(other, rows, key=f"batch {number}"),
    )


def _measured(both: tuple[Append, Append], rounds: int, tick: Callable[[], None]) -> list[str]:
    """Processor time and time of both, and the ratios."""
    found: list[tuple[list[float], list[float]]] = [([], []), ([], [])]
    for number in range(rounds + 1):
        for which in (0, 1) if number % 2 else (1, 0):
            begun = time.process_time(), time.perf_counter()
            both[which](number)
            if number:  # The first append has imported what it needs.
                found[which][0].append(time.process_time() - begun[0])
                found[which][1].append(time.perf_counter() - begun[1])
            tick()
    cells = []
    for bare, keyed in zip(*found, strict=True):
        without, with_ = statistics.median(bare), statistics.median(keyed)
        cells += [f"{without * 1_000:.1f}", f"{with_ * 1_000:.1f}", f"{with_ / without:.2f}"]
    return cells


def main() -> None:
    """Measure, and print a row for each format."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--folder", help="where the tables are; a temporary folder if not named")
    asked = parser.parse_args()
    table = Table(title=f"an append of {asked.rows} rows, ms", title_justify="left")
    for heading in ("table", "processor: bare", "keyed", "ratio", "time: bare", "keyed", "ratio"):
        table.add_column(heading, justify="left" if heading == "table" else "right")
    with (
        tempfile.TemporaryDirectory(dir=asked.folder) as folder,
        Progress(console=Console(stderr=True), transient=True) as progress,
    ):
        for name, *both in _appends(_rows(asked.rows), Path(folder)):
            task = progress.add_task(name, total=2 * (asked.rounds + 1))
            bare, keyed = both
            cells = _measured((bare, keyed), asked.rounds, lambda: progress.advance(task))  # noqa: B023
            table.add_row(name, *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
