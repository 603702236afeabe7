"""Ledgers as Spark's Python workers open them: one for a process, however many tasks it runs.

A worker runs one task at a time, so its ledger holds at most a few connections: the task's own and
its heartbeat's. Spark ends workers that have been idle for a minute, and their connections with
them.
"""

import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache

from pyspark import SparkFiles, TaskContext
from pyspark.sql import SparkSession

from oncely.core.errors import ConfigError
from oncely.ledger import Ledger, open_ledger
from oncely.locations import LedgerPlace, hidden, read_secret
from oncely.spark.jvm import is_local
from oncely.stores.open_store import sqlite_file

_AN_EXECUTORS = "."
"""Where an executor keeps the files that come with a job. The driver, and with a local master that
runs the tasks, has a folder of its own for them."""

_MOST_OPEN = 8
_ledgers: dict[tuple[str, str, str | None], Ledger] = {}
"""Those of this process, in the order in which they were asked for last."""
_opening = threading.Lock()
_migrate = lru_cache(maxsize=_MOST_OPEN)(Ledger.migrate)


def migrated_ledger(place: LedgerPlace) -> Ledger:
    """The ledger there, its schema made or upgraded when this process first asks for it.

    What env:NAME or file:PATH stands for is read anew each time: a changed password is taken up.
    Raises ConfigError, which says on what machine a secret is missing.
    """
    with url_here(place.location) as url:
        ledger = _opened(url, place.table, place.schema)
    _migrate(ledger)
    return ledger


def existing_ledger(place: LedgerPlace) -> Ledger:
    """The same, its schema left as it is. Raises ConfigError for a file that is not there, too:
    to open it would leave an empty one where somebody has mistyped a name.
    """
    with url_here(place.location) as url:
        if url.startswith("sqlite:") and not sqlite_file(url).is_file():
            raise ConfigError(f"ledger: there is no file {str(sqlite_file(url))!r}")
        return _opened(url, place.table, place.schema)


def _opened(url: str, table: str, schema: str | None) -> Ledger:
    """The one of this process. Which was not asked for longest is closed where there are too many:
    should anybody still be at it, it opens again.
    """
    place = (url, table, schema)
    with _opening:
        ledger = _ledgers.pop(place, None) or open_ledger(url, table=table, schema=schema)
        _ledgers[place] = ledger
        if len(_ledgers) > _MOST_OPEN:
            _ledgers.pop(next(iter(_ledgers))).close()
        return ledger


@contextmanager
def url_here(location: str) -> Iterator[str]:
    """The URL that `location` stands for on this machine; a ConfigError meanwhile does not show it.

    Raises ConfigError, which says on what machine a secret is missing; and in a task on a cluster,
    for a file.
    """
    url = _read_here(location)
    if TaskContext.get() is not None and SparkFiles.getRootDirectory() == _AN_EXECUTORS:
        check_for_cluster(url, "ledger")
    with hidden(url, location):
        yield url


def check_master(spark: SparkSession, options: Mapping[str, str | None]) -> None:
    """Raise ConfigError for a ledger or queue that the tasks of this session cannot share."""
    if not is_local(spark.conf.get("spark.master") or ""):
        for name in ("ledger", "transport"):
            check_for_cluster(options.get(name) or "", name)


def check_for_cluster(url: str, what: str) -> None:
    """Raise ConfigError for a URL that means another file on each machine."""
    if url.startswith("sqlite:"):
        raise ConfigError(
            f"{what}: {url!r} is a file of one machine, and Spark's tasks run on a cluster; write "
            'the URL of a server, such as "postgresql://user@host/db"'
        )


def _read_here(location: str) -> str:
    try:
        return read_secret(location, "ledger")
    except ConfigError as error:
        kind, _, name = location.partition(":")
        reader, advice = "Spark", f"on a cluster, set spark.executorEnv.{name}"
        if TaskContext.get() is None:
            reader, advice = "Spark's driver", f"set {name} where that is started, too"
        where = f"on {socket.gethostname()} for {reader}"
        raise ConfigError(f"{error} {where}{f'; {advice}' if kind == 'env' else ''}") from error
