"""`oncely migrate` and `oncely check`: the schema, and problems of the ledger or its settings."""

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from oncely import ops
from oncely.cli.ledger_arguments import opened, to_migrate
from oncely.core.errors import ConfigError, StoreUnavailable, mask_passwords
from oncely.core.shown import shown


def migrate(parsed: argparse.Namespace) -> int:
    """Create or upgrade the schema, or print how."""
    with to_migrate(parsed, only_look=parsed.sql) as ledger, _reaching():
        sql = ledger.migration_sql()
        if not parsed.sql:
            ledger.migrate()
            # A store without a schema has not been reached so far.
            ledger.now()
    applied = bool(sql) and not parsed.sql
    if parsed.json:
        print(json.dumps({"applied": applied, "sql": sql}))
    elif parsed.sql and sql:
        print(sql.rstrip("\n"))
    else:
        print("migrated" if applied else "nothing to do: the schema is up to date", file=sys.stderr)
    return 0


@contextmanager
def _reaching() -> Iterator[None]:
    """A store that cannot be reached is reported as the user's mistake."""
    try:
        yield
    except StoreUnavailable as error:
        raise ConfigError(
            f"ledger: it cannot be reached: {error}; start it, or name another with --ledger"
        ) from error


def check(parsed: argparse.Namespace) -> int:
    """Print the problems that can lose or repeat messages; return 1 if there are any."""
    with opened(parsed) as ledger:
        found = ops.problems(
            ledger,
            lease=parsed.lease,
            broker_timeout=parsed.broker_timeout,
            replay_window=parsed.replay_window,
            retention=parsed.retention,
        )
    sentences = [mask_passwords(sentence) for sentence in found]
    if parsed.json:
        print(json.dumps({"problems": sentences}))
    else:
        print("\n".join(shown(sentence) for sentence in sentences) or "no problems")
    return int(bool(sentences))
