"""One batch: its messages, their staging folder, and the jobs on them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from oncely._util.crash_points import reached
from oncely.core.errors import ConfigError
from oncely.spark.batches.member_jobs import Does, JobReport, run_job
from oncely.spark.batches.staging import IN_DOUBT, STAGED, Staging
from oncely.spark.sink.message_rows import BROKEN_COLUMN, COLUMN_TYPES, ROW_COLUMN
from oncely.spark.sink.spreading import spread


@dataclass(frozen=True)
class Batch:
    """The batch of one key."""

    spark: SparkSession
    key: str
    staging: Staging
    settings: Mapping[str, str]
    """The sink's."""
    deliveries: DataFrame | None
    """The input; None if an earlier program has begun the batch."""
    partitions: int | None

    def stage(self) -> None:
        """Store the deliveries, unless they are stored."""
        if self.deliveries is not None:
            self.deliveries.write.mode("overwrite").parquet(self.staging.rows)
            self.staging.mark(STAGED)
            reached("batch_staged")

    def claim(self) -> dict[str, Any]:
        """Claim the new messages among the deliveries; return a report as JSON. After an
        interruption repeat it: the same messages are granted.
        """
        rows = spread(self.spark.read.parquet(self.staging.rows), self.partitions)
        # Copies are next to each other, so that a task finds them without keeping all ids.
        sorted_ = rows.sortWithinPartitions("id")
        return run_job(sorted_, self.settings, "claim", self.key, self.staging).as_json()

    def new(self, claimed: JobReport) -> DataFrame:
        """The new messages: the same each time the handler is called."""
        return self._read(claimed).drop(ROW_COLUMN, BROKEN_COLUMN)

    def complete(self, claimed: JobReport) -> None:
        """Complete all its messages; the staging folder is removed."""
        self._end(claimed, "complete", ["id"])
        reached("members_completed")
        self.staging.remove()

    def fail(self, claimed: JobReport, error: str) -> None:
        """Fail all its messages permanently: they become dead letters."""
        self._end(claimed, "fail", list(COLUMN_TYPES), f"batch {self.key}: {error}")
        reached("members_failed")
        self.staging.remove()

    def doubt(self, claimed: JobReport) -> None:
        """Put all its messages in doubt."""
        ids = self._read(claimed).select("id")
        run_job(ids, self.settings, "doubt", self.key, self.staging)
        self.staging.mark(IN_DOUBT)

    def _end(self, claimed: JobReport, does: Does, columns: Sequence[str], error: str = "") -> None:
        """Do the job, unless another program has: the files are removed only after the job."""
        if not self._are_there(claimed):
            return
        try:
            rows = self._read(claimed)
            there = [name for name in columns if name in rows.columns]
            run_job(rows.select(there), self.settings, does, self.key, self.staging, error)
        except (PySparkException, Py4JError, ConfigError):
            if self._are_there(claimed):
                raise

    def _read(self, claimed: JobReport) -> DataFrame:
        if not self.staging.is_marked(STAGED):
            raise ConfigError(
                f"staging: batch {self.key} is not in {self.staging.folder!r}; name a folder that "
                "all machines share"
            )
        schema = self.spark.read.parquet(self.staging.rows).schema
        paths = [self.staging.path_of(name) for name in claimed.files]
        return self.spark.read.schema(schema).parquet(*paths)

    def _are_there(self, claimed: JobReport) -> bool:
        """Whether the files are there; they are removed only after the job."""
        return bool(claimed.files) and self.staging.has(claimed.files)
