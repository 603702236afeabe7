"""Single calls of a ledger that meet: they share a batch; no caller harms another."""

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from tests.conditions import LIMIT_S, wait_until
from tests.meddling import MeddlingStore
from tests.records import granted, key_of
from tests.unit.conftest import Stall

from oncely.async_ledger import AsyncLedger
from oncely.core.commands import ClaimOutcome, Granted
from oncely.core.errors import StoreError
from oncely.engine import group_commit
from oncely.ledger import Ledger


class Callers:
    """Threads that claim, each once, behind a claim whose write is held up."""

    def __init__(self, ledger: Ledger, meddling: MeddlingStore, pool: ThreadPoolExecutor) -> None:
        self.ledger = ledger
        self.stall = Stall()
        self._waiting = threading.Semaphore(0)
        self._pool = pool
        self._submit = ledger._group_commit.submit
        meddling.once(self.stall.hold)
        self.first = self.begin("first")
        assert self.stall.reached.wait(LIMIT_S)

    def begin(self, message_id: str) -> "Future[ClaimOutcome]":
        return self._pool.submit(self.ledger.claim, key_of(message_id))

    def wait(self, *ids: str) -> "list[Future[ClaimOutcome]]":
        """Those that wait behind what is in flight when this returns, in this order."""
        futures = []
        for message_id in ids:
            futures.append(self.begin(message_id))
            self.await_one()
        return futures

    def await_one(self) -> None:
        """Return once one more call waits."""
        assert self._waiting.acquire(timeout=LIMIT_S)

    def submit(self, calls: Iterable[Any]) -> bool:
        """In place of the ledger's: it tells of each call that waits."""
        given = list(calls)
        wanted = self._submit(given)
        for _ in given:
            self._waiting.release()
        return wanted


@pytest.fixture(autouse=True)
def _nothing_stalls(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is, no batch is taken for stalled unless the test wants it."""
    monkeypatch.setattr(group_commit, "STALL_S", LIMIT_S)


@pytest.fixture
def callers(
    ledger: Ledger, meddling: MeddlingStore, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callers]:
    """Callers of the ledger in memory."""
    with ThreadPoolExecutor(16) as pool:
        callers = Callers(ledger, meddling, pool)
        monkeypatch.setattr(ledger._group_commit, "submit", callers.submit)
        yield callers
        callers.stall.go_on.set()


def test_together(callers: Callers, meddling: MeddlingStore) -> None:
    """Calls that come while one is carried out go together when it has ended; each has its own
    outcome.
    """
    futures = [callers.first, *callers.wait("a", "b", "c")]
    callers.stall.go_on.set()
    claims = [granted(future.result(LIMIT_S)) for future in futures]
    assert [claim.key.message_id for claim in claims] == ["first", "a", "b", "c"]
    assert meddling.calls == ["insert", "insert"]


# ---- Stalls ------------------------------------------------------------------------------------


@pytest.mark.parametrize("of_main", [True, False], ids=["main thread", "another"])
def test_stalled_batch(callers: Callers, monkeypatch: pytest.MonkeyPatch, of_main: bool) -> None:
    """Calls behind a batch that hangs go on beside it, with those that wait."""
    [waiting] = callers.wait("waiting")
    monkeypatch.setattr(group_commit, "STALL_S", 0.01)
    for message_id in ("second", "third"):
        if of_main:
            granted(callers.ledger.claim(key_of(message_id)))
        else:
            granted(callers.begin(message_id).result(LIMIT_S))
    granted(waiting.result(LIMIT_S))
    assert not callers.first.done()


def test_call_within_a_call(
    ledger: Ledger, meddling: MeddlingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call made while its own thread carries out another (by a finalizer, say) is answered; also
    where the ledger's own lock is held.
    """
    monkeypatch.setattr(group_commit, "STALL_S", 0.01)
    meddling.once(lambda: granted(ledger.claim(key_of("inner"))))
    granted(ledger.claim(key_of("outer")))
    with ledger._group_commit._lock:
        granted(ledger.claim(key_of("locked")))


# ---- Callers who are broken off ----------------------------------------------------------------


def test_leader_is_broken_off(callers: Callers, meddling: MeddlingStore) -> None:
    """Where the thread that carries out a batch is ended, the others are told, each by an error of
    its own, and the next call goes on.
    """
    leader, *others = callers.wait("leader", "a", "b")

    def end() -> None:
        raise SystemExit(3)

    meddling.once(end)
    callers.stall.go_on.set()
    granted(callers.first.result(LIMIT_S))
    with pytest.raises(SystemExit):
        leader.result(LIMIT_S)
    errors = [other.exception(LIMIT_S) for other in others]
    assert all(isinstance(error, StoreError) for error in errors)
    assert errors[0] is not errors[1]
    granted(callers.ledger.claim(key_of("after")))


def test_no_thread_can_be_started(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a task needs a thread and none can be started, it is told; a thread needs none."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def claim(message_id: str) -> ClaimOutcome:
        return await AsyncLedger(ledger).claim(key_of(message_id))

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(StoreError, match="can't start new thread"):
            asyncio.run(claim("a"))
        granted(ledger.claim(key_of("b")))
    granted(asyncio.run(claim("c")))


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


def test_interrupted_while_it_waits(callers: Callers, meddling: MeddlingStore) -> None:
    """A thread that is interrupted while its call waits has asked for nothing."""
    with Interruption(callers.await_one), pytest.raises(KeyboardInterrupt):
        callers.ledger.claim(key_of("interrupted"))
    callers.stall.go_on.set()
    granted(callers.first.result(LIMIT_S))
    granted(callers.ledger.claim(key_of("after")))
    assert meddling.calls == ["insert", "insert"]


def test_interrupted_in_flight(callers: Callers, meddling: MeddlingStore) -> None:
    """A thread that is interrupted while others carry out its call keeps nothing of it."""
    taken = Stall()
    meddling.once(taken.hold)

    def until_taken() -> None:
        callers.await_one()
        callers.stall.go_on.set()
        assert taken.reached.wait(LIMIT_S)

    with Interruption(until_taken), pytest.raises(KeyboardInterrupt):
        callers.ledger.claim(key_of("interrupted"))
    taken.go_on.set()
    wait_until(lambda: "delete" in meddling.calls)
    wait_until(lambda: callers.ledger.find(key_of("interrupted")) is None)


# ---- Processes ---------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_fork(callers: Callers) -> None:
    """A forked child begins afresh, though batches of its parent's threads are in flight."""
    [second] = callers.wait("second")
    with callers.ledger._group_commit._lock:
        child = os.fork()
    if child == 0:
        os._exit(_claimed_in_child(callers.ledger))
    callers.stall.go_on.set()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    for future in (callers.first, second):
        assert isinstance(future.result(LIMIT_S), Granted)


def _claimed_in_child(ledger: Ledger) -> int:
    """An exit status: 0 when the child's calls are carried out, and none of its parent's."""
    try:
        signal.alarm(int(LIMIT_S))
        granted(ledger.claim(key_of("a")))
        granted(asyncio.run(AsyncLedger(ledger).claim(key_of("b"))))
        return 0 if {record.key for record in ledger.scan()} == {key_of("a"), key_of("b")} else 1
    except BaseException:  # noqa: BLE001 - a child of fork must never run on into pytest.
        return 2
