"""Where a ledger is, as settings name it: a URL, or env:NAME or file:PATH that keeps one secret."""

import os
from pathlib import Path
from typing import Any

from oncely.core.errors import ConfigError, mask_passwords
from oncely.ledger import Ledger, open_ledger


def open_named_ledger(location: str, **names: Any) -> Ledger:
    """The ledger at a URL, or at the URL that env:NAME or file:PATH stands for.

    `names` are the table's, as for `open_ledger`. Raises ConfigError as that does, without
    showing what a secret holds.
    """
    url = read_secret(location, "ledger")
    try:
        return open_ledger(url, **names)
    except ConfigError as error:
        raise ConfigError(str(error).replace(repr(mask_passwords(url)), repr(location))) from None


def read_secret(value: str, what: str) -> str:
    """`value`, or what env:NAME or file:PATH stands for. Raises ConfigError."""
    kind, _, name = value.partition(":")
    if kind == "env":
        if name not in os.environ:
            raise ConfigError(f"{what}: the environment variable {name} is not set")
        return os.environ[name]
    if kind == "file":
        try:
            return Path(name).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no text"
            raise ConfigError(f"{what}: {name!r} cannot be read: {reason}") from error
    return value


def check_shared(ledger: str) -> str:
    """`ledger`, if every process would see the same one. Raises ConfigError."""
    if ledger.startswith("memory:"):
        raise ConfigError(
            'ledger: "memory://" is seen by one process only; write "sqlite:///ledger.db"'
        )
    return ledger
