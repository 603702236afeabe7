"""What the benchmark holds against the sink: the same work with less around it."""

import json
import os
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pyspark.sql.datasource import DataSource, DataSourceArrowWriter, WriterCommitMessage

import oncely
from oncely import Claim, Granted, Key, Ledger, Record, State, Written
from oncely.spark.channel import TaskChannel
from oncely.spark.options import read_options
from oncely.spark.quarantine import Quarantine
from oncely.spark.task import LeasedTask
from oncely.sqlite_files import switch_to_wal

if TYPE_CHECKING:
    from pyarrow import RecordBatch
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType

CHUNK = 1_000
WEIGH_EVERY = 20_000
PAGE_MIB = os.sysconf("SC_PAGE_SIZE") / 2**20

handled = 0


def handle(message: oncely.Message) -> None:
    """Do nothing."""


def handle_and_weigh(message: oncely.Message) -> None:
    """Do nothing, and now and then write down how much memory this process has."""
    global handled
    handled += 1
    if handled % WEIGH_EVERY == 0:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        with Path(message.source).open("a") as log:
            log.write(json.dumps([os.getpid(), handled, round(pages * PAGE_MIB)]) + "\n")


class Bare:
    """A claim and a mark as a hand-written loop has them: two statements for a batch."""

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
        """One transaction of inserts that ignore conflicts."""
        self._in_transaction(
            "INSERT INTO bare VALUES ('bench', ?, 'processing') ON CONFLICT DO NOTHING", ids
        )

    def mark(self, ids: Sequence[str]) -> None:
        """One transaction of updates."""
        self._in_transaction(
            "UPDATE bare SET status = 'sent' WHERE consumer = 'bench' AND message_id = ?", ids
        )

    def _in_transaction(self, statement: str, ids: Sequence[str]) -> None:
        self._connection.execute("BEGIN IMMEDIATE")
        self._connection.executemany(statement, [(id_,) for id_ in ids])
        self._connection.execute("COMMIT")


class NoLedger:
    """Grants everything, and forgets it."""

    _template = Record(Key("", ""), State.PROCESSING, 1, 1, 0.0, 0.0)

    def now(self) -> float:
        """No clock either."""
        return 0.0

    def claim_many(self, keys: Sequence[Key], **_: Any) -> list[Granted]:
        """Granted, all of them."""
        return [Granted(Claim(self._template._replace(key=key))) for key in keys]

    def complete_many(self, claims: Sequence[Claim], _: Any = None) -> list[Written]:
        """Written, they say."""
        return [Written(None)] * len(claims)

    def extend_many(self, claims: Sequence[Claim], _: Any) -> list[Written]:
        """Written, they say."""
        return [Written(None)] * len(claims)


class BareLedger(NoLedger):
    """Grants everything, after the two statements of a bare loop."""

    def __init__(self, database: str) -> None:
        self._bare = Bare(database)

    def claim_many(self, keys: Sequence[Key], **options: Any) -> list[Granted]:
        """The first of the statements."""
        self._bare.claim([key.message_id for key in keys])
        return super().claim_many(keys, **options)

    def complete_many(self, claims: Sequence[Claim], _: Any = None) -> list[Written]:
        """The second of them."""
        self._bare.mark([claim.key.message_id for claim in claims])
        return super().complete_many(claims)


class _Source(DataSource):
    """A sink of the benchmark; the option `database` is its SQLite file."""

    def writer(self, schema: "StructType", overwrite: bool) -> "_Writer":
        return _Writer(self.name(), self.options["database"])


class BareLedgerSource(_Source):
    """oncely's task over a bare loop."""

    @classmethod
    def name(cls) -> str:
        return "bare_ledger"


class NoLedgerSource(_Source):
    """oncely's task over nothing."""

    @classmethod
    def name(cls) -> str:
        return "no_ledger"


class BareLoopSource(_Source):
    """A loop as one would write it by hand."""

    @classmethod
    def name(cls) -> str:
        return "bare_loop"


class _Writer(DataSourceArrowWriter):
    def __init__(self, kind: str, database: str) -> None:
        self._kind = kind
        self._database = database

    def write(self, iterator: Iterator["RecordBatch"]) -> WriterCommitMessage:
        if self._kind == "bare_loop":
            _bare_loop(Bare(self._database), iterator)
        else:
            ledger = NoLedger() if self._kind == "no_ledger" else BareLedger(self._database)
            _same_sink(ledger, iterator)
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
    LeasedTask(
        cast(Ledger, ledger), options, handle, Quarantine("", ""), TaskChannel(None, "")
    ).run(batches)


def register(spark: "SparkSession") -> None:
    """Make the sinks above known to Spark."""
    for source in (BareLedgerSource, NoLedgerSource, BareLoopSource):
        spark.dataSource.register(source)
