"""Sources: checks, before any transaction, that an engine's transactions are in the ledger's
database.
"""

from pathlib import Path

from sqlalchemy import URL, Engine

from oncely.core.errors import ConfigError
from oncely.stores.names import TableName


def check_joined_source(source: object, ledger: URL, name: TableName) -> None:
    """As `Store.check_joins` says, for the tables `name` in the database of `ledger`.

    A server may have several addresses, one of them a pooler's: only the name of the database is
    compared.
    """
    # Of an Engine or sessionmaker, plain or async.
    settings = getattr(source, "kw", None)
    bind = settings.get("bind") if isinstance(settings, dict) else source
    engine = getattr(bind, "sync_engine", bind)
    if not isinstance(engine, Engine):
        return
    ours, theirs = _kind(ledger), _kind(engine.url)
    if ours != theirs:
        raise _elsewhere(theirs, ours)
    # A schema of MariaDB is a database, which transactions from any other database reach.
    is_anywhere = ours == "mysql" and name.schema is not None
    here, there = _database(ledger), _database(engine.url)
    if here and there and here != there and not is_anywhere:
        raise _elsewhere(f"{there!r}", f"{here!r}")


def _elsewhere(there: str, here: str) -> ConfigError:
    return ConfigError(
        f"transaction: its connections are to {there}, and the ledger is in {here}; open the "
        "ledger on the same database, as in open_ledger(engine)"
    )


def _kind(url: URL) -> str:
    name = url.get_backend_name()
    return "mysql" if name == "mariadb" else name


def _database(url: URL) -> str | None:
    """The name of a database, or the path of a file; None where the URL has none."""
    name = url.database
    if name is None or _kind(url) != "sqlite":
        return name
    is_file = name and name != ":memory:" and not name.startswith("file:")
    return str(Path(name).resolve()) if is_file else None
