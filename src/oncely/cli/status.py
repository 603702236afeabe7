"""`oncely status`: how many records there are, by consumer and state."""

import argparse
import json
from collections.abc import Iterator

from rich.filesize import decimal

from oncely import ops
from oncely.cli.ledger_arguments import opened
from oncely.cli.tables import consumers_table, put
from oncely.cli.terminal import span
from oncely.core.record import State
from oncely.stores.store import Backlog

_COLUMNS = [*(state.word for state in State), "in\ndoubt", "duplicates", "oldest\nprocessing"]


def status(parsed: argparse.Namespace) -> int:
    """Print where the ledger stands."""
    with opened(parsed) as ledger:
        found = ops.status(ledger)
    if parsed.json:
        print(json.dumps(found.as_dict()))
        return 0
    consumers = {name: _cells(summary) for name, summary in found.consumers.items()}
    put(consumers_table(_COLUMNS, consumers, _cells(found.total)))
    lines = [*_backlog(found.backlog)]
    if found.size_bytes is not None:
        lines.append(f"size {decimal(found.size_bytes)}")
    if lines:
        print("", *lines, sep="\n")
    return 0


def _backlog(backlog: Backlog) -> Iterator[str]:
    """What deferred messages wait; nothing where none do."""
    if backlog.waiting or backlog.set_aside:
        oldest = f" (oldest: {span(backlog.lag_s)})" if backlog.lag_s else ""
        waiting = f"{backlog.waiting:,} waiting{oldest}"
        yield f"deferred messages: {waiting}; {backlog.set_aside:,} set aside"


def _cells(summary: ops.Summary) -> list[str]:
    oldest_s = summary.oldest_processing_s
    counts = [*(summary.counts.get(state, 0) for state in State), summary.in_doubt]
    return [
        *(f"{count:,}" for count in (*counts, summary.duplicates)),
        "-" if oldest_s is None else span(oldest_s),
    ]
