"""Runs on Spark, kept in the ledger for operators."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from uuid import uuid4

from oncely._util.event_log import EventLog
from oncely._util.outage import Outage
from oncely.core.activity import Activity, Run
from oncely.core.errors import OncelyError, describe
from oncely.ledger.ledger import Ledger
from oncely.spark.sink.counts import Counts, Report

_log = EventLog(__name__)

_KEEP_EVERY_S = 1.0


class RecordedRun:
    """A run: of a pipeline, of one batch, or of all batches of a stream together, which has ended
    with its last batch so far. A ledger that is away is no reason for it not to go on.
    """

    def __init__(self) -> None:
        self._kept_by: tuple[Ledger, Run] | None = None
        """The ledger, and the run as it began."""
        self._began = self._kept_at = time.monotonic()
        self.total = Counts()
        """What was counted so far."""
        self._outage = Outage(
            _log,
            "run_not_kept",
            "run '%(run)s' cannot be stored for operators: %(reason)s; it goes on",
            "run_kept",
            "runs are stored for operators again after %(away_s)s s",
        )

    @contextmanager
    def going_on(
        self, open_ledger: Callable[[], Ledger], name: str, consumer: str
    ) -> Iterator[None]:
        """Keep where the run stands at the beginning of the block, unless it has begun, and at the
        end, with the error that ends it.
        """
        if self._kept_by is None:
            with self._noted(name):
                ledger, self._began = open_ledger(), time.monotonic()
                ledger.recorder.works_as("spark", consumer)
                # Now: by the worker's signs of life, a run at work is told from a killed one.
                ledger.recorder.tell()
                run_id = f"{ledger.recorder.worker_id}.{uuid4().hex[:8]}"
                self._kept_by = ledger, Run(run_id, name, consumer, ledger.now(), None, {})
            self._keep(has_ended=False)
        try:
            yield
        except BaseException as error:
            self._keep(error)
            raise
        self._keep()

    def count(self, total: Counts) -> None:
        """Count what was settled since the last time, for the consumer's activity; and keep it now
        and then, for the case that this process is killed.
        """
        if self._kept_by is None:
            return
        ledger, run = self._kept_by
        before, self.total = self.total, total
        new = Activity(
            run.consumer,
            "",
            0,
            handled=total.handled - before.handled,
            failed_attempts=total.failed_attempts - before.failed_attempts,
            failed=total.newly_failed - before.newly_failed,
            duplicates=total.duplicates - before.duplicates,
            in_doubt=total.in_doubt - before.in_doubt,
        )
        if any(new[3:8]):
            ledger.recorder.add(run.consumer, new)
        if total != before and time.monotonic() - self._kept_at > _KEEP_EVERY_S:
            self._keep(has_ended=False)

    def _keep(self, error: BaseException | None = None, *, has_ended: bool = True) -> None:
        if self._kept_by is None:
            return
        ledger, run = self._kept_by
        self._kept_at = time.monotonic()
        seconds = self._kept_at - self._began
        # The line that the command shows, or else what Python calls it.
        line = " ".join(str(error).split()) if isinstance(error, OncelyError) else error
        run = run._replace(
            ended=run.began + seconds if has_ended else None,
            totals=Report(self.total, seconds).as_dict(),
            error=None if line is None else describe(line),
        )
        with self._noted(run.id):
            ledger.operations.keep_run(run)

    @contextmanager
    def _noted(self, run: str) -> Iterator[None]:
        try:
            yield
        except OncelyError as away:
            self._outage.met(away, run=run)
        else:
            self._outage.over()
