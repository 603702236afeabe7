"""What a signal handler raises anywhere inside a call: nothing of the ledger's is lost by it."""

import dis
import gc
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from contextvars import copy_context
from functools import cache
from itertools import count, pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Self

import pytest
from tests.conditions import LIMIT_S, wait_until
from tests.meddling import MeddlingStore
from tests.records import granted
from tests.unit.conftest import Stall, extended

import oncely
from oncely._util.signals import on_signals
from oncely.core.record import Key
from oncely.ledger import group_commit
from oncely.ledger.ledger import Ledger, open_ledger
from oncely.once import once
from oncely.stores.memory_store import MemoryStore

_SOURCES = str(Path(oncely.__file__).parent)
_GROUP_COMMIT = str(group_commit.__file__)
_LIFECYCLE = (f"{_SOURCES}/lifecycle/", f"{_SOURCES}/core/turn.py")


class Interrupt(BaseException):
    """As KeyboardInterrupt, or what a handler of SIGALRM raises."""


@cache
def _places(code: CodeType) -> frozenset[int]:
    """Where in a function the interpreter has just looked whether a signal has come: it does so at
    the beginning, after a call, and where a loop begins again.
    """
    steps = list(dis.get_instructions(code))
    return frozenset(
        after.offset
        for step, after in pairwise(steps)
        if step.opname.startswith(("CALL", "RESUME", "JUMP_BACKWARD"))
    )


class Tracer:
    """Calls `handler` at the n-th place of the library where a signal's handler may run, and not
    again. Only in `files` whose paths begin so, and not in the function `but`.
    """

    def __init__(
        self,
        place: int,
        handler: Callable[[], object],
        files: str | tuple[str, ...] = _SOURCES,
        but: str = "",
    ) -> None:
        self._left = place
        self._handler = handler
        self._files = files
        self._but = but
        self.has_run = False

    def __enter__(self) -> Self:
        self._before = sys.gettrace()
        # Else the finalizers of other tests' ledgers may run here, and be interrupted.
        gc.disable()
        # Python 3.12 looks only as tracing begins whether any frame wants opcodes.
        sys._getframe().f_trace_opcodes = True
        sys.settrace(self)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)
        gc.enable()

    def _is_traced(self, frame: FrameType) -> bool:
        if frame.f_code is threading.Thread.start.__code__:
            # It is not safe from an Exception: up to Python 3.12 the thread dies of it.
            return False
        # What else is called of `threading` is Python, too.
        if frame.f_code.co_filename == threading.__file__ and frame.f_back is not None:
            frame = frame.f_back
        code = frame.f_code
        return code.co_filename.startswith(self._files) and code.co_name != self._but

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if not self._is_traced(frame):
            return None
        # In this order: Python 3.13 gives opcodes to a frame that has its function already.
        frame.f_trace, frame.f_trace_lines, frame.f_trace_opcodes = self, False, True
        is_place = event == "opcode" and frame.f_lasti in _places(frame.f_code)
        if is_place and not self.has_run:
            if self._left == 0:
                self.has_run = True
                self._handler()
            self._left -= 1
        return self


class SoftTimeLimitError(Exception):
    """As that of Celery: an Exception, which a signal handler raises anywhere."""


def interrupt(*_: object) -> None:
    """What a handler does that raises."""
    raise Interrupt


def limit(*_: object) -> None:
    """The same with an Exception."""
    raise SoftTimeLimitError


def interrupted(
    place: int, ledger: Ledger, key: Key, handler: Callable[[], object] = interrupt
) -> bool:
    """Claim, with a signal at that place of the library; whether it came to it."""
    with suppress(Interrupt), Tracer(place, handler) as tracer:
        ledger.claim(key, "60s")
    return tracer.has_run


def test_call_alone(any_ledger: Ledger) -> None:
    """A call that is interrupted anywhere leaves no slot, lock or thread: others go on
    at once, in this thread and in others.
    """
    granted(any_ledger.claim(Key("billing", "warm")))
    before = set(threading.enumerate())
    for place in count():
        if not interrupted(place, any_ledger, Key("billing", f"broken off {place}")):
            break
        granted(any_ledger.claim(Key("billing", f"here {place}")))
        assert not any_ledger._group_commit._in_flight
        there = threading.Thread(
            target=any_ledger.claim, args=[Key("billing", f"there {place}")], daemon=True
        )
        there.start()
        there.join(LIMIT_S)
        assert not there.is_alive()
    assert place > 50
    assert set(threading.enumerate()) <= before


def test_call_that_waits_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that is interrupted while it waits behind another has asked for nothing."""
    monkeypatch.setattr(group_commit, "STALL_S", LIMIT_S)
    store, stall = MeddlingStore(MemoryStore()), Stall()
    store.once(stall.hold)

    def end(*_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        raise Interrupt

    def claim() -> None:
        # Again and again, since a signal just before a thread falls asleep does not wake it.
        signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
        ledger.claim(Key("billing", "interrupted"))

    before = signal.signal(signal.SIGALRM, end)
    with closing(Ledger(store)) as ledger, ThreadPoolExecutor(1) as pool:
        first = pool.submit(ledger.claim, Key("billing", "first"))
        assert stall.reached.wait(LIMIT_S)
        with pytest.raises(Interrupt):
            claim()
        signal.signal(signal.SIGALRM, before)
        stall.go_on.set()
        granted(first.result(LIMIT_S))
        granted(ledger.claim(Key("billing", "after")))
        assert {record.key.message_id for record in ledger.scan()} == {"first", "after"}


def test_call_that_waits_for_another_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever in group commit a call is interrupted that has to wait, also as it starts the thread
    that it needs: what it is granted is given back, and others go on.
    """
    monkeypatch.setattr(group_commit, "STALL_S", LIMIT_S)
    store = MeddlingStore(MemoryStore())
    for place in count():
        # Of its own: a worker whose caller is interrupted as it starts may come late.
        with closing(Ledger(store)) as ledger, ThreadPoolExecutor(1) as pool:
            put = ledger._group_commit.put
            stall, key = Stall(), Key("billing", f"broken off {place}")
            store.once(stall.hold)
            first = pool.submit(ledger.claim, Key("billing", f"first {place}"))
            assert stall.reached.wait(LIMIT_S)

            def go_on(call: Any, put: Callable[[Any], None] = put, stall: Stall = stall) -> None:
                put(call)
                stall.go_on.set()

            monkeypatch.setattr(ledger._group_commit, "put", go_on)
            try:
                with suppress(Interrupt), Tracer(place, interrupt, _GROUP_COMMIT, "call") as tracer:
                    ledger.claim(key, "60s")
            finally:
                stall.go_on.set()
            granted(first.result(LIMIT_S))
            if not tracer.has_run:
                break
            wait_until(lambda ledger=ledger, key=key: ledger.find(key) is None)  # type: ignore[misc]
            [other] = pool.map(ledger.claim, [Key("billing", f"other {place}")], timeout=LIMIT_S)
            granted(other)
    assert place > 20


def test_error_of_a_handler(any_ledger: Ledger) -> None:
    """An Exception that a handler raises comes out as it is, also while a store is connected to."""
    any_ledger.claim(Key("billing", "warm"))
    for place in count(0, 3):
        any_ledger.close()
        with suppress(SoftTimeLimitError), Tracer(place, limit) as tracer:
            any_ledger.claim(Key("billing", f"broken off {place}"))
            assert not tracer.has_run
        if not tracer.has_run:
            break
    assert place > 50


@pytest.mark.filterwarnings("ignore:.*coroutine .* was never awaited")
@pytest.mark.parametrize(("handler", "fails"), [(interrupt, False), (limit, True)])
def test_function_under_once(handler: Callable[..., object], fails: bool) -> None:
    """Wherever a call is interrupted on its way to the function or from there, its claim is not
    extended for ever.
    """
    with closing(open_ledger("memory://")) as ledger:

        @once(ledger, consumer="billing", key=lambda message_id: message_id)
        def handle(_: str) -> None:
            if fails:
                raise ZeroDivisionError

        with suppress(ZeroDivisionError):  # It also starts the heartbeat's thread.
            handle("warm")
        for place in count():
            ends = suppress(Interrupt, SoftTimeLimitError, ZeroDivisionError)
            # In a context of its own, in which what is being processed may be left behind.
            run = copy_context().run
            with ends, Tracer(place, handler, _LIFECYCLE) as tracer:
                run(handle, f"broken off {place}")
            assert extended(ledger) == []
            if not tracer.has_run:
                break
    assert place > 50


_GREETING = (
    b"\n10.11.0-MariaDB\0\1\0\0\0saltsalt\0\xff\xf7\x21\2\0\x08\0\x15"
    + bytes(10)
    + b"saltsaltsalt\0mysql_native_password\0"
)
"""The first packet of a server of MariaDB: there the server speaks first."""


@pytest.mark.parametrize("scheme", ["postgresql", "mysql", "redis"])
def test_error_of_a_handler_while_a_server_is_connected_to(scheme: str) -> None:
    """The same where a server does not answer."""

    def interrupt() -> None:
        with suppress(OSError):
            lines.append(listener.accept()[0])
            if scheme == "mysql":
                lines[0].sendall(len(_GREETING).to_bytes(4, "little") + _GREETING)
            lines[0].recv(1)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    lines: list[socket.socket] = []
    before = signal.signal(signal.SIGUSR1, limit)
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            thread = threading.Thread(target=interrupt)
            thread.start()
            url = f"{scheme}://me@127.0.0.1:{listener.getsockname()[1]}/0"
            with pytest.raises(SoftTimeLimitError):
                open_ledger(url).claim(Key("billing", "1"))
            thread.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
        for line in lines:
            line.close()


def test_what_is_interrupted_may_hold_a_lock() -> None:
    """A signal that comes while the main thread holds the lock that telling needs waits for it."""
    lock = threading.Lock()
    told = threading.Event()

    def tell() -> None:
        with lock:
            told.set()

    with on_signals(tell):
        with lock:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
        assert told.wait(60)
