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
    """Leave the counts of `run` on this machine, for who knows its name."""
    unfinished = _file(run).with_suffix(".unfinished")
    # Others on this machine may not read along, nor have put something in its place.
    with os.fdopen(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(vars(counts), file)
    unfinished.replace(_file(run))


def fetch(spark: SparkSession, run: str) -> Counts:
    """The counts that a commit has handed over, once. Raises OncelyError where there are none."""
    if hasattr(spark, "sparkContext"):
        return Counts(**json.loads(_take(run)))
    if spark not in _reading:
        spark.dataSource.register(HandedOver)
        _reading.add(spark)
    [row] = spark.read.format(HandedOver.name()).option("run", run).load().collect()
    return Counts(**json.loads(row.counts))


def _file(run: str) -> Path:
    return Path(tempfile.gettempdir(), f"oncely-{run}.json")


def _take(run: str) -> str:
    try:
        text = _file(run).read_text()
    except OSError as error:
        raise OncelyError("the counts of the run are not where it was committed") from error
    _file(run).unlink()
    return text


class HandedOver(DataSource):
    """`format("oncely-counts")`: one row, with the counts of the option `run`."""

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

    def read(self, partition: InputPartition) -> Iterator[tuple[str]]:
        """The row."""
        yield (partition.value,)
