"""`oncely purge`: removes completed and failed records after their consumer's retention."""

import argparse
import json
from collections import Counter

from oncely import ops
from oncely.cli.changes import login_name, tell_audit
from oncely.cli.ledger_arguments import opened
from oncely.cli.progress import Progress
from oncely.cli.tables import consumers_table, put


def purge(parsed: argparse.Namespace) -> int:
    """Purge in batches, and print how many records of each consumer were removed."""
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
            by=parsed.by or login_name(),
            why=parsed.why,
        )
    tell_audit(purged.audit_error)
    total = sum(purged.counts.values())
    if parsed.json:
        told = {"purged": purged.counts, "total": total, "audit_error": purged.audit_error}
        print(json.dumps(told))
        return 0
    shown = {consumer: [f"{count:,}"] for consumer, count in purged.counts.items()}
    put(consumers_table(["purged"], shown, [f"{total:,}"]))
    return 0
