"""Hands the counts of a batch from the process that commits it to the program.

A batch is committed in a process on the driver's machine, which under Spark Connect is not the
client's. But reads are planned on the driver, too, so the client reads the counts by a format.
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

from oncely.spark.sink.counts import Counts

_reading: WeakSet[SparkSession] = WeakSet()
"""The sessions in which the format is registered."""


def hand_over(run: str, counts: Counts) -> None:
    """Store the counts of `run` on this machine, added to those of its earlier batches, for a
    reader that knows the run's name.
    """
    if _file(run).exists():
        counts += Counts(**json.loads(_file(run).read_text()))
    unfinished = _file(run).with_suffix(".unfinished")
    # Other users of this machine must not read the file, nor replace it.
    with os.fdopen(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(vars(counts), file)
    unfinished.replace(_file(run))


def fetch(spark: SparkSession, run: str) -> Counts | None:
    """Take the counts that commits have handed over; None if there are none."""
    if hasattr(spark, "sparkContext"):
        text = _take(run)
    else:
        if spark not in _reading:
            spark.dataSource.register(HandedOver)
            _reading.add(spark)
        [(text,)] = spark.read.format(HandedOver.name()).option("run", run).load().collect()
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
    """`format("oncely-counts")`: one row with the counts of the option `run`, if there are any."""

    @classmethod
    def name(cls) -> str:
        """The name of the format."""
        return "oncely-counts"

    def schema(self) -> str:
        """One column, JSON."""
        return "counts string"

    def reader(self, schema: StructType) -> "CountsReader":  # noqa: ARG002 - Spark's signature.
        """The reader of the counts."""
        return CountsReader(self.options["run"])


class CountsReader(DataSourceReader):
    """Used on the driver, and as a copy in its one task."""

    def __init__(self, run: str) -> None:
        self._run = run

    def partitions(self) -> Sequence[InputPartition]:
        """The counts, taken here because Spark calls this on the driver."""
        return [InputPartition(_take(self._run))]

    def read(self, partition: InputPartition) -> Iterator[tuple[str | None]]:
        """The row."""
        yield (partition.value,)
