"""Where a ledger or transport is, as settings name it: a URL, or env:NAME or file:PATH, which keep
the URL secret.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple

from oncely.core.errors import ConfigError, mask_passwords
from oncely.ledger.ledger import Ledger, open_ledger
from oncely.sources import Source, open_source
from oncely.stores.names import TABLE_NAME
from oncely.stores.open_store import sqlite_file
from oncely.transports.open_transport import open_transport
from oncely.transports.transport import Transport


class LedgerAddress(NamedTuple):
    """Where a ledger is, as it is handed from process to process."""

    location: str
    """A URL, or env:NAME or file:PATH, which the process that opens the ledger reads."""
    table: str = TABLE_NAME
    schema: str | None = None


def open_named_ledger(location: str, table: str = TABLE_NAME, schema: str | None = None) -> Ledger:
    """The ledger at a URL, or at the URL that env:NAME or file:PATH stands for.

    Raises ConfigError as `open_ledger` does, without showing what a secret holds.
    """
    url = read_secret(location, "ledger")
    with hidden(url, location):
        return open_ledger(url, table=table, schema=schema)


def open_named_transport(location: str) -> Transport:
    """The transport at a URL, or at the URL that env:NAME or file:PATH stands for.

    Raises ConfigError as `open_transport` does, without showing what a secret holds.
    """
    url = check_shared(read_secret(location, "transport"), "transport")
    with hidden(url, location):
        return open_transport(url)


def open_named_source(location: str, queue: str) -> Source:
    """The source of a queue at a URL, or at the URL that env:NAME or file:PATH stands for.

    Raises ConfigError as `open_source` does, without showing what a secret holds.
    """
    url = check_shared(read_secret(location, "source"), "source")
    with hidden(url, location):
        return open_source(url, queue)


def absolute(folder: str) -> str:
    """A folder as every process finds it: Spark's processes have working directories of their own.
    A URL stays as it is.
    """
    return folder if "://" in folder else str(Path(folder).absolute())


def absolute_location(location: str, folder: Path | None = None) -> str:
    """The same for the location of a ledger or transport. A relative path counts from `folder`,
    else from the working directory. Raises ConfigError for a sqlite URL without a file.
    """
    base = Path.cwd() if folder is None else folder
    kind, _, name = location.partition(":")
    if kind == "file":
        return f"file:{base / name}"
    if kind == "sqlite":
        return f"sqlite:///{base / sqlite_file(location)}"
    return location


@contextmanager
def hidden(url: str, location: str) -> Iterator[None]:
    """Inside the block, a ConfigError names the location, and not the secret that is there."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(str(error).replace(repr(mask_passwords(url)), repr(location))) from None


def read_secret(value: str, what: str) -> str:
    """`value`, or what env:NAME or file:PATH stands for. Raises ConfigError."""
    kind, _, name = value.partition(":")
    secret = value
    if kind == "env":
        if name not in os.environ:
            raise ConfigError(f"{what}: the environment variable {name} is not set")
        secret = os.environ[name]
    elif kind == "file":
        try:
            secret = Path(name).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not text"
            raise ConfigError(f"{what}: {name!r} cannot be read: {reason}") from error
    if not secret and value:
        raise ConfigError(f"{what}: {value!r} is empty")
    return secret


def check_shared(url: str, what: Literal["ledger", "transport", "source"] = "ledger") -> str:
    """`url`, if every process would see the same ledger or transport. Raises ConfigError."""
    if url.startswith("memory:"):
        file = "ledger.db" if what == "ledger" else "queue.db"
        raise ConfigError(
            f'{what}: "memory://" is seen by one process only; write "sqlite:///{file}"'
        )
    return url
