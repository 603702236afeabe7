"""How the counts of a batch come from where it is committed to who asked for it.

A batch is committed in a process on the driver's machine. Under Spark Connect that is not the
client's machine; but what reads a format is planned on the driver too, so the client reads them.
"""

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from weakref import WeakSet

from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from oncely.core.errors import OncelyError
from oncely.spark.sink.counts import Counts

_reading: WeakSet[SparkSession] = WeakSet()
"""The sessions that know the format."""


def hand_over(run: str, counts: Counts) -> None:
    """Leave the counts of `run` on this machine, for who knows its name, with those that earlier
    batches of it have left.
    """
    if _file(run).exists():
        counts += Counts(**json.loads(_file(run).read_text()))
    unfinished = _file(run).with_suffix(".unfinished")
    # Others on this machine may not read along, nor have put something in its place.
    with os.fdopen(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(vars(counts), file)
    unfinished.replace(_file(run))


def fetch(spark: SparkSession, run: str) -> Counts:
    """The counts that a commit has handed over, once. Raises OncelyError where there are none."""
    counts = fetch_any(spark, run)
    if counts is None:
        raise OncelyError("the counts of the run are not where it was committed")
    return counts


def fetch_any(spark: SparkSession, run: str) -> Counts | None:
    """The same; None where no commit has handed any over."""
    if hasattr(spark, "sparkContext"):
        return _counts_of(_take(run))
    if spark not in _reading:
        spark.dataSource.register(HandedOver)
        _reading.add(spark)
    [row] = spark.read.format(HandedOver.name()).option("run", run).load().collect()
    return _counts_of(row.counts)


def _counts_of(text: str | None) -> Counts | None:
    return None if text is None else Counts(**json.loads(text))


def _file(run: str) -> Path:
    return Path(tempfile.gettempdir(), f"oncely-{run}.json")


def _take(run: str) -> str | None:
    try:
        text = _file(run).read_text()
    except OSError:
        return None
    _file(run).unlink()
    return text


class HandedOver(DataSource):
    """`format("oncely-counts")`: one row, with the counts of the option `run`, if there are any."""

    @classmethod
    def name(cls) -> str:
        """The name of the format."""
        return "oncely-counts"

    def schema(self) -> str:
        """One column, JSON."""
        return "counts string"

    def reader(self, schema: StructType) -> "CountsReader":  # noqa: ARG002 - Spark's signature.
        """Reads what was handed over."""
        return CountsReader(self.options["run"])


class CountsReader(DataSourceReader):
    """Lives on the driver, and as a copy in its one task."""

    def __init__(self, run: str) -> None:
        self._run = run

    def partitions(self) -> Sequence[InputPartition]:
        """What was handed over: this is asked for on the driver."""
        return [InputPartition(_take(self._run))]

    def read(self, partition: InputPartition) -> Iterator[tuple[str | None]]:
        """The row."""
        yield (partition.value,)
