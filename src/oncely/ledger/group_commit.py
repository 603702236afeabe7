"""Group commit: single calls that wait at the same time go to the store together.

A call is carried out at once, in its caller's own thread, as long as the store has room for it.
Else it waits in a queue, and whatever ends next wakes a worker, a thread of the ledger's own, which
takes all that waits as one batch. The calls of tasks always go to a worker.

A signal handler or a finalizer interrupts a caller anywhere, may itself call, and may raise. So no
caller takes a lock, and what others depend on is one method of C, carried out wholly or not at all:
of a set, a dict, a SimpleQueue or a Lock; but of nothing else in `threading`, which is Python.
"""

import threading
import weakref
from _thread import start_new_thread
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, cast

from oncely._util.at_exit import at_exit
from oncely._util.clock import monotonic
from oncely._util.event_log import EventLog
from oncely._util.forking import afresh_in_children
from oncely.core.commands import Command, Outcome
from oncely.core.errors import StoreError
from oncely.ledger.arguments import to_give_back
from oncely.ledger.settle import Settler

_log = EventLog(__name__)

MOST_CALLS = 1_000  # In one batch.
MOST_BATCHES = 8  # In flight at once.
STALL_S = 0.05
"""Who has waited so long does not wait for room any more: what is in flight may have stalled."""
_PATIENCE_S = 5.0
"""How long `close`, and the end of the process, wait for the workers' batches."""


class Call:
    """A command on its way; `tell` is called with it when it is done, in `loop` if there is one."""

    result: Outcome | Exception | None = None
    is_abandoned = False

    def __init__(
        self, command: Command, tell: "Callable[[Call], object]", loop: Any = None
    ) -> None:
        self.command, self.tell, self.loop = command, tell, loop

    def outcome(self) -> Outcome:
        """The outcome; an error is raised."""
        if isinstance(self.result, Exception):
            raise self.result
        return cast(Outcome, self.result)


class GroupCommit:
    """Carries out the calls of many threads and tasks, together those that wait together.

    The store works on `at_once` batches side by side; where one stalls, another begins. What is
    granted to a caller that has gone is given back. A forked child begins afresh.
    """

    def __init__(self, settler: Settler, at_once: int) -> None:
        self._settler, self._at_once = settler, at_once
        self.stall_s = STALL_S
        self.start_afresh()
        afresh_in_children(self)
        _all.add(self)

    def start_afresh(self) -> None:
        """Forget every call and every thread: in a forked child they are the parent's."""
        self._queue: SimpleQueue[Call] = SimpleQueue()
        self._in_flight: set[object] = set()
        """A worker for its batch; something else for each caller that carries out its own call."""
        self._workers: dict[threading.Thread, None] = {}
        self._wakes: SimpleQueue[bool] = SimpleQueue()
        """Each lets one worker look for calls, and says whether it needs room for them."""
        self._is_closing = False
        self.asked: dict[Any, list[Any]] = {}
        """What the tasks of an event loop have asked for in this turn of it."""

    def call(self, command: Command) -> Outcome:
        """Carry out `command`; return its outcome, or raise its error."""
        in_flight = self._in_flight
        if len(in_flight) >= self._at_once or not self._queue.empty():
            return self._wait_for(command)
        me = object()
        try:
            in_flight.add(me)
            return self._settler.settle([command])[0]
        finally:
            in_flight.discard(me)
            if not self._queue.empty():
                self._wake()

    def _wait_for(self, command: Command) -> Outcome:
        if threading.current_thread() in self._workers:
            # A finalizer calls: it would wait for the very thread that it interrupts.
            return self._settler.settle([command])[0]
        done = threading.Lock()
        done.acquire()
        call = Call(command, lambda _: done.release())
        try:
            self.put(call)
            while not done.acquire(timeout=self.stall_s):
                self.hurry()
            outcome = call.outcome()
        except BaseException:
            self.abandon(call)
            raise
        return outcome  # Not above: a signal that comes between a call and a `return` is outside.

    def put(self, *calls: Call) -> None:
        """Let a worker carry them out as soon as there is room."""
        for call in calls:
            self._queue.put(call)
        self._wake()

    def hurry(self) -> None:
        """Let a worker carry out now what waits: somebody has waited for `stall_s`."""
        self._wake(needs_room=False)

    def _wake(self, *, needs_room: bool = True) -> None:
        if self._queue.empty() or (needs_room and not self._has_room()):
            return
        self._wakes.put(needs_room)
        if not self._workers.keys() <= self._in_flight or len(self._workers) >= MOST_BATCHES:
            return
        worker = threading.Thread(target=self._work, name="oncely-batches", daemon=True)
        try:
            self._workers[worker] = None
            # In a thread of its own, since `start` waits for the worker, with a lock of Python.
            start_new_thread(self._start, (worker,))
        except BaseException as error:
            self._break_off(worker, error)
            if not isinstance(error, RuntimeError):
                raise

    def _has_room(self) -> bool:
        return len(self._in_flight) < self._at_once

    def _start(self, worker: threading.Thread) -> None:
        try:
            worker.start()
        except RuntimeError as error:
            self._break_off(worker, error)

    def _break_off(self, worker: threading.Thread, error: BaseException) -> None:
        self._workers.pop(worker, None)
        if isinstance(error, RuntimeError) and not self._workers:
            calls = self._taken()
            self._tell(calls, [StoreError(f"the ledger needs a thread: {error}") for _ in calls])

    def abandon(self, call: Call) -> None:
        """Nobody waits for `call` any more: it is not sent, or else its claim is given back."""
        call.is_abandoned = True
        # Its worker may see both in this moment, too: giving back twice does no harm.
        if call.result is not None:
            self.give_back([call.result])

    def give_back(self, results: Iterable[Outcome | Exception]) -> None:
        """Let a worker give back the claims among these, whose callers have gone."""
        for result in results:
            if not isinstance(result, Exception) and (command := to_give_back(result)):
                self.put(Call(command, _log_error))

    def end(self) -> None:
        """Let the workers end as soon as nothing waits."""
        self._is_closing = True
        self._wakes.put(item=False)

    def close(self) -> None:
        """End the workers, and wait for them, but not for ever. A later call starts others."""
        deadline = monotonic() + _PATIENCE_S
        while (workers := [*self._workers]) and monotonic() < deadline:
            self.end()
            with suppress(RuntimeError):  # It has not started yet, or is this thread.
                workers[0].join(0.05)
        self._is_closing = False

    def _work(self) -> None:
        me = threading.current_thread()
        self._workers[me] = None
        try:
            while not self._is_closing or not self._queue.empty():
                if not self._wakes.get() or self._has_room():
                    self._carry_out_what_waits(me)
        finally:
            self._workers.pop(me, None)
            if self._is_closing:
                self._wakes.put(item=False)  # For the others.
            self._wake()  # Whoever put something meanwhile may have counted on this worker.

    def _carry_out_what_waits(self, me: threading.Thread) -> None:
        batch: Sequence[Call] = []
        results: Sequence[Outcome | Exception] = []
        try:
            self._in_flight.add(me)
            if batch := self._taken():
                results = self._settler.settle_each([call.command for call in batch])
        except BaseException as error:  # noqa: BLE001 - the callers get it; others need the worker.
            # One for each: raising an exception changes its traceback.
            results = [StoreError(f"the batch was broken off: {error!r}") for _ in batch]
            _log.exception(
                "a batch of the ledger was aborted: %(reason)s; its callers get the error",
                extra={"event": "batch_aborted"},
            )
        self._tell(batch, results)
        # After that: those who were told ask again before the next batch begins, and are in it.
        self._in_flight.discard(me)
        self._wake()

    def _taken(self) -> list[Call]:
        """At most so many of those that wait as fit into a batch; without those of nobody."""
        calls: list[Call] = []
        with suppress(Empty):
            while len(calls) < MOST_CALLS:
                calls.append(self._queue.get_nowait())
        return [call for call in calls if not call.is_abandoned]

    def _tell(self, batch: Sequence[Call], results: Sequence[Outcome | Exception]) -> None:
        in_loops: dict[Any, list[Call]] = {}
        for call, result in zip(batch, results, strict=True):
            call.result = result
            if call.is_abandoned:
                self.give_back([result])
            elif call.loop is None:
                call.tell(call)
            else:
                # Together: who is told first would ask again alone.
                in_loops.setdefault(call.loop, []).append(call)
        for loop, done in in_loops.items():
            try:
                loop.call_soon_threadsafe(_tell_all, done)
            except RuntimeError:  # It is closed.
                for call in done:
                    self.abandon(call)


def _tell_all(calls: Iterable[Call]) -> None:
    for call in calls:
        call.tell(call)


def _log_error(call: Call) -> None:
    if isinstance(call.result, Exception):
        _log.warning(
            "a claim that nobody waits for could not be released: %(reason)s; it runs out with "
            "its lease",
            exc_info=call.result,
            extra={"event": "release_failed"},
        )


_all: "weakref.WeakSet[GroupCommit]" = weakref.WeakSet()


@at_exit
def _close_all() -> None:
    """Give back claims that were granted to cancelled tasks, before the process ends."""
    for group_commit in [*_all]:
        group_commit.close()
