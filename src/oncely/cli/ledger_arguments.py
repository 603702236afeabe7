"""The ledger or transport that a command is about: opened, mistakes told in its words."""

import argparse
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from oncely.core.errors import ConfigError, ContentionError, StoreError, StoreUnavailable
from oncely.core.record import Key
from oncely.ledger import Ledger, open_ledger
from oncely.locations import LedgerPlace, check_shared, check_shared_transport, hidden, read_secret
from oncely.stores.open_store import sqlite_file
from oncely.transports.open_transport import open_transport
from oncely.transports.transport import Transport


@contextmanager
def opened(parsed: argparse.Namespace) -> Iterator[Ledger]:
    """The ledger that --ledger, --table and --schema name, closed in the end.

    Raises ConfigError where there is none yet, or where an old schema is in the way.
    """
    url = _url(parsed)
    with hidden(url, parsed.ledger):
        file = _absent_file(url)
    if file is not None:
        # Opening it would leave an empty file where somebody has mistyped a name.
        raise ConfigError(f"ledger: there is no file {str(file)!r}; type: oncely migrate")
    with _at(url, parsed) as ledger:
        try:
            yield ledger
        except (StoreUnavailable, ContentionError):
            raise
        except StoreError as error:
            if ledger.migration_sql():
                raise ConfigError(f"ledger: {error}") from error
            raise


def located(parsed: argparse.Namespace) -> LedgerPlace:
    """Where the ledger is, for other processes to open it: a file's path is absolute, a secret
    unread.

    Raises ConfigError as `opened` does, also where nothing can be read from the ledger.
    """
    with opened(parsed) as ledger:
        ledger.find(Key("oncely", "located"))
    url = _url(parsed)
    location = str(parsed.ledger)
    if url.startswith("sqlite:"):
        location = f"sqlite:///{sqlite_file(url).absolute()}"
    return LedgerPlace(location, parsed.table, parsed.schema)


@contextmanager
def to_migrate(parsed: argparse.Namespace, *, only_look: bool) -> Iterator[Ledger]:
    """As `opened`, whether or not there is a ledger yet.

    Only to look at, it is one as new in a file that goes away: opening would create the real one.
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
    """What --transport says, or what env:NAME or file:PATH in it stands for; closed in the end.

    Only to look at, a queue's file must be there: a mistyped name would leave an empty one.
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
    """Raise ConfigError for queues in a file that is not there: to open it would leave an empty
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
    """What --ledger says, or what env:NAME or file:PATH in it stands for; read once."""
    if not parsed.ledger:
        raise ConfigError("no ledger is named; add --ledger sqlite:///ledger.db, or the like")
    return check_shared(read_secret(parsed.ledger, "ledger"))
