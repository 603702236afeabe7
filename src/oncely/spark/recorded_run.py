"""Runs on Spark, kept in the ledger for operators."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from uuid import uuid4

from oncely._util.event_log import EventLog
from oncely._util.outage import Outage
from oncely.core.activity import Activity, Run
from oncely.core.errors import OncelyError, describe
from oncely.ledger.ledger import Ledger
from oncely.locations import LedgerAddress
from oncely.spark.ledgers import migrated_ledger
from oncely.spark.sink.counts import Counts, Report

_log = EventLog(__name__)


class RecordedRun:
    """A run that has begun: `report` is what it came to, or has come to so far."""

    def __init__(
        self, ledger: Ledger, name: str, consumer: str, outage: Outage | None = None
    ) -> None:
        self._outage = outage or _outage()
        self._ledger = ledger
        self._run = Run(uuid4().hex, name, consumer, ledger.now(), None, {})
        self._began = time.monotonic()
        self._counted = Counts()
        self.report: Report | None = None
        ledger.recorder.works_as("spark", consumer)
        self._keep(has_ended=False)

    def count(self, committed: Counts) -> None:
        """Count what was committed since the last time, for the consumer's activity."""
        before, self._counted = self._counted, committed
        failed = committed.failed + committed.waiting - before.failed - before.waiting
        new = Activity(
            self._run.consumer,
            "",
            0,
            handled=committed.handled - before.handled,
            failed=max(0, failed),
            exhausted=committed.failed - before.failed,
            duplicates=committed.duplicates - before.duplicates,
            in_doubt=committed.in_doubt - before.in_doubt,
        )
        if any(new[3:8]):
            self._ledger.recorder.add(self._run.consumer, new)

    @contextmanager
    def ending(self) -> Iterator["RecordedRun"]:
        """Keep where the run stands at the end of the block, and the error that ends it."""
        try:
            yield self
        except BaseException as error:
            self._keep(error)
            raise
        self._keep()

    def _keep(self, error: BaseException | None = None, *, has_ended: bool = True) -> None:
        """Keep where it stands. A ledger that is away is no reason for the run to end."""
        seconds = time.monotonic() - self._began
        run = self._run._replace(
            ended=self._run.began + seconds if has_ended else None,
            totals={} if self.report is None else self.report.as_dict(),
            error=None if error is None else describe(error),
        )
        try:
            self._ledger.operations.keep_run(run)
        except OncelyError as away:
            self._outage.met(away, run=run.id)
        else:
            self._outage.over()


def _outage() -> Outage:
    return Outage(
        _log,
        "run_not_kept",
        "run '%(run)s' cannot be stored for operators: %(reason)s; it goes on",
        "run_kept",
        "runs are stored for operators again after %(away_s)s s",
    )


class FrontRun:
    """A run of a program's own: one batch, or all batches of a stream together, which has ended
    with its last batch so far.
    """

    def __init__(self) -> None:
        self._run: RecordedRun | None = None
        self._outage = _outage()
        self._counts = Counts()
        self._seconds = 0.0

    @contextmanager
    def batch(
        self, address: LedgerAddress, name: str, consumer: str
    ) -> Iterator[Callable[[Report], None]]:
        """While a batch is processed: to be called with what it came to. A ledger that is away is
        no reason for the batch not to begin.
        """
        if self._run is None:
            try:
                self._run = RecordedRun(migrated_ledger(address), name, consumer, self._outage)
            except OncelyError as away:
                self._outage.met(away, run=name)

        def add(report: Report) -> None:
            self._counts += report.counts
            self._seconds += report.seconds
            if self._run is not None:
                self._run.count(self._counts)
                self._run.report = Report(self._counts, self._seconds)

        with nullcontext() if self._run is None else self._run.ending():
            yield add
