"""What a process does with a ledger, counted, and told to the store every few seconds."""

import os
import platform
import socket
import threading
import time
import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import cache
from itertools import cycle, groupby, islice, repeat
from uuid import uuid4

from oncely._util import clock
from oncely._util.at_exit import at_exit
from oncely._util.chance import Process
from oncely._util.event_log import EventLog
from oncely._util.forking import afresh_in_children
from oncely._util.outage import Outage
from oncely._util.version import __version__
from oncely.core.activity import BOUNDS_S, LATE_S, PERIOD_S, Activity, AuditEntry, Worker
from oncely.core.commands import (
    Command,
    Complete,
    Doubt,
    Duplicate,
    Fail,
    Fenced,
    Granted,
    Held,
    InDoubt,
    MarkHandled,
    OperatorCommand,
    Outcome,
    Release,
    Written,
)
from oncely.core.errors import OncelyError, TransportError
from oncely.core.record import Key, State
from oncely.ledger.settle import LedgerObserver
from oncely.stores.store import Store

_log = EventLog(__name__)

BEAT_S = LATE_S / 3
"""How often a worker says that it is alive."""
SET_BACK = "set back"
"""The action in the audit that a worker notes when it finds the ledger as it was earlier."""
_ROUNDS = 10
_ADD_UP_S = BEAT_S / _ROUNDS
"""How often it adds up what was counted, which would take megabytes between two beats."""
_END_S = 2.0
"""How long closing waits for the thread: a server that is frozen answers nobody."""
_MOST_CLAIMS = 10_000
"""Of so many claims at a time it is known when they were granted. Among them are those that were
rolled back with a caller's transaction: nobody says so.
"""

_Counts = dict[str, list[int]]
_HANDLED, _FAILED, _EXHAUSTED, _DUPLICATES, _IN_DOUBT = range(5)
_SECONDS = 5
"""From here on, the counts of handling times."""
_NONE = [0] * (_SECONDS + len(BOUNDS_S) + 1)


class Recorder:
    """Counts what a ledger is told, as LedgerObserver says, passes it on to `metrics`, and keeps it
    in the store.

    Nothing that it does raises, or keeps a message waiting. What was counted since the last beat is
    lost with a process that is killed. Its thread starts with the first thing that it is told, also
    again in a forked child and after `close`, and ends with the ledger.
    """

    def __init__(self, store: Store, metrics: LedgerObserver | None = None) -> None:
        self._store = store
        self.metrics = metrics
        self.kind = "program"
        self.is_silent = False
        """Whether nothing is counted nor told: by Spark's tasks, of which the driver tells."""
        self.consumer = ""
        self.start_afresh()
        afresh_in_children(self)
        _recorders.add(self)

    def start_afresh(self) -> None:
        """Be another worker: called in a forked child."""
        # Totals that were told later are not to be overwritten by earlier ones. Callers take no
        # lock: a signal handler that asks the ledger may have interrupted the one who holds it, and
        # would wait for ever.
        self._telling = threading.Lock()
        self.worker_id = uuid4().hex
        self._counted: deque[tuple[str, int, int]] = deque()
        """What was counted lately: consumer, place, and how many more."""
        self._new: _Counts = {}
        """What no period has yet, by consumer."""
        self._kept: dict[tuple[str, int], list[int]] = {}
        """What the periods have of which the store may not know all."""
        self._claimed: dict[Key, float] = {}
        """When the claims that are held were granted, by this process's clock."""
        self._lags: list[Callable[[], Mapping[str, int]]] = []
        self.running: list[tuple[threading.Thread, threading.Event]] = []
        """The thread, and what ends it: only one caller can take them out, without a lock."""
        self._may_start: list[None] = [None]
        """In the same way, what one caller takes to start it."""
        self._outage = Outage(
            _log,
            "activity_not_kept",
            "the activity of this process cannot be stored: %(reason)s; trying again, and "
            "messages are not affected",
            "activity_kept",
            "the activity of this process is stored again after %(away_s)s s",
        )
        self._has_told = False
        self._told_at = 0.0
        """The store's time when it was told last."""

    # ---- Being told ----------------------------------------------------------------------------

    def settled(
        self, commands: Sequence[Command], results: Sequence[Outcome | Exception], took_s: float
    ) -> None:
        if self._store.keeps_operations and not self.is_silent:
            if len(commands) == 1:
                self._count([commands[0].key], commands[0], results[0])
            else:
                # Writers wait for this, and most commands of a batch are alike: those are counted
                # at once.
                pairs = zip(commands, results, strict=True)
                for _, same in groupby(pairs, _counted_as):
                    alike = [*same]
                    self._count([each.key for each, _ in alike], *alike[0])
            if self._may_start and any(not isinstance(each, OperatorCommand) for each in commands):
                self._start()
        if self.metrics is not None:
            self.metrics.settled(commands, results, took_s)

    def purged(self, consumer: str | None, count: int) -> None:
        if self.metrics is not None:
            self.metrics.purged(consumer, count)

    def untracked(self, consumer: str) -> None:
        if self.metrics is not None:
            self.metrics.untracked(consumer)

    def works_as(self, kind: str, consumer: str = "") -> None:
        """What operators see this process as, from now on."""
        self.kind, self.consumer = kind, consumer
        if self._store.keeps_operations:
            self._start()

    @contextmanager
    def telling_lags(self, lags: Callable[[], Mapping[str, int]]) -> Iterator[None]:
        """While this is entered, tell what `lags` says, as Worker has it. It may raise
        TransportError.
        """
        self._lags.append(lags)
        try:
            yield
        finally:
            self._lags.remove(lags)

    def handles_as(self, kind: str, consumer: str) -> None:
        """As `works_as`, each time that this process handles something in that way: the first kind
        stays, without a consumer where there are several.
        """
        if self.kind == "program":
            self.works_as(kind, consumer)
        elif self.kind == kind and self.consumer != consumer:
            self.consumer = ""

    def add(self, consumer: str, counts: Activity) -> None:
        """Count what others have done for a consumer, in the period that is now."""
        if self._store.keeps_operations:
            new = (counts.handled, counts.failed_attempts, counts.failed, counts.duplicates)
            for bucket, count in enumerate((*new, counts.in_doubt)):
                self._counted.append((consumer, bucket, count))
            self._start()

    def _count(self, keys: Sequence[Key], command: Command, outcome: Outcome | Exception) -> None:
        """Count commands of one consumer that are counted alike, of which one is this."""
        consumer = command.key.consumer
        match outcome:
            case Granted(claim):
                self._claimed.update(dict.fromkeys(keys, time.perf_counter()))
                if claim.takes_over:
                    self._counted.append((consumer, _IN_DOUBT, len(keys)))
            case Duplicate():
                self._counted.append((consumer, _DUPLICATES, len(keys)))
            case InDoubt():
                self._counted.append((consumer, _IN_DOUBT, len(keys)))
            case Fenced() | Written() if isinstance(command, Release | Doubt) or isinstance(
                outcome, Fenced
            ):
                if isinstance(command, Doubt) and isinstance(outcome, Written):
                    self._counted.append((consumer, _IN_DOUBT, len(keys)))
                for key in keys:
                    self._claimed.pop(key, None)
            case Written(is_repeated=False) if isinstance(command, MarkHandled | Complete | Fail):
                # What was handled before was counted then.
                if command.claim.state is State.PROCESSING:
                    self._count_ends(keys, command)

    def _count_ends(self, keys: Sequence[Key], command: Held) -> None:
        consumer, is_failed = keys[0].consumer, isinstance(command, Fail)
        self._counted.append((consumer, _FAILED if is_failed else _HANDLED, len(keys)))
        if isinstance(command, Fail) and command.final:
            self._counted.append((consumer, _EXHAUSTED, len(keys)))
        now = time.perf_counter()
        # Claims of one batch were granted at one time.
        for claimed_at, same in groupby(map(self._claimed.pop, keys, repeat(None))):
            if claimed_at is not None:
                bucket = _SECONDS + bisect_left(BOUNDS_S, now - claimed_at)
                self._counted.append((consumer, bucket, len([*same])))

    # ---- Telling -------------------------------------------------------------------------------

    def _start(self) -> None:
        try:
            self._may_start.pop()
        except IndexError:
            return
        try:
            closed = threading.Event()
            thread = threading.Thread(
                target=_beat, args=(weakref.ref(self), closed), daemon=True, name="recorder"
            )
            thread.start()
            self.running.append((thread, closed))
        except BaseException as error:
            # The next call tries again.
            self._may_start.append(None)
            if not isinstance(error, RuntimeError):
                raise

    def add_up(self) -> None:
        """Add up what was counted, so that little is kept of it."""
        with self._telling:
            self._add_up()

    def _add_up(self) -> None:
        while self._counted:
            consumer, bucket, count = self._counted.popleft()
            self._new.setdefault(consumer, [*_NONE])[bucket] += count
        if (excess := len(self._claimed) - _MOST_CLAIMS) > 0:
            # A copy, since others add to it meanwhile.
            for key in islice(self._claimed.copy(), excess):
                self._claimed.pop(key, None)

    @property
    def is_unseen(self) -> bool:
        """Whether it has begun with something of which the store was told nothing yet: if it is
        killed before the first beat, nobody would know that it was there. Without that it may be an
        application that is being imported, whose ledger is migrated later.
        """
        return not self._has_told and bool(self._claimed or self._counted or self._new)

    def tell(self) -> None:
        """Let the store know now. Where it is away, it is told later."""
        self._has_told = True
        try:
            with self._telling:
                self._tell()
        except Exception as error:  # noqa: BLE001 - whatever it is, messages go on.
            self._outage.met(error)
        else:
            self._outage.over()

    def _tell(self) -> None:
        now = self._store.load(()).now
        period = int(now // PERIOD_S) * PERIOD_S
        self._add_up()
        for consumer, counts in self._new.items():
            kept = self._kept.setdefault((consumer, period), [*_NONE])
            kept[:] = map(sum, zip(kept, counts, strict=True))
        self._new = {}
        rows = [
            Activity._make((consumer, self.worker_id, began, *counts[:_SECONDS], counts[_SECONDS:]))
            for (consumer, began), counts in self._kept.items()
        ]
        who = (self.worker_id, self.kind, self.consumer, _host(), os.getpid(), __version__)
        lags: dict[str, int] = {}
        for tell in [*self._lags]:
            with suppress(TransportError):
                lags |= tell()
        worker = Worker(*who, now, now, len(self._claimed), Process.number, None, lags or None)
        before = self._store.keep_worker(worker, rows)
        if self._told_at and (before or 0.0) < self._told_at and self._store.keeps_operations:
            self._note_set_back(before, now)
        self._told_at = now
        # What was counted meanwhile has no period yet: of an earlier one nothing comes any more.
        self._kept = {key: kept for key, kept in self._kept.items() if key[1] == period}

    def _note_set_back(self, since: float | None, until: float) -> None:
        """The store lacks the last sign of life of this process: so it lacks others', too."""
        told = {"since": "an unknown time" if since is None else _utc(since), "until": _utc(until)}
        _log.error(
            "the ledger is as it was at %(since)s, by a restore or a failover: what was stored "
            "from then until %(until)s may be gone, and run again; type: oncely check",
            extra={"event": "ledger_set_back", **told},
        )
        by, why = f"{_host()}:{os.getpid()}", f"from {told['since']} until {told['until']}"
        self._store.note(AuditEntry(0, 0.0, by, SET_BACK, self.consumer, "", None, 0, 0, why))

    def close(self) -> None:
        """Tell the store what it does not know yet, and that this worker has ended: if it answers
        within seconds.
        """
        try:
            thread, closed = self.running.pop()
        except IndexError:
            return
        closed.set()
        self._may_start.append(None)
        thread.join(_END_S)
        if not thread.is_alive():
            self.worker_id, self._kept, self._has_told = uuid4().hex, {}, False

    def end(self) -> None:
        """Tell for the last time: called by the thread, when it was closed."""
        if not self._outage.goes_on:
            self.tell()
            with suppress(OncelyError):
                self._store.end_worker(self.worker_id)
                self._told_at = 0.0
        # Closing may not have waited for this: the connection that it took is given back as well.
        self._store.close()


_recorders: "weakref.WeakSet[Recorder]" = weakref.WeakSet()


@at_exit
def end_all(**_signal: object) -> None:
    """A program that ends without closing its ledgers has stopped all the same."""
    running = [each for recorder in _recorders for each in recorder.running]
    for _, closed in running:
        closed.set()
    until = time.monotonic() + _END_S
    for thread, _ in running:
        thread.join(max(0.0, until - time.monotonic()))


def _counted_as(pair: tuple[Command, Outcome | Exception]) -> tuple[object, ...]:
    """On what it depends how a command is counted."""
    command, outcome = pair
    what: object = None
    if isinstance(outcome, Granted):
        what = outcome.claim.takes_over
    elif isinstance(outcome, Written) and isinstance(command, Held):
        is_final = isinstance(command, Fail) and command.final
        what = command.claim.state, outcome.is_repeated, is_final
    return command.key.consumer, type(command), type(outcome), what


def _beat(recorder: "weakref.ref[Recorder]", closed: threading.Event) -> None:
    left = cycle(reversed(range(_ROUNDS)))
    while not clock.wait(closed, _ADD_UP_S):
        alive = recorder()
        if alive is None:
            return
        if next(left) and not alive.is_unseen:
            alive.add_up()
        else:
            alive.tell()
        del alive
    if (closing := recorder()) is not None:
        closing.end()


def _utc(at: float) -> str:
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S} UTC"


@cache
def _host() -> str:
    return socket.gethostname() or platform.node()
