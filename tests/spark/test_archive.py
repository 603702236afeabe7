"""A backfill of what the ledger has forgotten: the archive knows it, or it is refused."""

import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest
from pyspark.errors import PySparkException
from tests.records import granted

from oncely import Key, Ledger
from oncely.archive.writing import archive

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from tests.spark.conftest import Effects, Write

DAY_S = 86_400.0
LONG_AGO = datetime.now(UTC).replace(hour=12) - timedelta(days=100)


@pytest.fixture
def archived(tmp_path: Path, ledger: Ledger, ledger_url: str) -> str:
    """An archive that knows "done", "failed" and "spent", seen 100 days ago, an hour after sent."""
    keys = [Key("tests", name) for name in ("first", "done", "failed", "spent")]
    first, done, failed, spent = [granted(each) for each in ledger.claim_many(keys)]
    ledger.complete_many([first, done])
    ledger.fail(failed, "no")
    ledger.fail(spent, "no", final=True)
    age_s = time.time() - LONG_AGO.timestamp() - 3_600
    with closing(sqlite3.connect(ledger_url.removeprefix("sqlite:///"))) as connection, connection:
        for name, more_s in (("first", 2 * DAY_S), ("done", 0), ("failed", 0), ("spent", 0)):
            connection.execute(
                "UPDATE processed_messages SET first_processed_at = first_processed_at - ?, "
                "last_processed_at = last_processed_at - ? WHERE message_id = ?",
                (age_s + more_s, age_s + more_s, name),
            )
    folder = tmp_path / "archive"
    assert archive(ledger, str(folder), by="").counts["tests"].archived == 4
    return str(folder)


@pytest.fixture
def backfill(spark: "SparkSession", effects: "Effects") -> "Callable[..., DataFrame]":
    """A DataFrame of messages from (id, when it was sent)."""

    def make(*rows: tuple[str, datetime | None]) -> "DataFrame":
        made = [(id_, "{}", str(effects.path), sent) for id_, sent in rows]
        schema = "id string, body string, source string, time timestamp"
        return spark.createDataFrame(made, schema).coalesce(1)

    return make


@pytest.mark.in_turn("long on Spark")
def test_a_backfill(
    write: "Write",
    backfill: "Callable[..., DataFrame]",
    effects: "Effects",
    archived: str,
    tmp_path: Path,
) -> None:
    """What the archive knows, it settles; what it would know runs; what is older is refused."""
    rows = [(name, LONG_AGO) for name in ("done", "done", "failed", "spent", "missed")]
    rows += [("before", LONG_AGO - timedelta(days=10)), ("new", datetime.now(UTC))]
    counts = write(backfill(*rows), archive=archived)
    assert effects.per_message() == {"failed": 1, "missed": 1, "new": 1}
    assert (counts.handled, counts.duplicates_ledger, counts.failed) == (3, 2, 1)
    [reason] = counts.quarantined
    assert reason.startswith("too old: ")
    assert reason.endswith("and from before the archive")
    set_aside = [
        row["id"]
        for file in (tmp_path / "quarantine").glob("*.parquet")
        for row in pq.read_table(file).to_pylist()
    ]
    assert set_aside == ["before"]
    again = write(backfill(*rows), archive=archived)
    assert (again.handled, again.duplicates_ledger) == (0, 5)
    assert effects.per_message().total() == 3


def test_without_an_archive_all_of_it_is_refused(
    write: "Write", backfill: "Callable[..., DataFrame]", effects: "Effects", archived: str
) -> None:
    """The ledger has forgotten it, so nobody can tell; unless it is to run nevertheless."""
    counts = write(backfill(("done", LONG_AGO), ("missed", LONG_AGO)))
    assert counts.quarantined.total() == 2
    assert not effects.per_message()
    counts = write(
        backfill(("done", LONG_AGO), ("before", LONG_AGO - timedelta(days=10))),
        archive=archived,
        on_too_old="run",
    )
    assert (counts.duplicates_ledger, counts.handled) == (1, 1)
    assert effects.per_message() == {"before": 1}


def test_an_archive_that_is_not_there(
    write: "Write", backfill: "Callable[..., DataFrame]", effects: "Effects", archived: str
) -> None:
    """A name mistyped, or a folder that a worker has not mounted, knows nothing: nothing runs."""
    with pytest.raises(PySparkException, match=r"ConfigError: archive: \S+ sees no folder"):
        write(backfill(("done", LONG_AGO)), archive=f"{archived}s", on_too_old="run")
    assert not effects.per_message()


def test_go_s_zero_time(
    write: "Write", backfill: "Callable[..., DataFrame]", effects: "Effects", archived: str
) -> None:
    """Where a producer sends it for want of a time, it is older than all that is archived."""
    rows = backfill(("done", None), ("unknown", None))
    rows = rows.selectExpr("id", "body", "source", "TIMESTAMP '0001-01-01T00:00:00Z' AS time")
    counts = write(rows, archive=archived)
    assert (counts.duplicates_ledger, counts.quarantined.total()) == (1, 1)
    assert not effects.per_message()


@pytest.mark.in_turn("long on Spark")
def test_spark_reads_the_folders_it_must(spark: "SparkSession", archived: str) -> None:
    """Literal dates and buckets are filters on folders; the rest is not opened."""
    frame = spark.read.schema("message_id STRING, consumer STRING, date DATE, bucket INT").parquet(
        archived
    )
    assert sorted(row.message_id for row in frame.collect()) == ["done", "failed", "first", "spent"]
    day = LONG_AGO.date()
    one = frame.where(f"consumer = 'tests' AND date = '{day}' AND bucket = crc32('done') % 16")
    plan: Any = one._jdf.queryExecution().toString()
    [filters] = {line for line in plan.splitlines() if "PartitionFilters" in line}
    partition_filters = filters.partition("PartitionFilters: ")[2].partition("PushedFilters")[0]
    for name in ("consumer", "date", "bucket"):
        assert f"({name}#" in partition_filters
    from pyspark.sql import functions as f

    [file] = [row[0] for row in one.select(f.input_file_name()).distinct().collect()]
    assert f"date={day}/bucket=" in file
