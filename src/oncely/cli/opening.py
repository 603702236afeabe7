"""Opens the ledger or transport of a command; errors name the command's options."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from shlex import quote
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from oncely.cli.options import LedgerName
from oncely.core.errors import ConfigError, ContentionError, StoreError, StoreUnavailable

if TYPE_CHECKING:
    from oncely.ledger.ledger import Ledger
    from oncely.transports.transport import Transport


@contextmanager
def opened(at: LedgerName) -> Iterator["Ledger"]:
    """The ledger of that name, closed in the end.

    Raises ConfigError if there is no ledger yet, or if its schema is old.
    """
    url, file = _located(at)
    if file is not None:
        # Opening a mistyped name would create an empty file.
        raise ConfigError(
            f"ledger: there is no file {str(file)!r}; "
            f"type: oncely migrate --ledger {quote(at.url or '')}"
        )
    with _open(url, at) as ledger:
        try:
            yield ledger
        except (StoreUnavailable, ContentionError):
            raise
        except StoreError as error:
            if ledger.migration_sql():
                raise ConfigError(f"ledger: {error}") from error
            raise


@contextmanager
def to_migrate(at: LedgerName, *, only_look: bool) -> Iterator["Ledger"]:
    """As `opened`, but the ledger need not exist yet.

    With `only_look` a missing SQLite file is replaced by a new ledger in a temporary file:
    opening would create the real one.
    """
    url, file = _located(at)
    with TemporaryDirectory() as folder:
        if only_look and file is not None:
            url = f"sqlite:///{folder}/new.db"
        with _open(url, at) as ledger:
            yield ledger


@contextmanager
def opened_transport(name: str | None) -> Iterator["Transport"]:
    """The transport of that URL, also by env:NAME or file:PATH; closed in the end."""
    from oncely.locations import open_named_transport

    if not name:
        raise ConfigError("no transport is named; add --transport sqlite:///queue.db, or the like")
    with closing(open_named_transport(name)) as transport:
        yield transport


def _located(at: LedgerName) -> tuple[str, Path | None]:
    """The URL, which is read once; and the file of a ledger in SQLite that does not exist yet."""
    from oncely.locations import check_shared, hidden, read_secret
    from oncely.stores.open_store import sqlite_file

    if not at.url:
        raise ConfigError("no ledger is named; add --ledger sqlite:///ledger.db, or the like")
    url = check_shared(read_secret(at.url, "ledger"))
    if not url.startswith("sqlite:"):
        return url, None
    with hidden(url, at.url):
        file = sqlite_file(url)
        if file.is_dir():
            raise ConfigError(f"ledger: {str(file)!r} is a folder; name a file")
    return url, None if file.is_file() else file


@contextmanager
def _open(url: str, at: LedgerName) -> Iterator["Ledger"]:
    from oncely.ledger.ledger import open_ledger
    from oncely.locations import hidden

    with hidden(url, at.url or url):
        ledger = open_ledger(url, table=at.table, schema=at.schema)
    with closing(ledger):
        yield ledger
