"""`oncely status`: how many records there are; `activity`, `workers`, `runs` and `audit`: what went
on, and who changed what.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING

from oncely import ops
from oncely.cli import options, values
from oncely.cli.terminal import (
    Cell,
    ago,
    aligned,
    consumers_table,
    cut,
    loud,
    put,
    put_found,
    put_json,
    totals,
    unbroken,
    words,
)
from oncely.core.errors_by_kind import headline
from oncely.core.record import State
from oncely.core.shown import moment, shown, span
from oncely.core.state_words import IN_DOUBT

if TYPE_CHECKING:
    from rich.table import Table

    from oncely.core.activity import Run
    from oncely.ledger.ledger import Ledger
    from oncely.stores.store import Backlog

_COLUMNS = [*(state.word for state in State), "in\ndoubt", "duplicates", "oldest\nprocessing"]
_COMPLETED = State.COMPLETED.word
_ABOUT = "~"
_WAITING_COLUMNS = [
    *("waiting for\na retry", "overdue\nfor", "waiting for\ntheir sender", "dead\nletters"),
]


@options.command("status", "oncely status --watch 5")
@options.option(
    "--watch",
    values.PAUSE,
    "count again every so many seconds until stopped; 2 if no number follows",
    is_flag=False,
    flag_value="2",
)
@options.open_ledger
def status(ledger: "Ledger", watch: float | None, as_json: bool) -> None:
    """Count records by consumer and state."""
    if watch is None:
        _print(ledger, as_json=as_json)
    else:
        _watch(ledger, watch, as_json=as_json)


def _watch(ledger: "Ledger", pause_s: float, *, as_json: bool) -> None:
    """Until SIGINT or SIGTERM: in place on a terminal, elsewhere one below another."""
    from rich.console import Console, Group
    from rich.live import Live

    from oncely._util.signals import end_at_once, on_signals

    stop = threading.Event()
    console = Console()
    in_place = console.is_terminal and not as_json
    live = Live(console=console, auto_refresh=False)
    with on_signals(stop.set, end_at_once), live if in_place else nullcontext():
        while not stop.is_set():
            as_of = f"as of {time.strftime('%H:%M:%S')}"
            if in_place:
                found = ops.status(ledger)
                tables = [part for table in _tables(found) for part in (table, "")]
                live.update(Group(*tables, *_lines(found), as_of), refresh=True)
            else:
                _print(ledger, as_json=as_json)
                print("" if as_json else f"{as_of}\n\n", end="", flush=True)
            stop.wait(pause_s)


def _print(ledger: "Ledger", *, as_json: bool) -> None:
    if as_json:
        put_json(ops.overview(ledger).as_dict())
        return
    found = ops.status(ledger)
    for turn, table in enumerate(_tables(found)):
        if turn:
            print()
        put(table)
    lines = [*_lines(found)]
    if lines:
        print("", *lines, sep="\n")


def _tables(found: "ops.Status") -> Iterator["Table"]:
    """The records; and below them the waiting messages and dead letters, if there are any."""
    consumers = {name: _cells(summary) for name, summary in found.consumers.items()}
    yield consumers_table(_COLUMNS, consumers, _cells(found.total))
    waiting = {
        name: _waiting_cells(summary)
        for name, summary in found.consumers.items()
        if summary.waiting or summary.waiting_for_sender or summary.dead_letters
    }
    if waiting:
        yield consumers_table(_WAITING_COLUMNS, waiting, _waiting_cells(found.total))


def _lines(found: "ops.Status") -> Iterator[str]:
    from rich.filesize import decimal

    if found.total.is_estimate:
        yield f"{_ABOUT}: estimated from a sample, since there are more than {ops.EXACT:,} records"
    if found.backlog.waiting or found.backlog.set_aside:
        set_aside = f"{found.backlog.set_aside:,} set aside"
        set_aside += " (oncely outbox list --refused)" if found.backlog.set_aside else ""
        yield f"deferred messages: {_waiting(found.backlog)}; {set_aside}"
    for name, backlog in found.queues.items():
        yield shown(f"queue {name}: {_waiting(backlog)}")
    if found.size_bytes is not None:
        yield f"size {decimal(found.size_bytes)}"


def _waiting(backlog: "Backlog") -> str:
    oldest = f" (oldest: {span(backlog.lag_s)})" if backlog.lag_s else ""
    return f"{backlog.waiting:,} waiting{oldest}"


def _cells(summary: "ops.Summary") -> list[Cell]:
    oldest_s = summary.oldest_processing_s
    counts = {state.word: summary.counts.get(state, 0) for state in State}
    counts |= {"failed": summary.failed, IN_DOUBT: summary.in_doubt}
    about = _ABOUT if summary.is_estimate else ""
    return [
        *(
            loud(f"{about if word == _COMPLETED else ''}{count:,}", word if count else "")
            for word, count in counts.items()
        ),
        f"{about}{summary.duplicates:,}",
        None if oldest_s is None else span(oldest_s),
    ]


def _waiting_cells(summary: "ops.Summary") -> list[Cell]:
    return [
        summary.waiting,
        span(summary.waiting_lag_s) if summary.waiting_lag_s else None,
        loud(f"{summary.waiting_for_sender:,}", "in doubt" if summary.waiting_for_sender else ""),
        loud(f"{summary.dead_letters:,}", "dead" if summary.dead_letters else ""),
    ]


@options.command("activity", "oncely activity --json")
@options.open_ledger
def activity(ledger: "Ledger", as_json: bool) -> None:
    """Show what came of the messages of each consumer in the last hour and day."""
    ops.check_kept(ledger)
    found = ops.activity(ledger)
    if as_json:
        put_json(found.as_dict())
        return
    failed = ("failed\nattempts", "failed")
    counts = ("handled", "duplicates", *failed, "in\ndoubt", "p50", "p95", "attempts")
    put_found(
        ("consumer", "last", *map(aligned, counts)),
        (
            (
                *(consumer, name, rates.handled, rates.duplicates),
                *(rates.failed_attempts, rates.failed, rates.in_doubt),
                *(None if s is None else f"{s:g} s" for s in (rates.p50_s, rates.p95_s)),
                None if rates.attempts is None else f"{rates.attempts:.2f}",
            )
            for consumer in found.day
            for name, times in (("hour", found.hour), ("day", found.day))
            if (rates := times.get(consumer)) is not None
        ),
        "no activity in the last day",
    )


@options.command("workers", "oncely workers")
@options.open_ledger
def workers(ledger: "Ledger", as_json: bool) -> None:
    """List the processes that work with the ledger, those that were killed among them."""
    ops.check_kept(ledger)
    found, now = ops.workers(ledger), ledger.now()
    if as_json:
        put_json({"workers": [each.as_dict() for each in found]})
        return
    numbers = map(aligned, ("pid", "claims", "started", "last seen"))
    put_found(
        ("kind", "consumer", "host", *numbers, "version", ""),
        (
            (
                *(each.kind, each.consumer, each.host, str(each.pid), each.claims),
                *(ago(each.started, now), ago(each.seen, now), each.version),
                loud(seen.in_words, "dead" if seen.state == ops.GONE else ""),
            )
            for seen in found
            for each in [seen.worker]
        ),
        "no workers",
    )


@options.command("runs", "oncely runs --limit 10")
@options.limit(50)
@options.open_ledger
def runs(ledger: "Ledger", limit: int, as_json: bool) -> None:
    """List the runs on Spark, the newest first."""
    ops.check_kept(ledger)
    found, now = ops.runs(ledger, limit), ledger.now()
    if as_json:
        put_json({"runs": [{**run._asdict(), "is_killed": killed} for run, killed in found]})
        return
    put_found(
        ("name", "consumer", unbroken("began"), unbroken("took"), "totals"),
        (
            (
                *(run.name, run.consumer, moment(run.began, now)),
                loud("killed" if is_killed else "running", "dead" if is_killed else "")
                if run.ended is None
                else span(run.ended - run.began),
                cut(_came_of(run) or None),
            )
            for run, is_killed in found
        ),
        "no runs",
    )


@options.command("audit", "oncely audit --limit 20")
@options.limit()
@options.option("--before", values.NUMBER, "only entries numbered below this")
@options.open_ledger
def audit(ledger: "Ledger", limit: int, before: int | None, as_json: bool) -> None:
    """List what people have changed, the newest first."""
    ops.check_kept(ledger)
    found, now = ledger.operations.audit(limit, before), ledger.now()
    if as_json:
        put_json({"audit": [entry._asdict() for entry in found]})
        return
    texts = (unbroken("when"), "by", "action", "consumer", "message id")
    put_found(
        (aligned("id"), *texts, aligned("changed"), aligned("refused"), "why"),
        (
            (
                *(str(entry.id), ago(entry.at, now), entry.by, words(entry.action)),
                *(entry.consumer, entry.message_id, entry.changed_in_words(), entry.refused),
                cut(entry.why or None),
            )
            for entry in found
        ),
        "nobody has changed anything",
    )


def _came_of(run: "Run") -> str:
    """Why a run failed, and what it counted, if it is not nothing; the time has a column."""
    counted = ", ".join(f"{name} {count:,}" for name, count in totals(run.totals).items() if count)
    return "; ".join(filter(None, (headline(run.error or ""), counted)))
