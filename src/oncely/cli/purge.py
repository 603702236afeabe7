"""`oncely purge`: removes completed and failed records after their consumer's retention."""

from collections import Counter
from typing import TYPE_CHECKING

from oncely.cli import lazy_ops as ops
from oncely.cli import options, values
from oncely.cli.options import Note, Past
from oncely.cli.progress import Progress
from oncely.cli.tables import consumers_table, put
from oncely.cli.terminal import put_json, tell_audit

if TYPE_CHECKING:
    from oncely.ledger import Ledger


@options.command("purge", "oncely purge --older-than 30d --retention billing=90d")
@options.retention
@options.option("--batch", values.NUMBER, "records in one transaction", default=1_000)
@options.note
@options.open_ledger
def purge(ledger: "Ledger", past: Past, batch: int, note: Note, as_json: bool) -> None:
    """Remove records that were completed or failed long ago."""
    so_far: Counter[str] = Counter()
    with Progress() as progress:

        def show(consumer: str, batch: int) -> None:
            so_far[consumer] += batch
            progress.show(f"purged {so_far[consumer]:,} of {consumer}  {progress.took_s:.0f} s")

        purged = ops.purge(ledger, **past, batch=batch, on_batch=show, **note)
    tell_audit(purged.audit_error)
    total = sum(purged.counts.values())
    if as_json:
        put_json({"purged": purged.counts, "total": total, "audit_error": purged.audit_error})
        return
    shown = {consumer: [count] for consumer, count in purged.counts.items()}
    put(consumers_table(["purged"], shown, [total]))
