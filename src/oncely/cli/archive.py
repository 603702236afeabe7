"""`oncely archive`: what was completed or failed long ago goes to Parquet, then from the ledger."""

import argparse
import json
from dataclasses import asdict

from oncely.archive.writing import Archived
from oncely.archive.writing import archive as move
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
        )
    total = Archived()
    for each in archived.values():
        total.add(each)
    if parsed.json:
        consumers = {name: asdict(each) for name, each in archived.items()}
        print(json.dumps({"consumers": consumers, "total": asdict(total)}))
        return 0
    shown = {name: _shown(each) for name, each in archived.items()}
    put(consumers_table([*asdict(total)], shown, _shown(total)))
    return 0


def _shown(counts: Archived) -> list[str]:
    return [f"{count:,}" for count in asdict(counts).values()]
