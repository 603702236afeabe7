"""`oncely migrate` and `oncely check`: the schema, and problems of the ledger or its settings."""

from typing import TYPE_CHECKING, Any, get_args

from oncely.cli import lazy_ops as ops
from oncely.cli import options, values
from oncely.cli.opening import to_migrate
from oncely.cli.options import LedgerName
from oncely.cli.terminal import put_json, say
from oncely.core.errors import ConfigError, StoreUnavailable, mask_passwords
from oncely.core.policy import Policy
from oncely.core.shown import shown
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
            raise ConfigError(
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
    of the ledger's URL lacks, retention, lease.
    """
    found = ops.problems(ledger, **settings)
    sentences = [mask_passwords(sentence) for sentence in found]
    if as_json:
        put_json({"problems": sentences})
    else:
        print("\n".join(shown(sentence) for sentence in sentences) or "no problems")
    return int(bool(sentences))
