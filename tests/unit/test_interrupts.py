"""What a signal handler raises anywhere inside a call: nothing of the ledger's is lost by it."""

import dis
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import cache
from itertools import count, pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
from tests.records import granted

import oncely
from oncely.core.record import Key
from oncely.engine import group_commit
from oncely.ledger import Ledger, open_ledger
from oncely.testing import at_once

_SOURCES = str(Path(oncely.__file__).parent)


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
    again.
    """

    def __init__(self, place: int, handler: Callable[[], object]) -> None:
        self._left = place
        self._handler = handler
        self.has_run = False

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(_SOURCES):
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


def interrupt() -> None:
    """What a handler does that raises."""
    raise Interrupt


def interrupted(
    place: int, ledger: Ledger, key: Key, handler: Callable[[], object] = interrupt
) -> bool:
    """Claim, with a signal at that place of the library; whether it came to it."""
    tracer = Tracer(place, handler)
    before = sys.gettrace()
    # Python 3.12 looks only as tracing begins whether any frame wants opcodes.
    sys._getframe().f_trace_opcodes = True
    sys.settrace(tracer)
    try:
        ledger.claim(key, "60s")
    except Interrupt:
        pass
    finally:
        sys.settrace(before)
    return tracer.has_run


@pytest.fixture(params=["memory", "sqlite"])
def ledger(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ledger]:
    """An empty ledger that needs no server."""
    urls = {"memory": "memory://", "sqlite": f"sqlite:///{tmp_path / 'ledger.db'}"}
    with closing(open_ledger(urls[request.param])) as ledger:
        ledger.migrate()
        yield ledger


def test_call_alone(ledger: Ledger) -> None:
    """A call that is interrupted anywhere leaves no slot, lock or thread: others go on
    at once, in this thread and in others.
    """
    granted(ledger.claim(Key("billing", "warm")))
    before = set(threading.enumerate())
    for place in count():
        if not interrupted(place, ledger, Key("billing", f"broken off {place}")):
            break
        granted(ledger.claim(Key("billing", f"here {place}")))
        assert not ledger._group_commit._in_flight
        [claim] = at_once(1, lambda n: granted(ledger.claim(Key("billing", f"there {place}"))))  # noqa: B023
        ledger.complete(claim)
    assert place > 50
    assert set(threading.enumerate()) <= before
    assert not ledger._group_commit._waiting


def test_slot_that_nobody_gave_back(ledger: Ledger) -> None:
    """However many calls are broken off where they would have given back their slots, others find
    room.
    """
    for _ in range(2 * group_commit.MOST_BATCHES):
        ledger._group_commit._begin_alone(group_commit._Alone())
    granted(ledger.claim(Key("billing", "1")))
    assert not ledger._group_commit._in_flight
