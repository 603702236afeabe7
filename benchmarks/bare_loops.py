"""What the benchmark compares the sink with: the same work with less around it."""

import asyncio
import json
import os
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import psycopg
from pyspark.sql.datasource import DataSource, DataSourceArrowWriter, WriterCommitMessage

import oncely
from oncely import Claim, Granted, Ledger, Written
from oncely._util.sqlite_files import switch_to_wal
from oncely.core.commands import Acquire, Command, Outcome
from oncely.spark.modes.leased import LeasedTask
from oncely.spark.sink.channel import TaskChannel
from oncely.spark.sink.message_rows import numbered
from oncely.spark.sink.quarantine import Quarantine
from oncely.spark.sink.sink_options import read_options
from oncely.stores.memory_store import MemoryStore

if TYPE_CHECKING:
    from pyarrow import RecordBatch
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType

CHUNK = 1_000
WEIGH_EVERY = 20_000
WAIT_S = 0.02
PAGE_MIB = os.sysconf("SC_PAGE_SIZE") / 2**20

handled = 0


def handle(message: oncely.Message) -> None:
    """Do nothing."""


def wait(message: oncely.Message) -> None:
    """Only wait, as a handler waits for another machine."""
    time.sleep(WAIT_S)


async def wait_async(message: oncely.Message) -> None:
    """The same."""
    await asyncio.sleep(WAIT_S)


def handle_and_weigh(message: oncely.Message) -> None:
    """Do nothing, and now and then record how much memory this process uses."""
    global handled
    handled += 1
    if handled % WEIGH_EVERY == 0:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        with Path(message.source).open("a") as log:
            log.write(json.dumps([os.getpid(), handled, round(pages * PAGE_MIB)]) + "\n")


class Bare(Protocol):
    """A claim and a mark as a hand-written loop has them: two statements for a batch."""

    def claim(self, ids: Sequence[str]) -> None:
        """Inserts that ignore conflicts, committed."""

    def mark(self, ids: Sequence[str]) -> None:
        """Updates, committed."""


class BareSqlite:
    """The two statements in a SQLite file, row by row in one transaction each."""

    def __init__(self, database: str) -> None:
        self._connection = sqlite3.connect(database, timeout=60, isolation_level=None)
        # The same promises to the disk as the ledger's.
        switch_to_wal(self._connection)
        self._connection.execute("PRAGMA synchronous = FULL")
        self._connection.execute(
            "CREATE TABLE IF NOT EXISTS bare (consumer TEXT, message_id TEXT, status TEXT,"
            " PRIMARY KEY (consumer, message_id)) WITHOUT ROWID"
        )

    def claim(self, ids: Sequence[str]) -> None:
        self._in_transaction(
            "INSERT INTO bare VALUES ('bench', ?, 'processing') ON CONFLICT DO NOTHING", ids
        )

    def mark(self, ids: Sequence[str]) -> None:
        self._in_transaction(
            "UPDATE bare SET status = 'sent' WHERE consumer = 'bench' AND message_id = ?", ids
        )

    def _in_transaction(self, statement: str, ids: Sequence[str]) -> None:
        self._connection.execute("BEGIN IMMEDIATE")
        self._connection.executemany(statement, [(id_,) for id_ in ids])
        self._connection.execute("COMMIT")


class BarePostgresql:
    """The two statements in PostgreSQL, each over arrays, on a table with only its key."""

    def __init__(self, database: str) -> None:
        self._connection = psycopg.connect(database, autocommit=True)
        # Two tasks may create the table at the same moment.
        self._connection.execute("SELECT pg_advisory_lock(1)")
        self._connection.execute(
            "CREATE TABLE IF NOT EXISTS bare (consumer text, message_id text, status text,"
            " PRIMARY KEY (message_id, consumer)) WITH (fillfactor = 50)"
        )
        self._connection.execute("SELECT pg_advisory_unlock(1)")

    def claim(self, ids: Sequence[str]) -> None:
        self._connection.execute(
            "INSERT INTO bare SELECT 'bench', id, 'processing' FROM unnest(%s::text[]) AS id"
            " ON CONFLICT DO NOTHING RETURNING message_id",
            [list(ids)],
        ).fetchall()

    def mark(self, ids: Sequence[str]) -> None:
        self._connection.execute(
            "UPDATE bare SET status = 'sent' FROM unnest(%s::text[]) AS id"
            " WHERE message_id = id AND consumer = 'bench'",
            [list(ids)],
        )

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


@contextmanager
def bare_at(database: str) -> Iterator[Bare]:
    """The two statements for a PostgreSQL URL or a SQLite file."""
    if not database.startswith("postgresql:"):
        yield BareSqlite(database)
        return
    with closing(BarePostgresql(database)) as bare:
        yield bare


class NoLedger(Ledger):
    """Grants everything, and forgets it."""

    def __init__(self) -> None:
        super().__init__(MemoryStore())

    def _settle_one(self, command: Command) -> Outcome:
        return self._settle([command])[0]

    def _settle(self, commands: Sequence[Command]) -> list[Outcome]:
        if isinstance(commands[0], Acquire):
            return [Granted(Claim(each.key, fence=1, version=0, attempts=1)) for each in commands]
        return [Written(None)] * len(commands)

    def _settle_each(self, commands: Sequence[Command]) -> list[Outcome | Exception]:
        return [*self._settle(commands)]

    def extend_each(self, claims: Sequence[Claim], _: Any) -> list[Outcome | Exception]:
        """Answer that all are written."""
        return [Written(None)] * len(claims)


class BareLedger(NoLedger):
    """Grants everything, after the two statements of a bare loop."""

    def __init__(self, bare: Bare) -> None:
        super().__init__()
        self._bare = bare

    def _settle(self, commands: Sequence[Command]) -> list[Outcome]:
        ids = [each.key.message_id for each in commands]
        if isinstance(commands[0], Acquire):
            self._bare.claim(ids)
        else:
            self._bare.mark(ids)
        return super()._settle(commands)


class _Source(DataSource):
    """A sink of the benchmark; the option `database` is its PostgreSQL or SQLite file."""

    def writer(self, schema: "StructType", overwrite: bool) -> "_Writer":
        return _Writer(self.name(), self.options["database"])


class BareLedgerSource(_Source):
    """oncely's task on the two statements of a bare loop."""

    @classmethod
    def name(cls) -> str:
        return "bare_ledger"


class NoLedgerSource(_Source):
    """oncely's task without any ledger."""

    @classmethod
    def name(cls) -> str:
        return "no_ledger"


class BareLoopSource(_Source):
    """A loop as teams write it by hand."""

    @classmethod
    def name(cls) -> str:
        return "bare_loop"


class _Writer(DataSourceArrowWriter):
    def __init__(self, kind: str, database: str) -> None:
        self._kind = kind
        self._database = database

    def write(self, iterator: Iterator["RecordBatch"]) -> WriterCommitMessage:
        if self._kind == "no_ledger":
            _same_sink(NoLedger(), iterator)
            return WriterCommitMessage()
        with bare_at(self._database) as bare:
            if self._kind == "bare_loop":
                _bare_loop(bare, iterator)
            else:
                _same_sink(BareLedger(bare), iterator)
        return WriterCommitMessage()


def _bare_loop(bare: Bare, batches: Iterator["RecordBatch"]) -> None:
    for batch in batches:
        ids = batch.column("id").to_pylist()
        bodies = batch.column("body").to_pylist()
        for start in range(0, len(ids), CHUNK):
            chunk = ids[start : start + CHUNK]
            bare.claim(chunk)
            for id_, body in zip(chunk, bodies[start : start + CHUNK], strict=True):
                handle(oncely.Message(id_, body.encode()))
            bare.mark(chunk)


def _same_sink(ledger: NoLedger, batches: Iterator["RecordBatch"]) -> None:
    options = read_options(
        {"consumer": "bench", "ledger": "sqlite:///unused", "handler": "bare_loops:handle"}
    )
    LeasedTask(ledger, options, handle, Quarantine("", "").add, TaskChannel(None, "")).run(
        numbered(batches)
    )


def register(spark: "SparkSession") -> None:
    """Make the sinks above known to Spark."""
    for source in (BareLedgerSource, NoLedgerSource, BareLoopSource):
        spark.dataSource.register(source)
