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


class RecordedRun:
    """A run: of a pipeline, of one batch, or of all batches of a stream together, which has ended
    with its last batch so far. A ledger that is away is no reason for it not to go on.
    """

    def __init__(self) -> None:
        self._kept_by: tuple[Ledger, Run] | None = None
        """The ledger, and the run as it began."""
        self._began = time.monotonic()
        self._counted = Counts()
        self.report: Report | None = None
        """What it came to, or has come to so far."""
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
                self._kept_by = ledger, Run(uuid4().hex, name, consumer, ledger.now(), None, {})
                ledger.recorder.works_as("spark", consumer)
            self._keep(has_ended=False)
        try:
            yield
        except BaseException as error:
            self._keep(error)
            raise
        self._keep()

    def add(self, report: Report) -> None:
        """Count one more batch."""
        before = self.report or Report(Counts(), 0.0)
        total = before.counts + report.counts
        self.report = Report(total, before.seconds + report.seconds)
        self.count(total)

    def count(self, committed: Counts) -> None:
        """Count what was committed since the last time, for the consumer's activity."""
        if self._kept_by is None:
            return
        ledger, run = self._kept_by
        before, self._counted = self._counted, committed
        failed = committed.failed + committed.waiting - before.failed - before.waiting
        new = Activity(
            run.consumer,
            "",
            0,
            handled=committed.handled - before.handled,
            failed=max(0, failed),
            exhausted=committed.failed - before.failed,
            duplicates=committed.duplicates - before.duplicates,
            in_doubt=committed.in_doubt - before.in_doubt,
        )
        if any(new[3:8]):
            ledger.recorder.add(run.consumer, new)

    def _keep(self, error: BaseException | None = None, *, has_ended: bool = True) -> None:
        if self._kept_by is None:
            return
        ledger, run = self._kept_by
        seconds = time.monotonic() - self._began
        run = run._replace(
            ended=run.began + seconds if has_ended else None,
            totals={} if self.report is None else self.report.as_dict(),
            error=None if error is None else describe(error),
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
