"""Ledgers in Spark's Python workers: one for each process, over all its tasks.

A worker runs one task at a time, so its ledger has at most a few connections: the task's own and
its heartbeat's. Spark ends workers that were idle for a minute, and with them their connections.
"""

import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache

from pyspark import SparkFiles, TaskContext
from pyspark.sql import SparkSession

from oncely.core.errors import ConfigError
from oncely.ledger.ledger import Ledger, open_ledger
from oncely.locations import LedgerAddress, hidden, read_secret
from oncely.spark.session import is_local
from oncely.stores.open_store import sqlite_file

_AN_EXECUTORS = "."
"""The folder of an executor for the files of a job. The driver, which runs the tasks of a local
master, has a folder of its own."""

_MOST_OPEN = 8
_ledgers: dict[tuple[str, str, str | None], Ledger] = {}
"""The ledgers of this process, the least recently used first."""
_opening = threading.Lock()


@lru_cache(maxsize=_MOST_OPEN)
def _prepare(ledger: Ledger) -> None:
    ledger.migrate()
    ledger.check_privileges("spark")


def migrated_ledger(address: LedgerAddress) -> Ledger:
    """The ledger there; its schema is created or upgraded at the first call in this process.

    A secret (env:NAME or file:PATH) is read each time, so that a changed password takes effect.
    Raises ConfigError, which names the machine on which a secret is missing, or what its role lacks
    of the privileges that Spark needs.
    """
    with url_here(address.location) as url:
        ledger = _opened(url, address.table, address.schema)
    _prepare(ledger)
    return ledger


def existing_ledger(address: LedgerAddress) -> Ledger:
    """The same, without changing its schema. Raises ConfigError also for a file that does not
    exist: opening a mistyped name would create an empty file.
    """
    with url_here(address.location) as url:
        if url.startswith("sqlite:") and not sqlite_file(url).is_file():
            raise ConfigError(f"ledger: there is no file {str(sqlite_file(url))!r}")
        return _opened(url, address.table, address.schema)


def _opened(url: str, table: str, schema: str | None) -> Ledger:
    """The ledger of this process. If there are too many, the least recently used one is closed; it
    opens again if it is still used.
    """
    address = (url, table, schema)
    with _opening:
        ledger = _ledgers.pop(address, None) or open_ledger(url, table=table, schema=schema)
        if TaskContext.get() is not None:
            # Its thread would take one more connection for each of Spark's workers.
            ledger.recorder.is_silent = True
        _ledgers[address] = ledger
        if len(_ledgers) > _MOST_OPEN:
            _ledgers.pop(next(iter(_ledgers))).close()
        return ledger


@contextmanager
def url_here(location: str) -> Iterator[str]:
    """The URL of `location` on this machine; a ConfigError inside of the block does not show it.

    Raises ConfigError, which names the machine on which a secret is missing; in a task on a
    cluster, also for a file.
    """
    try:
        url = read_secret(location, "ledger")
    except ConfigError as error:
        kind, _, name = location.partition(":")
        reader, advice = "Spark", f"on a cluster, set spark.executorEnv.{name}"
        if TaskContext.get() is None:
            reader, advice = "Spark's driver", f"set {name} where that is started, too"
        where = f"on {socket.gethostname()} for {reader}"
        raise ConfigError(f"{error} {where}{f'; {advice}' if kind == 'env' else ''}") from error
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
    """Raise ConfigError for the URL of a file, which is another file on each machine."""
    if url.startswith("sqlite:"):
        raise ConfigError(
            f"{what}: {url!r} is a file of one machine, and Spark's tasks run on a cluster; write "
            'the URL of a server, such as "postgresql://user@host/db"'
        )
