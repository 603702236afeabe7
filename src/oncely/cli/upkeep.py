"""`oncely migrate`, `check`, `purge` and `archive`: the schema, problems of a ledger or its
settings, and records after their retention.
"""

from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, get_args

from oncely import ops
from oncely.cli import options, values
from oncely.cli.opening import to_migrate
from oncely.cli.options import LedgerName, Note
from oncely.cli.terminal import Progress, consumers_table, put, put_json, say, tell_audit
from oncely.core.errors import StoreUnavailable, mask_passwords
from oncely.core.policy import DEAD_RETENTION, Policy
from oncely.core.shown import shown, utc
from oncely.stores.names import Program

if TYPE_CHECKING:
    from oncely.ledger.ledger import Ledger


@options.command("migrate", "oncely migrate --ledger sqlite:///ledger.db")
@options.flag("--sql", "print the SQL and change nothing", "only_print")
@options.ledger
def migrate(at: LedgerName, only_print: bool, as_json: bool) -> None:
    """Create or upgrade the schema."""
    with to_migrate(at, only_look=only_print) as ledger:
        try:
            sql = ledger.migration_sql()
            if not only_print:
                ledger.migrate()
                # A store without a schema has not been reached so far.
                ledger.now()
        except StoreUnavailable as error:
            raise StoreUnavailable(
                f"ledger: it cannot be reached: {error}; start it, or name another with --ledger"
            ) from error
    applied = bool(sql) and not only_print
    if as_json:
        put_json({"applied": applied, "sql": sql})
    elif only_print and sql:
        print(sql.rstrip("\n"))
    else:
        say("migrated" if applied else "nothing to do: the schema is up to date")


@options.command("check", "oncely check --replay-window 7d --broker-timeout 30m")
@options.option(
    "--for",
    get_args(Program),
    "the kind of program whose privileges in the database are checked",
    "program",
    default="worker",
)
@options.time("--replay-window", "how long a message may be delivered again")
@options.time("--retention", "how long records are kept, instead of each consumer's own retention")
@options.time("--broker-timeout", "how long the broker waits for an acknowledgement")
@options.option("--lease", values.LEASE, "a claim's time limit, or none", default=Policy().lease)
@options.open_ledger
def check(ledger: "Ledger", as_json: bool, **settings: Any) -> int:
    """Find what can lose or repeat messages: the schema, store settings, privileges that the role
    of the ledger's URL lacks, retention, lease, messages that are stuck.
    """
    found = [
        *ops.problems(ledger, **settings),
        *ops.left_to_senders(ledger),
        *(
            f"stuck: {each.sentence}. List them: {each.command}"
            for each in ops.stuck(ops.status(ledger))
            if each.what is not ops.Snag.FOR_SENDER
        ),
    ]
    sentences = [mask_passwords(sentence) for sentence in found]
    if as_json:
        put_json({"problems": sentences})
    else:
        print("\n".join(shown(sentence) for sentence in sentences) or "no problems")
    return int(bool(sentences))


@options.command("purge", "oncely purge --older-than 30d --retention billing=90d")
@options.retention
@options.time("--dead-older-than", "dead letters set aside longer ago", default=DEAD_RETENTION)
@options.time("--audit-older-than", "entries of the audit of longer ago", default=DEAD_RETENTION)
@options.option("--batch", values.NUMBER, "records in one transaction", default=1_000)
@options.flag("--dry-run", "say what would be removed, and up to when; change nothing")
@options.note
@options.open_ledger
def purge(ledger: "Ledger", batch: int, note: Note, as_json: bool, **past: Any) -> None:
    """Remove records that were completed or failed long ago, old dead letters, the old audit."""
    so_far: Counter[str] = Counter()
    with Progress() as progress:

        def show(consumer: str, batch: int) -> None:
            so_far[consumer] += batch
            progress.show(f"purged {so_far[consumer]:,} of {consumer}  {progress.took_s:.0f} s")

        purged = ops.purge(ledger, batch=batch, on_batch=show, **note, **past)
    tell_audit(purged.audit_error)
    counts, letters, before = purged.counts, purged.dead_letters, purged.before
    total = sum(counts.values())
    if as_json:
        rest = {"dead_letters": letters, "audit": purged.audit, "before": before}
        put_json({"purged": counts, "total": total, **rest, "audit_error": purged.audit_error})
        return
    until = {name: utc(at) for name, at in before.items()}
    names = {**counts, **letters}
    rows = {name: [counts.get(name, 0), letters.get(name, 0), until.get(name)] for name in names}
    columns = ["to purge" if past["dry_run"] else "purged", "dead letters", "last seen before"]
    put(consumers_table(columns, rows, [total, sum(letters.values()), None]))
    if purged.audit:
        print(f"entries of the audit: {purged.audit:,}")


@options.command("archive", "oncely archive --to s3://bucket/ledger")
@options.option(
    "--to",
    "FOLDER",
    "a path, or a URI such as s3://bucket/folder",
    required=True,
    shell_complete=values.folders,
)
@options.retention
@options.option("--batch", values.NUMBER, "records held in memory at once", default=50_000)
@options.note
@options.open_ledger
def archive(ledger: "Ledger", to: str, batch: int, note: Note, as_json: bool, **past: Any) -> None:
    """Write records that were completed or failed long ago to Parquet, then remove them."""
    from oncely.archive.writing import Archived
    from oncely.archive.writing import archive as move

    with Progress("reading the ledger") as progress:

        def show(consumer: str, so_far: Archived) -> None:
            progress.show(f"archived {so_far.archived:,} of {consumer}  {progress.took_s:.0f} s")

        archived = move(ledger, to, batch=batch, on_batch=show, **note, **past)
    tell_audit(archived.audit_error)
    consumers = {name: asdict(each) for name, each in archived.counts.items()}
    total = {key: sum(each[key] for each in consumers.values()) for key in asdict(Archived())}
    if as_json:
        error = archived.audit_error
        put_json({"consumers": consumers, "total": total, "audit_error": error})
        return
    rows = {name: [*counts.values()] for name, counts in consumers.items()}
    put(consumers_table([*total], rows, [*total.values()]))
