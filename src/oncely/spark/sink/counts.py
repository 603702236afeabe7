"""Counts: the results of the deliveries of a task, a batch or a run; and a run's report.

A batch is committed in a process on the driver's machine, which under Spark Connect is not the
client's. But reads are planned on the driver, too, so the client reads the counts by a format.
"""

import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from operator import itemgetter
from pathlib import Path
from typing import Any
from weakref import WeakSet

from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from oncely.core.errors_by_kind import Kinds, both, commonest

MAX_REASONS = 50
"""The most reasons that are counted by name, over all tasks and batches."""
OTHER_REASONS = "other reasons"
_REASON_LENGTH = 200
_FEW = 100
_NEARLY_ALL = 0.95


@dataclass
class Counts:
    """Once all is settled, `received` is the sum of all the others."""

    received: int = 0
    handled: int = 0
    duplicates_input: int = 0
    """Copies of messages first seen in the same run."""
    duplicates_ledger: int = 0
    """Copies of messages that the ledger knew before the run."""
    quarantined: Counter[str] = field(default_factory=Counter)
    """Quarantined rows by reason."""
    failed: int = 0
    in_doubt: int = 0
    waiting: int = 0
    """Failed messages that wait in the ledger for a retry."""
    newly_failed: int = field(default=0, compare=False)
    """Messages that failed permanently in this run: others of `failed` had done so before."""
    failed_attempts: int = field(default=0, compare=False)
    """Attempts that failed: a message may have failed several times."""
    errors: Kinds = field(default_factory=dict, compare=False)
    """Messages that failed in this run, also if a retry has succeeded since."""
    old_errors: Kinds = field(default_factory=dict, compare=False)
    """Messages that had failed before, and were delivered again."""
    last_error: str = field(default="", compare=False)
    """The error of a failed attempt, after the id of its message."""

    def __post_init__(self) -> None:
        # So that `vars` of counts, sent as JSON, makes counts again.
        self.quarantined = Counter(self.quarantined)

    def __add__(self, other: "Counts") -> "Counts":
        numbers = {
            each.name: getattr(self, each.name) + getattr(other, each.name)
            for each in fields(self)
            if each.type is int
        }
        total = Counts(
            quarantined=self.quarantined,
            errors=both(self.errors, other.errors) if other.errors else self.errors,
            old_errors=both(self.old_errors, other.old_errors)
            if other.old_errors
            else self.old_errors,
            last_error=other.last_error or self.last_error,
            **numbers,
        )
        for reason, count in other.quarantined.items():
            total.set_aside(reason, count)
        return total

    def set_aside(self, reason: str, count: int = 1) -> None:
        """Count quarantined rows under their reason, or under `OTHER_REASONS`."""
        name = reason if len(reason) <= _REASON_LENGTH else reason[: _REASON_LENGTH - 1] + "…"
        is_counted = name in self.quarantined or len(self.quarantined) < MAX_REASONS
        self.quarantined[name if is_counted else OTHER_REASONS] += count

    @property
    def duplicates(self) -> int:
        """Copies in the input, and of messages already in the ledger."""
        return self.duplicates_input + self.duplicates_ledger

    @property
    def new(self) -> int:
        """Deliveries that are not duplicates."""
        broken = self.quarantined.total()
        return self.handled + broken + self.failed + self.in_doubt + self.waiting

    @property
    def settled(self) -> int:
        """Deliveries whose result is known."""
        return self.new + self.duplicates

    def so_far(self) -> "Counts":
        """The same of an end before all is settled: without the deliveries that are not."""
        return replace(self, received=self.settled)

    @property
    def ran(self) -> int:
        """Messages whose handlers ran."""
        return self.handled + sum(self.errors.values())

    @property
    def hopeless(self) -> str | None:
        """Why it is of no use to try more: nearly all handlers have failed for one reason."""
        text, count = max(self.errors.items(), key=itemgetter(1), default=("", 0))
        if self.ran < _FEW or count < _NEARLY_ALL * self.ran:
            return None
        return (
            f"stopped early, since {count:,} of {self.ran:,} messages failed for one reason: {text}"
            "; no others were tried. Correct it, and run again; or write max_failures = 1, which "
            "never stops"
        )

    @property
    def has_failures(self) -> bool:
        """Whether messages failed, wait for a retry because they failed, or are in doubt."""
        return bool(self.failed or self.waiting or self.in_doubt)

    def in_words(self) -> str:
        """The counts of messages that were not handled, as text."""
        parts = {
            "failed": self.failed,
            "waiting for a retry": self.waiting,
            "in doubt": self.in_doubt,
            "quarantined": self.quarantined.total(),
        }
        said = ", ".join(f"{count:,} {name}" for name, count in parts.items() if count)
        return f"{said}; last error: {self.last_error}" if self.last_error else said

    def as_dict(self) -> dict[str, Any]:
        """The counts under the names that `--json` prints."""
        return {
            "received": self.received,
            "handled": self.handled,
            "duplicates": {"input": self.duplicates_input, "ledger": self.duplicates_ledger},
            "quarantined": dict(sorted(self.quarantined.items())),
            "failed": self.failed,
            "in_doubt": self.in_doubt,
            "waiting": self.waiting,
            # Of a run in which all has succeeded in the end, none is of interest.
            "errors": commonest(both(self.errors, self.old_errors)) if self.has_failures else [],
        }


@dataclass
class Report:
    """Once all is settled, `received` is the sum of all the others."""

    counts: Counts
    seconds: float
    stopped: bool = False
    """Whether the run was stopped before its end; the next run continues what is not committed."""

    @property
    def received(self) -> int:
        """Deliveries."""
        return self.counts.received

    @property
    def handled(self) -> int:
        """Deliveries that this run handled."""
        return self.counts.handled

    @property
    def duplicates(self) -> int:
        """Copies in the input, and of messages already in the ledger; `counts` has both."""
        return self.counts.duplicates

    @property
    def quarantined(self) -> int:
        """Rows that were set aside; `counts` has them by reason."""
        return self.counts.quarantined.total()

    @property
    def failed(self) -> int:
        """Deliveries of messages that are not retried."""
        return self.counts.failed

    @property
    def in_doubt(self) -> int:
        """Deliveries of messages in doubt: it is not known whether the effect happened."""
        return self.counts.in_doubt

    @property
    def waiting(self) -> int:
        """Deliveries of failed messages that wait in the ledger for a retry."""
        return self.counts.waiting

    @property
    def has_failures(self) -> bool:
        """Whether messages failed, wait for a retry because they failed, or are in doubt."""
        return self.counts.has_failures

    def as_dict(self) -> dict[str, Any]:
        """The report under the names that `--json` prints."""
        return {**self.counts.as_dict(), "seconds": round(self.seconds, 3)}


# ---- From the process that commits a batch to the program ----------------------------------------


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


class HandedOver(DataSource, DataSourceReader):
    """`format("oncely-counts")`: one row with the counts of the option `run`, if there are any."""

    @classmethod
    def name(cls) -> str:
        """The name of the format."""
        return "oncely-counts"

    def schema(self) -> str:
        """One column, JSON."""
        return "counts string"

    def reader(self, schema: StructType) -> DataSourceReader:  # noqa: ARG002 - Spark's signature.
        """Itself: used on the driver, and as a copy in its one task."""
        return self

    def partitions(self) -> Sequence[InputPartition]:
        """The counts, taken here because Spark calls this on the driver."""
        return [InputPartition(_take(self.options["run"]))]

    def read(self, partition: InputPartition) -> Iterator[tuple[str | None]]:
        """The row."""
        yield (partition.value,)
