"""`oncely archive`: moves old completed and failed records from the ledger to Parquet."""

from dataclasses import asdict
from typing import TYPE_CHECKING

from oncely.cli import options, values
from oncely.cli.options import Note, Past
from oncely.cli.progress import Progress
from oncely.cli.tables import consumers_table, put
from oncely.cli.terminal import put_json, tell_audit

if TYPE_CHECKING:
    from oncely.ledger import Ledger


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
    total = Archived()
    for each in archived.counts.values():
        total.add(each)
    consumers = {name: asdict(each) for name, each in archived.counts.items()}
    if as_json:
        error = archived.audit_error
        put_json({"consumers": consumers, "total": asdict(total), "audit_error": error})
        return
    shown = {name: [*counts.values()] for name, counts in consumers.items()}
    put(consumers_table([*asdict(total)], shown, [*asdict(total).values()]))
