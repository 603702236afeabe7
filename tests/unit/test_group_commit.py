"""Group commit: which calls go together, who carries them out, what becomes of each."""

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain

import pytest
from tests.conditions import LIMIT_S
from tests.logs import events_in

from oncely.core.errors import StoreError
from oncely.engine import group_commit
from oncely.engine.group_commit import Call, CallPhase, GroupCommit, Posts
from oncely.testing import ManualClock

Outcome = tuple[str, str]


class Gate:
    """Where a batch stands still until the test lets it go on."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()

    def pass_through(self) -> None:
        self.reached.set()
        assert self.opened.wait(LIMIT_S)


class Work:
    """Carries out requests, which are words, and notes what came together in which thread."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.threads: list[threading.Thread] = []
        self.gates: dict[str, Gate] = {}
        self.meddle: Callable[[Sequence[str]], object] = lambda requests: None
        self.undone = threading.Event()

    def carry_out(self, requests: Sequence[str]) -> list[Outcome]:
        self.batches.append(sorted(requests))
        self.threads.append(threading.current_thread())
        self.meddle(requests)
        for request in requests:
            if request in self.gates:
                self.gates[request].pass_through()
            if request.startswith("undo"):
                self.undone.set()
        return [("done", request) for request in requests]

    def carry_out_each(self, requests: Sequence[str]) -> list[Outcome | Exception]:
        return [*self.carry_out(requests)]

    def gate(self, request: str) -> Gate:
        return self.gates.setdefault(request, Gate())


def undo(outcome: Outcome) -> str | None:
    """Only what takes something has to be undone."""
    return f"undo {outcome[1]}" if outcome[1].startswith("take") else None


class WatchedBatcher(GroupCommit[str, Outcome]):
    """Tells of each call that waits, and of each look whether a batch has stalled."""

    def __init__(self, work: Work, at_once: int = 1) -> None:
        self.submitted = threading.Semaphore(0)
        self.pushed = threading.Semaphore(0)
        super().__init__(work.carry_out, work.carry_out_each, undo, at_once)

    def submit(self, calls: Iterable[Call[str, Outcome]]) -> bool:
        given = list(calls)
        wanted = super().submit(given)
        for _ in given:
            self.submitted.release()
        return wanted

    def push(self) -> bool:
        wanted = super().push()
        self.pushed.release()
        return wanted

    def await_waiting(self, calls: int) -> None:
        for _ in range(calls):
            assert self.submitted.acquire(timeout=LIMIT_S)


class NotedCall(Call[str, Outcome]):
    """A call for which no thread waits, as a task's."""

    __slots__ = ("done",)

    def __init__(self, request: str) -> None:
        super().__init__(request)
        self.done = threading.Event()

    def tell(self, _: Posts) -> None:
        self.done.set()

    def wait(self) -> Outcome:
        assert self.done.wait(LIMIT_S)
        return self.value()


class Callers:
    """Threads that call, each once."""

    def __init__(self, batcher: WatchedBatcher, pool: ThreadPoolExecutor) -> None:
        self._group_commit = batcher
        self._pool = pool

    def begin(self, request: str) -> "Future[Outcome]":
        return self._pool.submit(self._group_commit.call, request)

    def stall(self, request: str, gate: Gate) -> "Future[Outcome]":
        """One whose batch stands at its gate when this returns."""
        future = self.begin(request)
        assert gate.reached.wait(LIMIT_S)
        return future

    def wait(self, *requests: str) -> "list[Future[Outcome]]":
        """Those that wait behind what is in flight when this returns, in this order."""
        futures = []
        for request in requests:
            futures.append(self.begin(request))
            self._group_commit.await_waiting(1)
        return futures


@pytest.fixture(autouse=True)
def _nothing_stalls(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is, no batch is taken for stalled unless the test wants it."""
    monkeypatch.setattr(group_commit, "STALL_S", LIMIT_S)


@pytest.fixture
def stalls(_nothing_stalls: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch is taken for stalled soon."""
    monkeypatch.setattr(group_commit, "STALL_S", 0.01)


@pytest.fixture
def monotonic(stalls: None, monkeypatch: pytest.MonkeyPatch) -> ManualClock:
    """The clock that tells what has stalled, moved by hand."""
    by_hand = ManualClock(1_000.0)
    monkeypatch.setattr(group_commit, "monotonic", by_hand)
    return by_hand


@pytest.fixture
def work() -> Iterator[Work]:
    work = Work()
    yield work
    for gate in work.gates.values():
        gate.opened.set()


@pytest.fixture
def batcher(work: Work, request: pytest.FixtureRequest) -> Iterator[WatchedBatcher]:
    """One that has one batch in flight at a time; tests say how many else."""
    batcher = WatchedBatcher(work, getattr(request, "param", 1))
    yield batcher
    batcher.close()


@pytest.fixture
def callers(batcher: WatchedBatcher, work: Work) -> Iterator[Callers]:
    with ThreadPoolExecutor(16) as pool:
        yield Callers(batcher, pool)
        for gate in work.gates.values():
            gate.opened.set()


def results(futures: "Iterable[Future[Outcome]]") -> list[Outcome]:
    return [future.result(LIMIT_S) for future in futures]


def is_worker(thread: threading.Thread) -> bool:
    return thread.name == "oncely-batches"


@pytest.fixture
def new_workers() -> Callable[[], list[threading.Thread]]:
    """Gives the workers that run and that no earlier test has left."""
    before = {*filter(is_worker, threading.enumerate())}
    return lambda: [*({*filter(is_worker, threading.enumerate())} - before)]


# ---- Which calls go together -------------------------------------------------------------------


def test_alone(
    batcher: WatchedBatcher, work: Work, new_workers: Callable[[], list[threading.Thread]]
) -> None:
    """A call that finds nobody at work is carried out alone and in its own thread."""
    assert [batcher.call("a"), batcher.call("b")] == [("done", "a"), ("done", "b")]
    assert work.batches == [["a"], ["b"]]
    assert work.threads == [threading.current_thread()] * 2
    assert new_workers() == []


def test_together(work: Work, callers: Callers) -> None:
    """Calls that come while one is carried out go together when it has ended."""
    gate = work.gate("first")
    futures = [callers.stall("first", gate), *callers.wait("a", "b", "c")]
    gate.opened.set()
    assert results(futures) == [("done", request) for request in ("first", "a", "b", "c")]
    assert work.batches == [["first"], ["a", "b", "c"]]


def test_first_of_those_waiting_leads(work: Work, callers: Callers) -> None:
    """The next batch is carried out in the thread of the call that waits longest."""
    gate = work.gate("first")
    leaders: list[int | None] = []

    def lead() -> Outcome:
        leaders.append(threading.get_ident())
        return callers._group_commit.call("a")

    futures = [callers.stall("first", gate), callers._pool.submit(lead)]
    callers._group_commit.await_waiting(1)
    futures += callers.wait("b", "c")
    gate.opened.set()
    results(futures)
    assert work.threads[1].ident == leaders[0]


def test_most_calls_in_a_batch(
    work: Work, callers: Callers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch holds so many calls at most; those beyond go with the next, in their order."""
    monkeypatch.setattr(group_commit, "MOST_CALLS", 3)
    gate = work.gate("first")
    futures = [callers.stall("first", gate), *callers.wait(*"abcdefg")]
    gate.opened.set()
    results(futures)
    assert work.batches == [["first"], ["a", "b", "c"], ["d", "e", "f"], ["g"]]


def test_main_thread_leads_nobody(work: Work, callers: Callers, batcher: WatchedBatcher) -> None:
    """The main thread carries out no call of others: what signal handlers raise would end it."""
    gate = work.gate("first")
    futures = [callers.stall("first", gate)]

    def add_another() -> None:
        batcher.await_waiting(1)
        futures.extend(callers.wait("another"))
        gate.opened.set()

    adding = callers._pool.submit(add_another)
    assert batcher.call("main") == ("done", "main")
    adding.result(LIMIT_S)
    results(futures)
    assert work.batches[1] == ["another", "main"]
    assert is_worker(work.threads[1])


def test_calls_of_no_thread(work: Work, batcher: WatchedBatcher) -> None:
    """What no thread waits for is carried out by a worker, together."""
    calls = [NotedCall(str(n)) for n in range(5)]
    batcher.submit(calls)
    assert [call.wait() for call in calls] == [("done", str(n)) for n in range(5)]
    assert work.batches == [["0", "1", "2", "3", "4"]]
    assert is_worker(work.threads[0])


def test_threads_and_others_together(work: Work, callers: Callers, batcher: WatchedBatcher) -> None:
    """Calls of threads and of no thread share a batch, whoever was first."""
    for first in ("thread", "other"):
        gate = work.gate(f"before {first}")
        futures = [callers.stall(f"before {first}", gate)]
        other = NotedCall("other")
        if first == "thread":
            futures += callers.wait("thread")
        batcher.submit([other])
        batcher.await_waiting(1)
        if first == "other":
            futures += callers.wait("thread")
        gate.opened.set()
        results(futures)
        other.wait()
    assert work.batches[1::2] == [["other", "thread"]] * 2
    assert [is_worker(thread) for thread in work.threads[1::2]] == [False, True]


def test_many_threads(batcher: WatchedBatcher, work: Work) -> None:
    """Threads that call again and again get each their own outcome, and each call is sent once."""
    requests = [[f"{thread}-{n}" for n in range(100)] for thread in range(8)]
    with ThreadPoolExecutor(8) as pool:
        got = pool.map(lambda mine: [batcher.call(request) for request in mine], requests)
    assert [[outcome[1] for outcome in mine] for mine in got] == requests
    assert sorted(chain(*work.batches)) == sorted(chain(*requests))


# ---- Stalls ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("stalls")
@pytest.mark.parametrize("of_main", [True, False], ids=["main thread", "another"])
def test_stalled_batch(
    work: Work, callers: Callers, batcher: WatchedBatcher, of_main: bool
) -> None:
    """Calls behind a batch that hangs go on beside it, with those that wait."""
    stalled = callers.stall("first", work.gate("first"))
    second = batcher.call("second") if of_main else callers.begin("second").result(LIMIT_S)
    assert second == ("done", "second")
    assert not stalled.done()


@pytest.mark.usefixtures("stalls")
def test_beside_what_has_stalled_nobody_waits(
    work: Work, callers: Callers, batcher: WatchedBatcher
) -> None:
    """While a batch hangs, calls do not wait for it again and again: they begin at once."""
    callers.stall("first", work.gate("first"))
    callers.begin("second").result(LIMIT_S)
    for _ in range(3):
        batcher.call("third")
        assert work.threads[-1] is threading.current_thread()


def test_those_behind_a_stall_are_taken_along(
    work: Work, callers: Callers, batcher: WatchedBatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who comes when a batch has stalled does not go before those that wait."""
    callers.stall("first", work.gate("first"))
    [waiting] = callers.wait("waiting")
    monkeypatch.setattr(group_commit, "STALL_S", 0.0)
    assert batcher.call("new") == ("done", "new")
    assert waiting.result(LIMIT_S) == ("done", "waiting")
    assert work.batches == [["first"], ["new", "waiting"]]


@pytest.mark.parametrize("batcher", [2], indirect=True)
def test_side_by_side(work: Work, callers: Callers, batcher: WatchedBatcher) -> None:
    """Where the store works on two batches at once, a second begins beside the first when half as
    many wait as are in that, and a third when one has ended.
    """
    first, second, many = (work.gate(name) for name in ("first", "second", "a"))
    futures = [callers.stall("first", first), callers.stall("second", second)]
    futures += callers.wait("a", "b", "c")
    assert work.batches == [["first"], ["second"]]
    first.opened.set()
    assert many.reached.wait(LIMIT_S)
    second.opened.set()
    results(futures[:2])
    futures += callers.wait("d")
    assert work.batches[2:] == [["a", "b", "c"]]
    futures += callers.wait("e")
    results(futures[-2:])
    assert work.batches[3:] == [["d", "e"]]
    many.opened.set()
    results(futures)
    assert batcher.call("after") == ("done", "after")


@pytest.mark.usefixtures("monotonic")
def test_waiting_for_a_batch_in_flight(
    work: Work, callers: Callers, batcher: WatchedBatcher
) -> None:
    """Whose call is in a batch in flight sleeps until that is over, and looks at nothing."""
    first, second = work.gate("first"), work.gate("a")
    futures = [callers.stall("first", first), *callers.wait("a", "b")]
    first.opened.set()
    assert second.reached.wait(LIMIT_S)
    while batcher.pushed.acquire(blocking=False):
        pass
    # Who was about to look when the batch began has looked then, and sleeps on.
    assert not all(batcher.pushed.acquire(timeout=0.05) for _ in range(3))
    second.opened.set()
    results(futures)


@pytest.mark.parametrize("at_once", [1, 2])
def test_slow_leader(
    work: Work,
    callers: Callers,
    batcher: WatchedBatcher,
    monotonic: ManualClock,
    monkeypatch: pytest.MonkeyPatch,
    at_once: int,
) -> None:
    """Where a thread that was woken to lead does not come to it, a worker carries out its call; but
    not before the time of a stall, since that thread takes all who wait.
    """
    gate, slow = work.gate("first"), Gate()
    asleep: list[group_commit._Sleeper] = []
    sleep = group_commit._Sleeper.sleep

    def sleep_on(sleeper: group_commit._Sleeper, at_most_s: float) -> bool:
        asleep.append(sleeper)
        if sleeper is asleep[0]:
            sleep(sleeper, -1)
            slow.pass_through()
            return True
        return sleep(sleeper, at_most_s)

    monkeypatch.setattr(group_commit._Sleeper, "sleep", sleep_on)
    futures = [callers.stall("first", gate), *callers.wait("slow")]
    gate.opened.set()
    assert slow.reached.wait(LIMIT_S)
    monkeypatch.setattr(batcher, "_at_once", at_once)
    futures += callers.wait("other")
    assert (len(batcher._in_flight), work.batches) == (1, [["first"]])
    monotonic.advance(1)
    assert futures[2].result(LIMIT_S) == ("done", "other")
    slow.opened.set()
    assert results(futures[:2]) == [("done", "first"), ("done", "slow")]
    assert work.batches == [["first"], ["other", "slow"]]
    assert is_worker(work.threads[1])


@pytest.mark.usefixtures("stalls")
def test_most_batches_in_flight(
    work: Work, callers: Callers, batcher: WatchedBatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No more than so many batches are in flight; calls wait until one of them ends."""
    monkeypatch.setattr(group_commit, "MOST_BATCHES", 2)
    monkeypatch.setattr(group_commit, "STALL_S", 0.001)
    monkeypatch.setattr(group_commit, "_FULL_S", 0.005)
    for request in ("first", "second"):
        callers.stall(request, work.gate(request))
    while batcher.submitted.acquire(blocking=False):
        pass
    [third] = callers.wait("third")
    for _ in range(5):
        assert batcher.pushed.acquire(timeout=LIMIT_S)
    assert work.batches == [["first"], ["second"]]
    work.gate("second").opened.set()
    assert third.result(LIMIT_S) == ("done", "third")


@pytest.mark.usefixtures("monotonic")
def test_lost_wake(work: Work, callers: Callers, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that should lead and is not woken finds out by itself."""
    gate = work.gate("first")
    futures = [callers.stall("first", gate), *callers.wait("second")]
    with monkeypatch.context() as patched:
        patched.setattr(group_commit._Sleeper, "wake", lambda sleeper: None)
        gate.opened.set()
        assert results(futures) == [("done", "first"), ("done", "second")]


@pytest.mark.usefixtures("stalls")
def test_call_within_a_call(work: Work, batcher: WatchedBatcher) -> None:
    """A call made while its own thread carries out another (by a finalizer, say) is answered."""

    def call_again(requests: Sequence[str]) -> None:
        if requests == ["outer"]:
            assert batcher.call("inner") == ("done", "inner")

    work.meddle = call_again
    assert batcher.call("outer") == ("done", "outer")


def test_call_within_the_lock(batcher: WatchedBatcher) -> None:
    """A finalizer that calls may run at any line, also where the batcher holds its lock."""
    with batcher._lock:
        assert batcher.call("a") == ("done", "a")


# ---- Errors ------------------------------------------------------------------------------------


def test_error_of_one_alone(batcher: WatchedBatcher, work: Work) -> None:
    """The error of a call that is alone is raised as it was."""
    error = StoreError("no")

    def fail(requests: Sequence[str]) -> None:
        raise error

    work.meddle = fail
    with pytest.raises(StoreError) as caught:
        batcher.call("a")
    assert caught.value is error
    work.meddle = lambda requests: None
    batcher.call("b")


def test_error_in_a_batch(work: Work, callers: Callers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a batch each caller gets its own outcome, or its own error."""

    def fail_bad(requests: Sequence[str]) -> list[Outcome | Exception]:
        return [StoreError(r) if r == "bad" else ("done", r) for r in requests]

    monkeypatch.setattr(callers._group_commit, "_carry_out_each", fail_bad)
    gate = work.gate("first")
    first = callers.stall("first", gate)
    good, bad, fine = callers.wait("good", "bad", "fine")
    gate.opened.set()
    assert results([first, good, fine]) == [("done", r) for r in ("first", "good", "fine")]
    with pytest.raises(StoreError, match="bad"):
        bad.result(LIMIT_S)


def test_leader_is_broken_off(work: Work, callers: Callers, batcher: WatchedBatcher) -> None:
    """Where the leading thread is ended, the others are told, each by an error of its own."""
    gate = work.gate("first")
    first = callers.stall("first", gate)
    leader, *others = callers.wait("leader", "a", "b")

    def end(requests: Sequence[str]) -> None:
        raise SystemExit(3)

    work.meddle = end
    gate.opened.set()
    first.result(LIMIT_S)
    with pytest.raises(SystemExit):
        leader.result(LIMIT_S)
    errors = [other.exception(LIMIT_S) for other in others]
    assert all(isinstance(error, StoreError) for error in errors)
    assert errors[0] is not errors[1]
    work.meddle = lambda requests: None
    assert batcher.call("after") == ("done", "after")


def test_worker_is_broken_off(
    work: Work, batcher: WatchedBatcher, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker in which a batch is broken off tells its callers, and carries out the next."""

    def end(requests: Sequence[str]) -> None:
        raise SystemExit(3)

    work.meddle = end
    batcher.submit([call := NotedCall("a")])
    with pytest.raises(StoreError, match="SystemExit"):
        call.wait()
    work.meddle = lambda requests: None
    batcher.submit([call := NotedCall("b")])
    assert call.wait() == ("done", "b")
    assert "batch_aborted" in events_in(caplog)
    assert work.threads[0] is work.threads[1]


def test_no_thread_can_be_started(batcher: WatchedBatcher, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a worker is needed and none can be started, those who wait are told."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        batcher.submit([call := NotedCall("a")])
        with pytest.raises(StoreError, match="can't start new thread"):
            call.wait()
        assert batcher.call("b") == ("done", "b")
    batcher.submit([call := NotedCall("c")])
    assert call.wait() == ("done", "c")


# ---- Callers who go away -----------------------------------------------------------------------


def test_abandoned_while_it_waits(work: Work, callers: Callers, batcher: WatchedBatcher) -> None:
    """What nobody waits for any more is not sent."""
    gate = work.gate("first")
    first = callers.stall("first", gate)
    calls = [NotedCall("take a"), NotedCall("b")]
    batcher.submit(calls)
    batcher.abandon(calls[0])
    gate.opened.set()
    first.result(LIMIT_S)
    calls[1].wait()
    assert work.batches == [["first"], ["b"]]


def test_abandoned_before_it_is_handed_over(work: Work, batcher: WatchedBatcher) -> None:
    """What nobody waits for any more when it is handed over is not sent."""
    calls = [NotedCall("take a"), NotedCall("b")]
    batcher.abandon(calls[0])
    batcher.submit(calls)
    calls[1].wait()
    assert work.batches == [["b"]]


def test_abandoned_in_flight(work: Work, batcher: WatchedBatcher) -> None:
    """What comes of a call that was abandoned in flight is undone, by a worker."""
    gate = work.gate("take a")
    calls = [NotedCall("take a"), NotedCall("b")]
    batcher.submit(calls)
    assert gate.reached.wait(LIMIT_S)
    batcher.abandon(calls[0])
    gate.opened.set()
    assert work.undone.wait(LIMIT_S)
    assert calls[1].wait() == ("done", "b")
    assert not calls[0].done.is_set()
    assert work.batches == [["b", "take a"], ["undo take a"]]


def test_abandoned_when_it_is_done(work: Work, batcher: WatchedBatcher) -> None:
    """What came of a call is undone also where its caller went away just then; but only once."""
    call = NotedCall("take a")
    batcher.submit([call])
    call.wait()
    batcher.abandon(call)
    batcher.abandon(call)
    assert work.undone.wait(LIMIT_S)
    batcher.close()
    assert work.batches == [["take a"], ["undo take a"]]


def test_nothing_to_undo(work: Work, batcher: WatchedBatcher) -> None:
    """What takes nothing is not undone, nor is an error."""
    calls = [NotedCall("a"), NotedCall("b")]
    for call in calls:
        batcher.submit([call])
        call.wait()
    calls[1].result = StoreError("no")
    for call in calls:
        batcher.abandon(call)
    batcher.close()
    assert work.batches == [["a"], ["b"]]


def test_undoing_fails(
    work: Work,
    batcher: WatchedBatcher,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Where undoing fails, that is logged, and nothing else happens."""
    call = NotedCall("take a")
    batcher.submit([call])
    call.wait()
    monkeypatch.setattr(batcher, "_carry_out_each", lambda requests: [StoreError("away")])
    batcher.abandon(call)
    batcher.close()
    assert "release_failed" in events_in(caplog)


class Interruption:
    """Interrupts the main thread once, when `before` has returned in another."""

    def __init__(self, before: Callable[[], object]) -> None:
        self._before = before
        self._thread = threading.Thread(target=self._interrupt)
        self._interrupted = threading.Event()

    def _interrupt(self) -> None:
        self._before()
        main = threading.main_thread().ident
        assert main is not None
        # Again, since a signal just before a thread falls asleep does not wake it.
        while not self._interrupted.wait(0.01):
            signal.pthread_kill(main, signal.SIGUSR1)

    def _handle(self, *_: object) -> None:
        if not self._interrupted.is_set():
            self._interrupted.set()
            raise KeyboardInterrupt

    def __enter__(self) -> None:
        self._former = signal.signal(signal.SIGUSR1, self._handle)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._interrupted.set()
        self._thread.join(LIMIT_S)
        signal.signal(signal.SIGUSR1, self._former)


def test_interrupted_while_it_waits(work: Work, callers: Callers, batcher: WatchedBatcher) -> None:
    """A thread that is interrupted while its call waits has asked for nothing."""
    gate = work.gate("first")
    first = callers.stall("first", gate)
    with Interruption(lambda: batcher.await_waiting(1)), pytest.raises(KeyboardInterrupt):
        batcher.call("take a")
    gate.opened.set()
    first.result(LIMIT_S)
    batcher.call("after")
    assert work.batches == [["first"], ["after"]]


def test_interrupted_in_flight(work: Work, callers: Callers, batcher: WatchedBatcher) -> None:
    """A thread that is interrupted while others carry out its call keeps nothing of it."""
    first, taken = work.gate("first"), work.gate("take a")
    callers.stall("first", first)

    def until_taken() -> None:
        batcher.await_waiting(1)
        first.opened.set()
        assert taken.reached.wait(LIMIT_S)

    with Interruption(until_taken), pytest.raises(KeyboardInterrupt):
        batcher.call("take a")
    taken.opened.set()
    assert work.undone.wait(LIMIT_S)
    assert work.batches == [["first"], ["take a"], ["undo take a"]]


def test_interrupted_alone(work: Work, batcher: WatchedBatcher) -> None:
    """An interrupt while a thread carries out its own call leaves nothing behind in the batcher."""

    def interrupt(requests: Sequence[str]) -> None:
        raise KeyboardInterrupt

    work.meddle = interrupt
    with pytest.raises(KeyboardInterrupt):
        batcher.call("a")
    work.meddle = lambda requests: None
    batcher.call("b")
    assert work.threads[-1] is threading.current_thread()


# ---- Threads and processes ---------------------------------------------------------------------


def test_idle_workers_end(
    work: Work, batcher: WatchedBatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker whom nobody needs ends, and another starts when one is needed."""
    monkeypatch.setattr(group_commit, "_IDLE_S", 0.01)
    for request in ("a", "b"):
        batcher.submit([call := NotedCall(request)])
        call.wait()
        work.threads[-1].join(LIMIT_S)
        assert not work.threads[-1].is_alive()
    assert work.batches == [["a"], ["b"]]


def test_workers_are_used_again(work: Work, batcher: WatchedBatcher) -> None:
    """A worker that has ended a batch carries out the next."""
    for n in range(5):
        batcher.submit([call := NotedCall(str(n))])
        call.wait()
    assert len(set(work.threads)) == 1


def test_close(work: Work, batcher: WatchedBatcher) -> None:
    """Closing ends the workers; a later call starts them again."""
    for request in ("a", "b"):
        batcher.submit([call := NotedCall(request)])
        call.wait()
        batcher.close()
        assert not work.threads[-1].is_alive()
    batcher.close()


def test_close_waits_for_what_is_in_flight(work: Work, batcher: WatchedBatcher) -> None:
    """Closing waits for what workers are at, and for what they have to undo."""
    gate = work.gate("take a")
    batcher.submit([call := NotedCall("take a")])
    assert gate.reached.wait(LIMIT_S)
    batcher.abandon(call)
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(batcher.close)
        gate.opened.set()
        closing.result(LIMIT_S)
    assert work.undone.is_set()
    assert not work.threads[0].is_alive()


@pytest.mark.usefixtures("stalls")
def test_close_waits_for_what_is_undone_beside(
    work: Work, batcher: WatchedBatcher, new_workers: Callable[[], list[threading.Thread]]
) -> None:
    """Closing waits also for a worker that was started only for what had to be undone."""
    taking, undoing = work.gate("take a"), work.gate("undo take a")
    batcher.submit([call := NotedCall("take a")])
    assert taking.reached.wait(LIMIT_S)
    batcher.abandon(call)
    # What the first worker is at has stalled, or else it would go on itself.
    batcher.submit([beside := NotedCall("b")])
    while not beside.done.wait(group_commit.STALL_S):
        batcher.push()
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(batcher.close)
        taking.opened.set()
        assert undoing.reached.wait(LIMIT_S)
        assert not closing.done()
        undoing.opened.set()
        closing.result(LIMIT_S)
    assert new_workers() == []


def test_close_does_not_wait_for_ever(
    work: Work, batcher: WatchedBatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing does not wait for a batch that hangs."""
    monkeypatch.setattr(group_commit, "_PATIENCE_S", 0.01)
    gate = work.gate("a")
    batcher.submit([call := NotedCall("a")])
    assert gate.reached.wait(LIMIT_S)
    batcher.close()
    assert call.phase is CallPhase.TAKEN
    gate.opened.set()
    assert call.wait() == ("done", "a")
    work.threads[0].join(LIMIT_S)
    assert not work.threads[0].is_alive()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_fork(work: Work, callers: Callers, batcher: WatchedBatcher) -> None:
    """A forked child begins afresh, though batches of its parent's threads are in flight."""
    gate = work.gate("first")
    first = callers.stall("first", gate)
    [second] = callers.wait("second")
    with batcher._lock:
        child = os.fork()
    if child == 0:
        os._exit(_called_in_child(batcher, work))
    gate.opened.set()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert results([first, second]) == [("done", "first"), ("done", "second")]


def _called_in_child(batcher: WatchedBatcher, work: Work) -> int:
    """An exit status: 0 when the child's calls are carried out, and none of its parent's."""
    try:
        work.batches.clear()
        signal.alarm(int(LIMIT_S))
        assert batcher.call("a") == ("done", "a")
        batcher.submit([call := NotedCall("b")])
        assert call.wait() == ("done", "b")
        return 0 if work.batches == [["a"], ["b"]] else 1
    except BaseException:  # noqa: BLE001 - a child of fork must never run on into pytest.
        return 2


def test_logs_hold_no_requests(
    work: Work, batcher: WatchedBatcher, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is logged while nothing is wrong."""
    caplog.set_level(logging.DEBUG)
    batcher.submit([call := NotedCall("secret")])
    call.wait()
    batcher.abandon(call)
    batcher.close()
    assert caplog.text == ""
