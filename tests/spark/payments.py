"""A ledger in a database with tables of the user's own, and rows for them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from sqlalchemy import text
from tests.records import granted, record_of

from oncely import Claim, Key, Record, open_ledger
from oncely.spark.modes.table_rows import TableRowsTask
from oncely.spark.modes.target_table import open_target, work_engine
from oncely.spark.sink.channel import TaskChannel
from oncely.spark.sink.counts import Counts
from oncely.spark.sink.message_rows import numbered
from oncely.spark.sink.quarantine import Quarantine
from oncely.spark.sink.sink_options import read_options

PAYMENTS = (
    "CREATE TABLE payments (id VARCHAR(64) PRIMARY KEY, account VARCHAR(20) NOT NULL,"
    " amount INTEGER, note VARCHAR(255), CHECK (amount > 0))"
)
NUMBERED = {
    "sqlite": "INTEGER PRIMARY KEY",
    "postgresql": "BIGSERIAL PRIMARY KEY",
    "mysql": "BIGINT AUTO_INCREMENT PRIMARY KEY",
}
"""An id that each kind of database fills itself."""
BALANCES = "CREATE TABLE balances (account VARCHAR(20) PRIMARY KEY, amount INTEGER)"


class Place:
    """A ledger in a database, with tables of the user's own in it."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self.folder = folder
        self.ledger = open_ledger(url)
        self.ledger.migrate()
        self.engine = work_engine(url)
        self.execute(PAYMENTS)
        self.execute(BALANCES)

    def options(self, **options: str) -> dict[str, str]:
        own = {"mode": "rows", "consumer": "tests", "ledger": self.url, "table": "payments"}
        return {**own, "quarantine": str(self.folder / "quarantine"), **options}

    def task(self, channel: TaskChannel | None = None, /, **options: str) -> TableRowsTask:
        quarantine = Quarantine(str(self.folder / "quarantine"), "0")
        self.quarantine = quarantine
        channel = channel or TaskChannel(None, "")
        read = read_options(self.options(**options))
        table = open_target(self.engine, read.table or "", read.upsert, read.sequence_by)
        return TableRowsTask(self.ledger, read, quarantine.add, channel, table)

    def run(self, rows: Sequence[dict[str, Any]], **options: str) -> Counts:
        """Run a task over rows; return what it counted."""
        task = self.task(None, **options)
        task.run(batches_of(rows))
        self.quarantine.close()
        assert task.counts.received == task.counts.settled == len(rows)
        return task.counts

    def close(self) -> None:
        self.ledger.close()
        self.engine.dispose()

    def execute(self, statement: str) -> None:
        with self.engine.begin() as connection:
            connection.execute(text(statement))

    def rows(self, query: str = "SELECT id, account, amount, note FROM payments") -> list[Any]:
        with self.engine.connect() as connection:
            return sorted(tuple(row) for row in connection.execute(text(query)))

    def ids(self) -> list[str]:
        return [id_ for (id_,) in self.rows("SELECT id FROM payments")]

    def record(self, id_: str) -> Record:
        return record_of(self.ledger, Key("tests", id_))

    def hold(self, id_: str, lease: str) -> Claim:
        """A claim of somebody else's."""
        return granted(self.ledger.claim(Key("tests", id_), lease))

    def set_aside(self) -> dict[str | None, tuple[str, str]]:
        """What is in the quarantine: by its id the reason, and the row."""
        files = (self.folder / "quarantine").glob("*.parquet")
        rows = [row for file in files for row in pq.read_table(file).to_pylist()]
        return {row["id"]: (row["reason"], row["row"]) for row in rows}


def payment(id_: str | None, amount: int | None = 1, note: str | None = None) -> dict[str, Any]:
    return {"id": id_, "account": "a", "amount": amount, "note": note}


def batches_of(rows: Sequence[dict[str, Any]]) -> list[tuple[Sequence[int], pa.RecordBatch]]:
    """Rows as Spark hands them over."""
    return list(numbered(pa.Table.from_pylist(list(rows)).to_batches(1_000)))
