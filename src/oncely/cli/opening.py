"""The ledger that a command is about: opened, and its mistakes told in the command's words."""

import argparse
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from oncely.core.errors import ConfigError, ContentionError, StoreError, StoreUnavailable
from oncely.ledger import Ledger
from oncely.locations import check_shared, open_named_ledger, read_secret
from oncely.stores.opening import sqlite_file


@contextmanager
def opened(parsed: argparse.Namespace) -> Iterator[Ledger]:
    """The ledger that --ledger, --table and --schema name, closed in the end.

    Raises ConfigError where there is none yet, or where an old schema is in the way.
    """
    file = absent_file(parsed)
    if file is not None:
        # Opening it would leave an empty file where somebody has mistyped a name.
        raise ConfigError(f"ledger: there is no file {str(file)!r}; type: oncely migrate")
    with to_migrate(parsed) as ledger:
        try:
            yield ledger
        except (StoreUnavailable, ContentionError):
            raise
        except StoreError as error:
            if ledger.migration_sql():
                raise ConfigError(f"ledger: {error}") from error
            raise


@contextmanager
def to_migrate(parsed: argparse.Namespace) -> Iterator[Ledger]:
    """As `opened`, whether or not there is a ledger yet."""
    _url(parsed)
    ledger = open_named_ledger(parsed.ledger, table=parsed.table, schema=parsed.schema)
    with closing(ledger):
        yield ledger


def absent_file(parsed: argparse.Namespace) -> Path | None:
    """The file of a ledger in SQLite that does not exist yet."""
    url = _url(parsed)
    if not url.startswith("sqlite:"):
        return None
    file = sqlite_file(url)
    return None if file.is_file() else file


def _url(parsed: argparse.Namespace) -> str:
    """What --ledger says, or what env:NAME or file:PATH in it stands for."""
    if not parsed.ledger:
        raise ConfigError("no ledger is named; add --ledger sqlite:///ledger.db, or the like")
    return check_shared(read_secret(parsed.ledger, "ledger"))
