"""`oncely purge` and `oncely archive`: completed and failed records after their retention."""

from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING

from oncely.cli import lazy_ops as ops
from oncely.cli import options, values
from oncely.cli.options import Note, Past
from oncely.cli.tables import consumers_table, put
from oncely.cli.terminal import Progress, put_json, tell_audit

if TYPE_CHECKING:
    from oncely.ledger.ledger import Ledger


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


@options.command("archive", "oncely archive --to s3://bucket/ledger")
@options.option("--to", values.FOLDER, "a path, or a URI such as s3://bucket/folder", required=True)
@options.retention
@options.option("--batch", values.NUMBER, "records held in memory at once", default=50_000)
@options.note
@options.open_ledger
def archive(ledger: "Ledger", to: str, past: Past, batch: int, note: Note, as_json: bool) -> None:
    """Write records that were completed or failed long ago to Parquet, then remove them."""
    from oncely.archive.writing import Archived
    from oncely.archive.writing import archive as move

    with Progress("reading the ledger") as progress:

        def show(consumer: str, so_far: Archived) -> None:
            progress.show(f"archived {so_far.archived:,} of {consumer}  {progress.took_s:.0f} s")

        archived = move(ledger, to, **past, batch=batch, on_batch=show, **note)
    tell_audit(archived.audit_error)
    consumers = {name: asdict(each) for name, each in archived.counts.items()}
    total = {key: sum(each[key] for each in consumers.values()) for key in asdict(Archived())}
    if as_json:
        error = archived.audit_error
        put_json({"consumers": consumers, "total": total, "audit_error": error})
        return
    shown = {name: [*counts.values()] for name, counts in consumers.items()}
    put(consumers_table([*total], shown, [*total.values()]))
