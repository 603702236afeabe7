"""`oncely archive`: moves old completed and failed records from the ledger to Parquet."""

import argparse
import json
from dataclasses import asdict

from oncely.archive.writing import Archived
from oncely.archive.writing import archive as move
from oncely.cli.changes import login_name, tell_audit
from oncely.cli.ledger_arguments import opened
from oncely.cli.progress import Progress
from oncely.cli.tables import consumers_table, put


def archive(parsed: argparse.Namespace) -> int:
    """Archive in batches, and print what became of each consumer's records."""
    with opened(parsed) as ledger, Progress("reading the ledger") as progress:

        def show(consumer: str, so_far: Archived) -> None:
            progress.show(f"archived {so_far.archived:,} of {consumer}  {progress.took_s:.0f} s")

        archived = move(
            ledger,
            parsed.to,
            parsed.older_than,
            consumer=parsed.consumer,
            retention=dict(parsed.retention),
            batch=parsed.batch,
            on_batch=show,
            by=parsed.by or login_name(),
            why=parsed.why,
        )
    tell_audit(archived.audit_error)
    total = Archived()
    for each in archived.counts.values():
        total.add(each)
    if parsed.json:
        consumers = {name: asdict(each) for name, each in archived.counts.items()}
        told = {"consumers": consumers, "total": asdict(total), "audit_error": archived.audit_error}
        print(json.dumps(told))
        return 0
    shown = {name: _shown(each) for name, each in archived.counts.items()}
    put(consumers_table([*asdict(total)], shown, _shown(total)))
    return 0


def _shown(counts: Archived) -> list[str]:
    return [f"{count:,}" for count in asdict(counts).values()]
