"""Opens the ledger or transport of a command; errors name the command's options."""

import argparse
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from shlex import quote
from tempfile import TemporaryDirectory

from oncely.core.errors import ConfigError, ContentionError, StoreError, StoreUnavailable
from oncely.ledger import Ledger, open_ledger
from oncely.locations import check_shared, check_shared_transport, hidden, read_secret
from oncely.stores.open_store import sqlite_file
from oncely.transports.open_transport import open_transport
from oncely.transports.transport import Transport


@contextmanager
def opened(parsed: argparse.Namespace) -> Iterator[Ledger]:
    """The ledger that --ledger, --table and --schema name, closed in the end.

    Raises ConfigError if there is no ledger yet, or if its schema is old.
    """
    url = _url(parsed)
    with hidden(url, parsed.ledger):
        file = _absent_file(url)
    if file is not None:
        # Opening a mistyped name would create an empty file.
        raise ConfigError(
            f"ledger: there is no file {str(file)!r}; "
            f"type: oncely migrate --ledger {quote(parsed.ledger)}"
        )
    with _at(url, parsed) as ledger:
        try:
            yield ledger
        except (StoreUnavailable, ContentionError):
            raise
        except StoreError as error:
            if ledger.migration_sql():
                raise ConfigError(f"ledger: {error}") from error
            raise


@contextmanager
def to_migrate(parsed: argparse.Namespace, *, only_look: bool) -> Iterator[Ledger]:
    """As `opened`, but the ledger need not exist yet.

    With `only_look` a missing SQLite file is replaced by a new ledger in a temporary file:
    opening would create the real one.
    """
    url = _url(parsed)
    with TemporaryDirectory() as folder:
        with hidden(url, parsed.ledger):
            if only_look and _absent_file(url) is not None:
                url = f"sqlite:///{folder}/new.db"
        with _at(url, parsed) as ledger:
            yield ledger


@contextmanager
def opened_transport(parsed: argparse.Namespace, *, only_look: bool = False) -> Iterator[Transport]:
    """The transport that --transport names, also by env:NAME or file:PATH; closed in the end.

    With `only_look` a queue's file must exist: a mistyped name would create an empty one.
    """
    if not parsed.transport:
        raise ConfigError("no transport is named; add --transport sqlite:///queue.db, or the like")
    url = check_shared_transport(read_secret(parsed.transport, "transport"))
    if only_look:
        check_transport_file(url)
    with hidden(url, parsed.transport):
        transport = open_transport(url)
    with closing(transport):
        yield transport


def check_transport_file(url: str) -> None:
    """Raise ConfigError for queues in a file that does not exist: opening it would create an empty
    one.
    """
    file = Path(url.partition("?")[0].removeprefix("sqlite:///"))
    if url.startswith("sqlite:///") and not file.is_file():
        raise ConfigError(f"transport: there is no file {str(file)!r}; name one with queues in it")


@contextmanager
def _at(url: str, parsed: argparse.Namespace) -> Iterator[Ledger]:
    with hidden(url, parsed.ledger):
        ledger = open_ledger(url, table=parsed.table, schema=parsed.schema)
    with closing(ledger):
        yield ledger


def _absent_file(url: str) -> Path | None:
    """The file of a ledger in SQLite that does not exist yet."""
    if not url.startswith("sqlite:"):
        return None
    file = sqlite_file(url)
    if file.is_dir():
        raise ConfigError(f"ledger: {str(file)!r} is a folder; name a file")
    return None if file.is_file() else file


def _url(parsed: argparse.Namespace) -> str:
    """The URL that --ledger names, also by env:NAME or file:PATH; read once."""
    if not parsed.ledger:
        raise ConfigError("no ledger is named; add --ledger sqlite:///ledger.db, or the like")
    return check_shared(read_secret(parsed.ledger, "ledger"))
