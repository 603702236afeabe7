"""Group commit: calls that come while others are carried out wait, and then go together.

A call that finds no batch in flight is carried out at once, in its caller's own thread. Calls that
come while it runs wait: until it has ended or, where the store works on several batches side by
side, until half as many wait as are in flight. Then the first of the waiting calls leads: its
thread carries out all that wait as one batch. Where no thread waits for the first call (but a task,
say), a worker leads: a thread of the batcher's own.
"""

import atexit
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from enum import Enum, auto
from itertools import islice
from typing import Any, Generic, Protocol, TypeVar

from oncely._util.clock import monotonic
from oncely._util.event_log import EventLog
from oncely._util.forking import afresh_in_children
from oncely.core.errors import StoreError

_log = EventLog(__name__)

MOST_CALLS = 1_000
"""In one batch."""
MOST_BATCHES = 8
"""In flight at once."""
STALL_S = 0.05
"""After so long in flight, a batch has stalled: the next begins beside it."""
_FULL_S = 1.0
"""How often a thread looks again while `MOST_BATCHES` are in flight and none ends."""
_IDLE_S = 10.0
"""A worker that is idle for so long ends."""
_PATIENCE_S = 5.0
"""How long `close`, and the end of the process, wait for the workers' batches."""

Request = TypeVar("Request")
Outcome = TypeVar("Outcome")


class CallPhase(Enum):
    """How far a call has come."""

    WAITING = auto()
    TAKEN = auto()
    """It is in a batch that is carried out."""
    DONE = auto()
    GONE = auto()
    """The caller that waited for it has gone."""


class Crowd(Protocol):
    """Callers that wait together: one post tells them that several calls are done."""

    def post(self, calls: list[Any]) -> bool:
        """These calls of the crowd are done. Returns whether anybody is still there to notice."""


Posts = dict[Crowd, list[Any]]


class Call(Generic[Request, Outcome]):
    """A request on its way, with no caller that waits for it; those of subclasses have one."""

    __slots__ = ("phase", "request", "result")

    result: Outcome | Exception

    def __init__(self, request: Request) -> None:
        self.request = request
        self.phase = CallPhase.WAITING

    def value(self) -> Outcome:
        """The outcome; an error is raised."""
        if isinstance(self.result, Exception):
            raise self.result
        return self.result

    def tell(self, _: Posts) -> None:
        """The call is done: wake the caller that waits for it, or add it to a crowd's posts."""
        if isinstance(self.result, Exception):
            _log.warning(
                "a claim that nobody waits for could not be released: %(reason)s; it runs out with "
                "its lease",
                exc_info=self.result,
                extra={"event": "release_failed"},
            )


class _Sleeper:
    """A thread that sleeps until it is woken."""

    def __init__(self) -> None:
        self._asleep = threading.Lock()
        self._asleep.acquire()

    def wake(self) -> None:
        """Wake the thread. Only under the batcher's lock."""
        if self._asleep.locked():
            self._asleep.release()

    def sleep(self, at_most_s: float) -> bool:
        """Sleep until woken; False when the time is over. A negative time has no end."""
        return self._asleep.acquire(timeout=at_most_s)


class _ThreadCall(Call[Request, Outcome]):
    """A call for which a thread waits."""

    __slots__ = ("can_lead", "thread")

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self.thread = _Sleeper()
        # Signal handlers run in the main thread, and what they raise would end the calls of
        # others there.
        self.can_lead = threading.get_ident() != threading.main_thread().ident

    def tell(self, _: Posts) -> None:
        self.thread.wake()


class _BatchThread(_Sleeper):
    """A thread of the batcher's own."""

    def __init__(self, work: "Callable[[_BatchThread], None]") -> None:
        super().__init__()
        self.dismissed = False
        self.thread = threading.Thread(target=work, args=[self], name="oncely-batches", daemon=True)


class _Alone:
    """A caller that carries out its own call alone; it lives as long as that call runs.

    An error that a signal handler raises may end a call at any line, also at the lines that would
    give back its slot. Then this object is garbage, and its weak reference tells so.
    """

    __slots__ = ("__weakref__", "slot")

    def __init__(self) -> None:
        self.slot = weakref.ref(self)


_Leader = _Sleeper | weakref.ref[_Alone]


class _Batch:
    """A batch in flight."""

    __slots__ = ("calls", "since")

    def __init__(self, calls: int) -> None:
        self.since = monotonic()
        self.calls = calls
        """How many; 0 until its leader, which was woken, has come to take them."""


class GroupCommit(Generic[Request, Outcome]):
    """Carries out the calls of many threads and tasks, together those that wait together.

    `carry_out` gives each request its outcome, or raises; `carry_out_each` gives each an outcome
    or an error of its own. Where a caller has gone before its outcome came, `undo` gives the
    request that takes the outcome back, if one is needed. So many batches as `at_once` says may be
    in flight, and more where one has stalled. A forked child begins afresh.
    """

    def __init__(
        self,
        carry_out: Callable[[Sequence[Request]], Sequence[Outcome]],
        carry_out_each: Callable[[Sequence[Request]], Sequence[Outcome | Exception]],
        undo: Callable[[Outcome], Request | None],
        at_once: int = 1,
    ) -> None:
        self._carry_out = carry_out
        self._carry_out_each = carry_out_each
        self._undo = undo
        self._at_once = at_once
        self.start_afresh()
        _batchers.add(self)
        afresh_in_children(self)

    def start_afresh(self) -> None:
        """Forget every call and every thread: in a forked child they are the parent's."""
        # A signal handler or a finalizer may call while its own thread is in here.
        self._lock = threading.RLock()
        self.here = threading.local()
        """What callers keep in each thread."""
        self._waiting: dict[Call[Request, Outcome], None] = {}
        # By the threads that lead them, or are woken to lead; newest last.
        self._in_flight: dict[_Leader, _Batch] = {}
        self._workers: set[_BatchThread] = set()
        self._idle: list[_BatchThread] = []

    # ---- For callers ---------------------------------------------------------------------------

    def call(self, request: Request) -> Outcome:
        """Carry out `request`; return its outcome, or raise its error."""
        me = _Alone()
        try:
            if self._begin_alone(me):
                return self._carry_out([request])[0]
        finally:
            self._end(me.slot)
        return self._wait(_ThreadCall(request))

    def submit(self, calls: Iterable[Call[Request, Outcome]]) -> bool:
        """Let another thread carry these out. Returns whether `push` has to be called later."""
        with self._lock:
            self._waiting.update((call, None) for call in calls if call.phase is CallPhase.WAITING)
            begun = self._begin_next()
            return len(self._waiting) > (MOST_CALLS if begun else 0)

    def push(self) -> bool:
        """Begin a batch beside one that has stalled. Returns whether calls still wait."""
        with self._lock:
            self._begin_next()
            return bool(self._waiting)

    def abandon(self, call: Call[Request, Outcome]) -> None:
        """Nobody waits for `call` any more: do not send it, or else let another thread undo it."""
        with self._lock:
            self._waiting.pop(call, None)
            done = call.phase is CallPhase.DONE
            call.phase = CallPhase.GONE
            if done:
                self.give_back([call.result])

    def give_back(self, results: Iterable[Outcome | Exception]) -> None:
        """Let another thread undo these results, whose callers have gone."""
        outcomes = [result for result in results if not isinstance(result, Exception)]
        requests = [request for o in outcomes if (request := self._undo(o)) is not None]
        self.submit(Call(request) for request in requests)

    def close(self) -> None:
        """End the workers, and wait for their batches, but not for ever.

        A later call starts them again.
        """
        deadline = monotonic() + _PATIENCE_S
        # In a loop, since the undoing of a worker's results may have started others.
        while monotonic() < deadline and (workers := self._dismissed_workers()):
            for worker in workers:
                worker.thread.join(max(0.0, deadline - monotonic()))

    # ---- When a batch begins, and who leads it -------------------------------------------------

    def _begin_alone(self, me: _Alone) -> bool:
        with self._lock:
            if self._waiting or not self._may_begin(1):
                return False
            self._in_flight[me.slot] = _Batch(1)
            return True

    def _begin_next(self) -> bool:
        """Wake the leader of the next batch, where calls wait and it may begin. Under the lock."""
        if not self._waiting or not self._may_begin(len(self._waiting)):
            return False
        try:
            leader = self._next_leader()
        except RuntimeError as error:
            self._break_off(self._take(), error)
            return False
        self._in_flight[leader] = _Batch(0)
        leader.wake()
        return True

    def _may_begin(self, calls: int) -> bool:
        for leader in [*self._in_flight]:
            if not isinstance(leader, _Sleeper) and leader() is None:
                del self._in_flight[leader]
        if not self._in_flight:
            return True
        # Not for fewer calls: most batches would be small then, and cost more.
        if len(self._in_flight) < self._at_once and 0 < self._newest.calls <= 2 * calls:
            return True
        return len(self._in_flight) < MOST_BATCHES and self._stalls_in_s() <= 0

    @property
    def _newest(self) -> _Batch:
        return next(reversed(self._in_flight.values()))

    def _stalls_in_s(self) -> float:
        return self._newest.since + STALL_S - monotonic()

    def _next_leader(self) -> _Sleeper:
        """The thread of the first call, or a worker. Raises RuntimeError where none can start."""
        first = next(iter(self._waiting))
        if isinstance(first, _ThreadCall) and self._can_lead(first):
            return first.thread
        if self._idle:
            return self._idle.pop()
        worker = _BatchThread(self._work)
        # Added first, since a signal may interrupt this thread as soon as the worker runs.
        self._workers.add(worker)
        try:
            worker.thread.start()
        except RuntimeError:
            self._workers.discard(worker)
            raise
        return worker

    def _can_lead(self, call: _ThreadCall[Request, Outcome]) -> bool:
        return call.can_lead and call.thread not in self._in_flight

    def _end(self, me: _Leader) -> None:
        with self._lock:
            if self._in_flight.pop(me, None) is not None:
                if isinstance(me, _BatchThread):
                    self._idle.append(me)
                self._begin_next()

    # ---- In the threads of callers, and of workers ---------------------------------------------

    def _wait(self, call: _ThreadCall[Request, Outcome]) -> Outcome:
        try:
            self.submit([call])
            self._sleep_until_done(call)
        except BaseException:
            self.abandon(call)
            raise
        return call.value()

    def _sleep_until_done(self, call: _ThreadCall[Request, Outcome]) -> None:
        while True:
            # In this order: a thread that was woken to lead has to, even if its call is done.
            done = call.phase is CallPhase.DONE
            if call.thread in self._in_flight:
                self._lead(call.thread)
            elif done:
                return
            elif not call.thread.sleep(self._patience_s(call)):
                self.push()

    def _patience_s(self, call: _ThreadCall[Request, Outcome]) -> float:
        """How long to sleep before looking whether what the call waits for has stalled."""
        with self._lock:
            if call.phase is not CallPhase.WAITING:
                return -1
            if len(self._in_flight) >= MOST_BATCHES:
                return _FULL_S
            return max(0.0, self._stalls_in_s()) if self._in_flight else 0.0

    def _work(self, worker: _BatchThread) -> None:
        while self._is_needed(worker):
            if worker in self._in_flight:
                try:
                    self._lead(worker)
                except BaseException:  # noqa: BLE001 - its callers get it; others need the thread.
                    _log.exception(
                        "a batch of the ledger was aborted: %(reason)s; its callers get the error",
                        extra={"event": "batch_aborted"},
                    )

    def _dismissed_workers(self) -> list[_BatchThread]:
        with self._lock:
            for worker in self._workers:
                worker.dismissed = True
                worker.wake()
            return list(self._workers)

    def _is_needed(self, worker: _BatchThread) -> bool:
        woken = worker.sleep(0 if worker.dismissed else _IDLE_S)
        with self._lock:
            if worker in self._in_flight or (woken and not worker.dismissed):
                return True
            self._workers.discard(worker)
            if worker in self._idle:
                self._idle.remove(worker)
            return False

    # ---- Carrying out --------------------------------------------------------------------------

    def _lead(self, me: _Sleeper) -> None:
        try:
            with self._lock:
                batch = self._take()
                self._in_flight[me].calls = len(batch)
            if batch:
                self._carry_out_together(batch)
        finally:
            self._end(me)

    def _take(self) -> list[Call[Request, Outcome]]:
        batch = list(islice(self._waiting, MOST_CALLS))
        for call in batch:
            del self._waiting[call]
            call.phase = CallPhase.TAKEN
        return batch

    def _carry_out_together(self, batch: Sequence[Call[Request, Outcome]]) -> None:
        try:
            results = self._carry_out_each([call.request for call in batch])
        except BaseException as error:
            self._break_off(batch, error)
            raise
        self._finish(batch, results)

    def _break_off(self, batch: Sequence[Call[Request, Outcome]], error: BaseException) -> None:
        # One for each: raising an exception changes its traceback.
        errors = [StoreError(f"the batch was broken off: {error!r}") for _ in batch]
        self._finish(batch, errors)

    def _finish(
        self,
        batch: Sequence[Call[Request, Outcome]],
        results: Sequence[Outcome | Exception],
    ) -> None:
        posts: Posts = {}
        with self._lock:
            for call, result in zip(batch, results, strict=True):
                if call.phase is CallPhase.GONE:
                    self.give_back([result])
                else:
                    call.result = result
                    call.phase = CallPhase.DONE
                    call.tell(posts)
        for mailbox, calls in posts.items():
            if not mailbox.post(calls):
                for call in calls:
                    self.abandon(call)


# ---- The process -------------------------------------------------------------------------------

_batchers: "weakref.WeakSet[GroupCommit[Any, Any]]" = weakref.WeakSet()


def _close_all() -> None:
    """Give back claims that were granted to cancelled tasks, before the process ends."""
    for batcher in _batchers:
        batcher.close()


atexit.register(_close_all)
