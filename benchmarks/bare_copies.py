"""Writing rows into PostgreSQL from Spark tasks without a ledger: COPY, Arrow, and row by row."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import psycopg
from pyspark.sql.datasource import DataSource, DataSourceArrowWriter, WriterCommitMessage

from oncely.spark.modes.target_table import as_csv

if TYPE_CHECKING:
    from pyarrow import RecordBatch
    from pyspark.sql import Row
    from pyspark.sql.types import StructType

COLUMNS = "id text, account text, amount numeric(12, 2), paid_at timestamptz, note text"
_INSERT = "INSERT INTO keyed VALUES (%s, %s, %s, %s, %s) ON CONFLICT DO NOTHING"


def copy(url: str) -> Callable[[Iterator["Row"]], None]:
    """For `foreachPartition`: one COPY for a partition."""
    return partial(_copy, url)


def _copy(url: str, rows: Iterator["Row"]) -> None:
    with (
        psycopg.connect(url) as connection,
        connection.cursor() as cursor,
        cursor.copy("COPY payments FROM STDIN") as out,
    ):
        for row in rows:
            out.write_row(row)


def insert(url: str) -> Callable[[Iterator["Row"]], None]:
    """The same with a statement for each row, and a commit for the partition."""
    return partial(_insert, url)


def _insert(url: str, rows: Iterator["Row"]) -> None:
    with psycopg.connect(url) as connection, connection.cursor() as cursor:
        for row in rows:
            cursor.execute(_INSERT, tuple(row))


class ArrowCopy(DataSource):
    """How the sink writes, without a ledger: Arrow to CSV, one COPY for a partition."""

    @classmethod
    def name(cls) -> str:
        """The name of the format."""
        return "arrow_copy"

    def writer(self, schema: "StructType", overwrite: bool) -> DataSourceArrowWriter:
        """Writes to `payments` at the option `url`."""
        return _ArrowCopyWriter(self.options["url"])


class _ArrowCopyWriter(DataSourceArrowWriter):
    def __init__(self, url: str) -> None:
        self._url = url

    def write(self, iterator: Iterator["RecordBatch"]) -> WriterCommitMessage:
        with (
            psycopg.connect(self._url) as connection,
            connection.cursor() as cursor,
            cursor.copy("COPY payments FROM STDIN (FORMAT csv)") as out,
        ):
            for batch in iterator:
                out.write(as_csv(batch))
        return WriterCommitMessage()

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Do nothing: every task has committed."""

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Do nothing: rows of finished tasks stay."""


def execute(url: str, *statements: str) -> list[Any]:
    """Execute several statements; return the result of the last."""
    with psycopg.connect(url, autocommit=True) as connection:
        for statement in statements:
            cursor = connection.execute(statement)
        return cursor.fetchall() if cursor.description else []
