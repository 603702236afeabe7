"""`oncely purge`: what was completed or failed long ago goes, each consumer's own time after."""

import argparse
import json
from collections import Counter

from oncely import ops
from oncely.cli.ledger_arguments import opened
from oncely.cli.progress import Progress
from oncely.cli.tables import consumers_table, put


def purge(parsed: argparse.Namespace) -> int:
    """Purge in batches, and print how many records of each consumer went."""
    so_far: Counter[str] = Counter()
    with opened(parsed) as ledger, Progress() as progress:

        def show(consumer: str, batch: int) -> None:
            so_far[consumer] += batch
            progress.show(f"purged {so_far[consumer]:,} of {consumer}  {progress.took_s:.0f} s")

        purged = ops.purge(
            ledger,
            parsed.older_than,
            consumer=parsed.consumer,
            retention=dict(parsed.retention),
            batch=parsed.batch,
            on_batch=show,
        )
    total = sum(purged.values())
    if parsed.json:
        print(json.dumps({"purged": purged, "total": total}))
        return 0
    shown = {consumer: [f"{count:,}"] for consumer, count in purged.items()}
    put(consumers_table(["purged"], shown, [f"{total:,}"]))
    return 0
