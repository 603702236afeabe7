"""`oncely activity`, `workers`, `runs` and `audit`: what went on, and who changed what."""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Column, Table

from oncely import ops
from oncely.cli.ledger_arguments import opened
from oncely.cli.tables import aligned, cell, cut, folded, loud, new_table, put, words
from oncely.core.activity import AuditEntry, Run
from oncely.core.shown import moment, span


def activity(parsed: argparse.Namespace) -> int:
    """Print the rates of each consumer in the last hour and day."""
    with opened(parsed) as ledger:
        ops.check_kept(ledger)
        found = ops.activity(ledger)
    if parsed.json:
        print(json.dumps(found.as_dict()))
        return 0
    if not found.day:
        print("no activity in the last day", file=sys.stderr)
        return 0
    put(_rates_table({"hour": found.hour, "day": found.day}))
    return 0


def workers(parsed: argparse.Namespace) -> int:
    """Print the processes that work with the ledger."""
    with opened(parsed) as ledger:
        ops.check_kept(ledger)
        found, now = ops.workers(ledger), ledger.now()
    if parsed.json:
        print(json.dumps({"workers": [each.as_dict() for each in found]}))
        return 0
    if not found:
        print("no workers", file=sys.stderr)
        return 0
    put(_workers_table(found, now))
    return 0


def runs(parsed: argparse.Namespace) -> int:
    """Print the runs on Spark."""
    with opened(parsed) as ledger:
        ops.check_kept(ledger)
        found, now = ops.runs(ledger, parsed.limit), ledger.now()
    if parsed.json:
        print(json.dumps({"runs": [run._asdict() for run in found]}))
        return 0
    if not found:
        print("no runs", file=sys.stderr)
        return 0
    put(_runs_table(found, now), last_gives_way=True)
    return 0


def audit(parsed: argparse.Namespace) -> int:
    """Print what people have changed."""
    with opened(parsed) as ledger:
        ops.check_kept(ledger)
        found, now = ops.audit(ledger, parsed.limit, parsed.before), ledger.now()
    if parsed.json:
        print(json.dumps({"audit": [entry._asdict() for entry in found]}))
        return 0
    if not found:
        print("nobody has changed anything", file=sys.stderr)
        return 0
    put(_audit_table(found, now), last_gives_way=True)
    return 0


# ---- In words ----------------------------------------------------------------------------------


def _rates_table(times: Mapping[str, Mapping[str, ops.Rates]]) -> Table:
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


def _workers_table(found: Sequence[ops.SeenWorker], now: float) -> Table:
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


def _runs_table(found: Sequence[Run], now: float) -> Table:
    began = Column("began", no_wrap=True)
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


def _audit_table(found: Sequence[AuditEntry], now: float) -> Table:
    texts = (Column("when", no_wrap=True), folded("by"), "action", folded("consumer"))
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
