"""`oncely status`: how many records there are, by consumer and state."""

import argparse
import json
from collections.abc import Iterator

from rich.filesize import decimal
from rich.table import Table

from oncely import ops
from oncely.cli.opening import opened
from oncely.cli.tables import cell, new_table, put
from oncely.cli.terminal import span
from oncely.core.record import State
from oncely.stores.base import Backlog


def status(parsed: argparse.Namespace) -> int:
    """Print where the ledger stands."""
    with opened(parsed) as ledger:
        found = ops.status(ledger)
    if parsed.json:
        print(json.dumps(found.as_dict()))
        return 0
    put(status_table(found))
    lines = [*_backlog(found.backlog)]
    if found.size_bytes is not None:
        lines.append(f"size {decimal(found.size_bytes)}")
    if lines:
        print("", *lines, sep="\n")
    return 0


def _backlog(backlog: Backlog) -> Iterator[str]:
    """What deferred messages wait; nothing where none do."""
    if backlog.waiting or backlog.set_aside:
        oldest = f", the oldest for {span(backlog.lag_s)}" if backlog.lag_s else ""
        waiting = f"{backlog.waiting:,} wait{oldest}"
        yield f"deferred messages: {waiting}; {backlog.set_aside:,} set aside"


def status_table(status: ops.Status) -> Table:
    """A row for each consumer, and the total."""
    table = new_table()
    table.add_column("consumer", overflow="fold")
    for name in (*State, "in\ndoubt", "duplicates", "oldest\nprocessing"):
        table.add_column(name, justify="right", no_wrap=True)
    for consumer, summary in status.consumers.items():
        table.add_row(cell(consumer), *_cells(summary))
    table.add_section()
    table.add_row("total", *_cells(status.total))
    return table


def _cells(summary: ops.Summary) -> list[str]:
    oldest_s = summary.oldest_processing_s
    counts = [*(summary.counts.get(state, 0) for state in State), summary.in_doubt]
    return [
        *(f"{count:,}" for count in (*counts, summary.duplicates)),
        "-" if oldest_s is None else span(oldest_s),
    ]
