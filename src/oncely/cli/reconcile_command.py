"""`oncely reconcile`: a source of messages against the ledger, as a table or JSON."""

import argparse
import json
from pathlib import Path

from rich.table import Table

from oncely.cli.progress import Progress
from oncely.cli.tables import aligned, cell, folded, new_table, put, words
from oncely.spark.operations.reconcile import Reconciliation, reconcile
from oncely.spark.operations.reconcile_file import read_reconcile_config


def run(parsed: argparse.Namespace) -> int:
    """Reconcile; return 1 if messages are missing, have failed or are in doubt, else 0."""
    config = read_reconcile_config(
        Path(parsed.file), parsed.ledger, parsed.consumer, parsed.table, parsed.schema
    )
    with Progress("comparing on Spark"):
        found = reconcile(config, parsed.archive, parsed.to)
    if parsed.json:
        print(json.dumps(found.as_dict()))
    else:
        put(reconciled_table(found))
    return int(found.has_failures)


def reconciled_table(found: Reconciliation) -> Table:
    """The result as a table for a terminal."""
    table = new_table(folded(), aligned(), show_header=False)
    told = found.as_dict()
    table.add_row("received", f"{found.received:,}", end_section=True)
    for outcome in ("handled", "missing", "in_doubt", "failed", "processing", "duplicates"):
        table.add_row(words(outcome), f"{told[outcome]:,}")
    for reason, count in told["quarantined"].items():
        table.add_row(cell(f"quarantined: {reason}"), f"{count:,}")
    if not told["quarantined"]:
        table.add_row("quarantined", "0")
    table.add_section()
    for outcome, count in told["not_in_source"].items():
        if count or outcome == "handled":
            table.add_row(f"{words(outcome)}, but not in the source", f"{count:,}")
    return table
