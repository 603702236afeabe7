"""`oncely activity`, `workers`, `runs` and `audit`: what went on, and who changed what."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from oncely.cli import lazy_ops as ops
from oncely.cli import options, values
from oncely.cli.opening import opened
from oncely.cli.options import LedgerName
from oncely.cli.tables import (
    aligned,
    cell,
    cut,
    folded,
    loud,
    new_table,
    put_found,
    unbroken,
    words,
)
from oncely.cli.terminal import put_json
from oncely.core.shown import moment, span

if TYPE_CHECKING:
    from rich.table import Table

    from oncely.core.activity import AuditEntry, Run


@click.command("activity", epilog=options.example("oncely activity --json"))
@options.ledger
def activity(at: LedgerName, as_json: bool) -> None:
    """Show what came of the messages of each consumer in the last hour and day."""
    with opened(at) as ledger:
        ops.check_kept(ledger)
        found = ops.activity(ledger)
    if as_json:
        put_json(found.as_dict())
    else:
        table = _rates_table({"hour": found.hour, "day": found.day})
        put_found(table, "no activity in the last day")


@click.command("workers", epilog=options.example("oncely workers"))
@options.ledger
def workers(at: LedgerName, as_json: bool) -> None:
    """List the processes that work with the ledger, those that were killed among them."""
    with opened(at) as ledger:
        ops.check_kept(ledger)
        found, now = ops.workers(ledger), ledger.now()
    if as_json:
        put_json({"workers": [each.as_dict() for each in found]})
    else:
        put_found(_workers_table(found, now), "no workers")


@click.command("runs", epilog=options.example("oncely runs --limit 10"))
@options.limit(50)
@options.ledger
def runs(at: LedgerName, limit: int, as_json: bool) -> None:
    """List the runs on Spark, the newest first."""
    with opened(at) as ledger:
        ops.check_kept(ledger)
        found, now = ops.runs(ledger, limit), ledger.now()
    if as_json:
        put_json({"runs": [run._asdict() for run in found]})
    else:
        put_found(_runs_table(found, now), "no runs")


@click.command("audit", epilog=options.example("oncely audit --limit 20"))
@options.limit()
@click.option("--before", type=values.NUMBER, help="only entries numbered below this")
@options.ledger
def audit(at: LedgerName, limit: int, before: int | None, as_json: bool) -> None:
    """List what people have changed, the newest first."""
    with opened(at) as ledger:
        ops.check_kept(ledger)
        found, now = ops.audit(ledger, limit, before), ledger.now()
    if as_json:
        put_json({"audit": [entry._asdict() for entry in found]})
    else:
        put_found(_audit_table(found, now), "nobody has changed anything")


# ---- In words ----------------------------------------------------------------------------------


def _rates_table(times: Mapping[str, Mapping[str, "ops.Rates"]]) -> "Table":
    failed = ("failed\nattempts", "failed\npermanently")
    counts = ("handled", "duplicates", *failed, "in\ndoubt", "p50", "p95", "attempts")
    table = new_table(folded("consumer"), "last", *map(aligned, counts))
    for consumer in times["day"]:
        for name, rates in ((name, found.get(consumer)) for name, found in times.items()):
            if rates is not None:
                numbers = (rates.handled, rates.duplicates, rates.failed, rates.exhausted)
                table.add_row(
                    cell(consumer),
                    name,
                    *(f"{number:,}" for number in (*numbers, rates.in_doubt)),
                    *map(_took, (rates.p50_s, rates.p95_s)),
                    "-" if rates.attempts is None else f"{rates.attempts:.2f}",
                )
    return table


def _took(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:g} s"


def _workers_table(found: Sequence["ops.SeenWorker"], now: float) -> "Table":
    texts = ("kind", folded("consumer"), folded("host"))
    ages = (aligned("started"), aligned("last seen"))
    table = new_table(*texts, aligned("pid"), aligned("claims"), *ages, "version", "")
    for worker, is_alive in found:
        table.add_row(
            worker.kind,
            cell(worker.consumer or "-"),
            cell(worker.host),
            str(worker.pid),
            f"{worker.claims:,}",
            *(f"{span(now - at)} ago" for at in (worker.started, worker.seen)),
            cell(worker.version),
            "" if is_alive else loud("silent", "dead"),
        )
    return table


def _runs_table(found: Sequence["Run"], now: float) -> "Table":
    began = unbroken("began")
    table = new_table(folded("name"), folded("consumer"), began, aligned("took"), "totals")
    for run in found:
        table.add_row(
            cell(run.name),
            cell(run.consumer or "-"),
            moment(run.began, now),
            "-" if run.ended is None else span(run.ended - run.began),
            cut(run.error or _totals_in_words(run.totals) or "-"),
        )
    return table


def _totals_in_words(totals: Mapping[str, Any]) -> str:
    """What a run counted, if it is not nothing; the time that it took has a column."""
    counted = {
        name: sum(each.values()) if isinstance(each, Mapping) else each
        for name, each in totals.items()
        if name != "seconds"
    }
    return ", ".join(f"{words(name)} {count:,}" for name, count in counted.items() if count)


def _audit_table(found: Sequence["AuditEntry"], now: float) -> "Table":
    texts = (unbroken("when"), folded("by"), "action", folded("consumer"))
    counts = (folded("message id"), aligned("changed"), aligned("refused"))
    table = new_table(aligned("id"), *texts, *counts, "why")
    for entry in found:
        table.add_row(
            str(entry.id),
            f"{span(now - entry.at)} ago",
            cell(entry.by),
            cell(entry.action.replace("_", " ")),
            cell(entry.consumer or "-"),
            cell(entry.message_id or "-"),
            entry.changed_in_words(),
            "-" if entry.refused is None else f"{entry.refused:,}",
            cut(entry.why or "-"),
        )
    return table
