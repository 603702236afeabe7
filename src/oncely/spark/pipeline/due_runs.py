"""Due runs: run messages that wait in the ledger while there is no batch that would take them."""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

from pyspark.sql import SparkSession

from oncely.core.waiting import retries_of
from oncely.ledger.ledger import Ledger
from oncely.lifecycle.claim_keeper import AWAY
from oncely.spark.session import make_active
from oncely.spark.sink.spreading import slots


class DueRuns:
    """Runs `consumer`'s waiting messages; a run writes zero rows to the sink with `settings`."""

    def __init__(
        self, spark: SparkSession, ledger: Ledger, consumer: str, settings: Mapping[str, str]
    ) -> None:
        self._spark = spark
        self._ledger = ledger
        self._queue = retries_of(consumer)
        self._settings = settings
        self._pool = ThreadPoolExecutor(1, "oncely-due")
        self._running: Future[None] | None = None

    def look(self) -> bool:
        """Return whether messages wait. Starts a run if some are due and no run is active. Raises
        the error of a run that failed.
        """
        if self._running is not None:
            if self._running.done():
                running, self._running = self._running, None
                running.result()
            return True
        with suppress(*AWAY):
            free_in_s = self._ledger.mailbox.free_in_s(self._queue)
            if free_in_s == 0:
                self._running = self._pool.submit(self._run)
            return free_in_s is not None
        return True

    def close(self) -> None:
        """Wait for the end of the run. Tell its tasks to stop before this."""
        self._pool.shutdown()

    def _run(self) -> None:
        make_active(self._spark)
        tasks = slots(self._spark)
        # Filtered only in the tasks: an empty DataFrame would have no tasks to take messages.
        nothing = self._spark.range(0, tasks, 1, tasks).where("rand() < 0")
        rows = nothing.selectExpr("cast(id AS STRING) AS id")
        rows.write.format("oncely").options(**self._settings).mode("append").save()
