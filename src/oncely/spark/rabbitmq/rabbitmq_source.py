"""The Spark format "oncely-rabbitmq": a queue as a source, of streams and of batches.

The driver writes messages to a spool, and acknowledges them when they are durable there. The
offsets of a stream are numbers of segments, which the executors read.
"""

from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any

from pyarrow import RecordBatch
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
)
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from oncely.core.errors import ConfigError
from oncely.spark.rabbitmq.source_options import FORMAT, RabbitmqOptions, read_rabbitmq_options
from oncely.spark.rabbitmq.spool import read_segment
from oncely.spark.rabbitmq.spooler import Spooler
from oncely.spark.sink.message_rows import MESSAGE_SCHEMA

_SEGMENT = "segment"

Offset = dict[str, int]


class RabbitmqDataSource(DataSource):
    """`format("oncely-rabbitmq")`, for batch and streaming reads of a queue."""

    @classmethod
    def name(cls) -> str:
        """The name of the format."""
        return FORMAT

    def schema(self) -> StructType:
        """The columns of a message; raises ConfigError for wrong options."""
        read_rabbitmq_options(self.options)
        return MESSAGE_SCHEMA

    def reader(self, schema: StructType) -> "RabbitmqReader":
        """The reader of a batch; raises ConfigError for wrong options."""
        return RabbitmqReader(_checked(self.options, schema))

    def streamReader(self, schema: StructType) -> "RabbitmqStreamReader":  # noqa: N802 - Spark's name.
        """The reader of a stream; raises ConfigError for wrong options."""
        return RabbitmqStreamReader(_checked(self.options, schema))


class _SegmentReader:
    """The part for executors, which is pickled without the rest: without the broker's password."""

    def __getstate__(self) -> dict[str, object]:
        return {}

    def read(self, partition: InputPartition) -> Iterator[RecordBatch]:
        """The messages of one segment. Raises OncelyError if it cannot be read here."""
        # Spark adds a partition of its own if there is none.
        return iter(()) if partition.value is None else read_segment(partition.value)


class RabbitmqReader(_SegmentReader, DataSourceReader):
    """Takes the queue's messages into the spool, and reads the whole spool."""

    def __init__(self, options: RabbitmqOptions) -> None:
        self._options = options

    def partitions(self) -> list[InputPartition]:
        """One for each segment."""
        with closing(Spooler(self._options)) as spooler:
            spooler.open()
            spooler.take_all()
            files = spooler.spool.files(spooler.spool.numbers())
            return [InputPartition(file) for file in files]


class RabbitmqStreamReader(_SegmentReader, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads segment after segment. It is used on the driver, and as a copy in each task."""

    def __init__(self, options: RabbitmqOptions) -> None:
        self._options = options
        self._opened: Spooler | None = None
        # How many messages may still be taken; None: no limit.
        self._left: int | None = None

    def initialOffset(self) -> Offset:  # noqa: N802 - Spark's name.
        """The position before the whole spool: without its checkpoint a stream reads all again."""
        return {_SEGMENT: min(self._spooler.spool.numbers(), default=1) - 1}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name.
        """The messages of a batch."""
        return ReadMaxRows(self._options.max_messages)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name.
        """Take only as many messages as the broker has now. Raises TransportError."""
        self._left = self._spooler.waiting()

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802 - Spark's name.
        """The segments to read next: those in the spool after `start`, or else a new one.

        Raises as `Spooler` does, and OncelyError if the spool cannot be written.
        """
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        after = start[_SEGMENT]
        end = self._spooler.spool.end_of_next(after, most or self._options.max_messages)
        if end == after:
            end = self._spooler.take_all(after) if most is None else self._take(most, after)
        return {_SEGMENT: end}

    def partitions(self, start: Offset, end: Offset) -> list[InputPartition]:
        """One for each segment. Raises OncelyError if a segment is gone."""
        numbers = range(start[_SEGMENT] + 1, end[_SEGMENT] + 1)
        return [InputPartition(file) for file in self._spooler.spool.files(numbers)]

    def commit(self, end: Offset) -> None:
        """Remove committed segments, except the newest ones."""
        self._spooler.spool.remove(end[_SEGMENT], self._options.keep_segments)

    def stop(self) -> None:
        """Requeue messages that were received and not spooled."""
        if self._opened is not None:
            self._opened.close()

    @property
    def _spooler(self) -> Spooler:
        # Spark creates readers only to copy them to tasks: those must not lock the spool.
        if self._opened is None:
            opened = Spooler(self._options)
            opened.open()
            self._opened = opened
        return self._opened

    def _take(self, most: int, after: int) -> int:
        if self._left is None:
            return self._spooler.take(most, after)[0]
        if self._left == 0:
            return after
        end, taken = self._spooler.take(min(most, self._left), after, is_sure=True)
        # If no message comes, another receiver has got the rest.
        self._left = max(0, self._left - taken) if taken else 0
        return end


def _checked(options: Mapping[str, Any], schema: StructType) -> RabbitmqOptions:
    if schema != MESSAGE_SCHEMA:
        raise ConfigError(f"schema: {FORMAT} has one of its own; leave it out")
    return read_rabbitmq_options(options)
