"""From a URL to a store. A driver is imported only when its URL is opened."""

from pathlib import Path
from typing import TYPE_CHECKING

from oncely.core.errors import ConfigError, mask_passwords
from oncely.stores.base import Store
from oncely.stores.memory import MemoryStore

if TYPE_CHECKING:
    from sqlalchemy import Engine


def open_store(url: "str | Engine") -> Store:
    """The store that `url` names. Raises ConfigError, which says what to type instead."""
    if not isinstance(url, str):
        return _open_engine(url)
    scheme = url.partition(":")[0]
    if scheme == "memory":
        return MemoryStore()
    if scheme == "sqlite":
        return _open_sqlite(sqlite_file(url))
    raise ConfigError(
        f'ledger: {mask_passwords(url)!r} is of no known kind; write "sqlite:///ledger.db" '
        '(a file in this folder), "sqlite:////var/lib/ledger.db" (a full path) or "memory://"'
    )


def sqlite_file(url: str) -> Path:
    """The file of a sqlite URL. Raises ConfigError where it names none."""
    prefix, name = url[: len("sqlite:///")], url[len("sqlite:///") :]
    if prefix != "sqlite:///" or not name:
        raise ConfigError(f'ledger: {url!r} names no file; write "sqlite:///ledger.db"')
    return Path(name)


def _open_engine(engine: "Engine") -> Store:
    if engine.dialect.name != "sqlite":
        raise ConfigError(
            f"ledger: an engine of {engine.dialect.name} is of no known kind; open one of sqlite"
        )
    if not engine.url.database or engine.url.database == ":memory:":
        raise ConfigError('ledger: the engine has no file; write "memory://" instead')
    # Connections of one's own: the ledger sets how they commit, and that is not to be changed
    # under somebody else's feet.
    return _open_sqlite(Path(engine.url.database))


def _open_sqlite(file: Path) -> Store:
    from sqlalchemy import URL, create_engine, event

    from oncely.stores.sql import SqlStore, prepare_sqlite

    if not file.absolute().parent.is_dir():
        raise ConfigError(f"ledger: {str(file)!r} cannot be made: its folder does not exist")
    engine = create_engine(URL.create("sqlite+pysqlite", database=str(file.absolute())))
    event.listen(engine, "connect", prepare_sqlite)
    return SqlStore(engine)
