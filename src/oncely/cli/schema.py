"""`oncely migrate` and `oncely check`: the schema, and what is wrong with ledger or settings."""

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory

from oncely import ops
from oncely.cli.opening import absent_file, opened, to_migrate
from oncely.cli.terminal import shown
from oncely.core.errors import mask_passwords
from oncely.ledger import Ledger


def migrate(parsed: argparse.Namespace) -> int:
    """Create or upgrade the schema, or print how."""
    with _to_look_at(parsed) if parsed.sql else to_migrate(parsed) as ledger:
        sql = ledger.migration_sql()
        if not parsed.sql:
            ledger.migrate()
    applied = bool(sql) and not parsed.sql
    if parsed.json:
        print(json.dumps({"applied": applied, "sql": sql}))
    elif parsed.sql and sql:
        print(sql.rstrip("\n"))
    else:
        print("migrated" if applied else "nothing to do: the schema is the newest", file=sys.stderr)
    return 0


@contextmanager
def _to_look_at(parsed: argparse.Namespace) -> Iterator[Ledger]:
    """The ledger, or one as new in a file that goes away: opening would create the real one."""
    with TemporaryDirectory() as folder:
        if absent_file(parsed) is not None:
            parsed.ledger = f"sqlite:///{folder}/new.db"
        with to_migrate(parsed) as ledger:
            yield ledger


def check(parsed: argparse.Namespace) -> int:
    """Print what can lose or repeat messages; return 1 where there is anything."""
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
