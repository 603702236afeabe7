"""`oncely purge`: removes completed and failed records after their consumer's retention."""

from collections import Counter

import click

from oncely.cli import values
from oncely.cli.opening import opened
from oncely.cli.options import (
    LedgerName,
    Note,
    example,
    ledger_options,
    note_options,
    retention_options,
)
from oncely.cli.progress import Progress
from oncely.cli.tables import consumers_table, put
from oncely.cli.terminal import put_json, tell_audit


@click.command("purge", epilog=example("oncely purge --older-than 30d --retention billing=90d"))
@retention_options
@click.option("--batch", type=values.NUMBER, default=1_000, help="records in one transaction")
@note_options
@ledger_options
def purge(
    at: LedgerName,
    older_than: str | None,
    consumer: str | None,
    retention: tuple[tuple[str, str], ...],
    batch: int,
    note: Note,
    as_json: bool,
) -> None:
    """Remove records that were completed or failed long ago."""
    from oncely import ops

    so_far: Counter[str] = Counter()
    with opened(at) as ledger, Progress() as progress:

        def show(consumer: str, batch: int) -> None:
            so_far[consumer] += batch
            progress.show(f"purged {so_far[consumer]:,} of {consumer}  {progress.took_s:.0f} s")

        purged = ops.purge(
            ledger,
            older_than,
            consumer=consumer,
            retention=dict(retention),
            batch=batch,
            on_batch=show,
            **note,
        )
    tell_audit(purged.audit_error)
    total = sum(purged.counts.values())
    if as_json:
        put_json({"purged": purged.counts, "total": total, "audit_error": purged.audit_error})
        return
    shown = {consumer: [f"{count:,}"] for consumer, count in purged.counts.items()}
    put(consumers_table(["purged"], shown, [f"{total:,}"]))
