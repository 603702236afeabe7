"""`oncely status`: how many records there are, by consumer and state."""

import argparse
import json
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext

from rich.console import Console, Group
from rich.filesize import decimal
from rich.live import Live
from rich.table import Table

from oncely import ops
from oncely._util.signals import end_at_once, on_signals
from oncely.cli.ledger_arguments import opened
from oncely.cli.tables import Cell, consumers_table, loud, put
from oncely.core.record import State
from oncely.core.shown import shown, span
from oncely.ledger import Ledger
from oncely.stores.store import Backlog

_COLUMNS = [*(state.word for state in State), "in\ndoubt", "duplicates", "oldest\nprocessing"]
_COMPLETED = State.COMPLETED.word
_ABOUT = "~"
_WAITING_COLUMNS = ["waiting for\na retry", "overdue\nfor", "dead\nletters"]


def status(parsed: argparse.Namespace) -> int:
    """Print the counts of the ledger; with --watch again and again, until SIGINT or SIGTERM."""
    with opened(parsed) as ledger:
        if parsed.watch is None:
            _print(parsed, ledger)
        else:
            _watch(parsed, ledger)
    return 0


def _watch(parsed: argparse.Namespace, ledger: Ledger) -> None:
    """In place on a terminal, elsewhere one below another."""
    stop = threading.Event()
    console = Console()
    in_place = console.is_terminal and not parsed.json
    live = Live(console=console, auto_refresh=False)
    with on_signals(stop.set, end_at_once), live if in_place else nullcontext():
        while not stop.is_set():
            if in_place:
                found = ops.status(ledger)
                tables = [part for table in _tables(found) for part in (table, "")]
                live.update(Group(*tables, *_lines(found), _as_of()), refresh=True)
            else:
                _print(parsed, ledger)
                print("" if parsed.json else f"{_as_of()}\n\n", end="", flush=True)
            stop.wait(parsed.watch)


def _print(parsed: argparse.Namespace, ledger: Ledger) -> None:
    if parsed.json:
        print(json.dumps(ops.overview(ledger).as_dict()))
        return
    found = ops.status(ledger)
    for turn, table in enumerate(_tables(found)):
        if turn:
            print()
        put(table)
    lines = [*_lines(found)]
    if lines:
        print("", *lines, sep="\n")


def _as_of() -> str:
    return f"as of {time.strftime('%H:%M:%S')}"


def _tables(found: ops.Status) -> Iterator[Table]:
    """The records; and below them the waiting messages and dead letters, if there are any."""
    consumers = {name: _cells(summary) for name, summary in found.consumers.items()}
    yield consumers_table(_COLUMNS, consumers, _cells(found.total))
    waiting = {
        name: _waiting_cells(summary)
        for name, summary in found.consumers.items()
        if summary.waiting or summary.dead_letters
    }
    if waiting:
        yield consumers_table(_WAITING_COLUMNS, waiting, _waiting_cells(found.total))


def _lines(found: ops.Status) -> Iterator[str]:
    if found.total.is_estimate:
        yield f"{_ABOUT}: estimated from a sample, since there are more than {ops.EXACT:,} records"
    yield from _backlog(found.backlog)
    for name, backlog in found.queues.items():
        yield shown(f"queue {name}: {_waiting(backlog)}")
    if found.size_bytes is not None:
        yield f"size {decimal(found.size_bytes)}"


def _backlog(backlog: Backlog) -> Iterator[str]:
    """How many deferred messages wait; nothing if none do."""
    if backlog.waiting or backlog.set_aside:
        yield f"deferred messages: {_waiting(backlog)}; {backlog.set_aside:,} set aside"


def _waiting(backlog: Backlog) -> str:
    oldest = f" (oldest: {span(backlog.lag_s)})" if backlog.lag_s else ""
    return f"{backlog.waiting:,} waiting{oldest}"


def _cells(summary: ops.Summary) -> list[Cell]:
    oldest_s = summary.oldest_processing_s
    counts = {state.word: summary.counts.get(state, 0) for state in State}
    counts[ops.IN_DOUBT] = summary.in_doubt
    about = _ABOUT if summary.is_estimate else ""
    return [
        *(
            loud(f"{about if word == _COMPLETED else ''}{count:,}", word if count else "")
            for word, count in counts.items()
        ),
        f"{about}{summary.duplicates:,}",
        "-" if oldest_s is None else span(oldest_s),
    ]


def _waiting_cells(summary: ops.Summary) -> list[Cell]:
    return [
        f"{summary.waiting:,}",
        span(summary.waiting_lag_s) if summary.waiting_lag_s else "-",
        loud(f"{summary.dead_letters:,}", "dead" if summary.dead_letters else ""),
    ]
