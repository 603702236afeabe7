"""Deliveries of one message: a redelivery after a crash, and many at the same time."""

import asyncio
import copy
import reprlib
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Concatenate, ParamSpec, TypeGuard, TypeVar, overload

from oncely._util import clock, crash_points
from oncely.core.durations import Duration, seconds
from oncely.core.errors import BusyError, describe
from oncely.core.message import Message
from oncely.lifecycle.wrapping import is_async
from oncely.testing.calls import (
    ASKED_NO_LEDGER,
    check_handler,
    is_loop_running,
    result_of,
    shown_name,
)
from oncely.testing.tools import at_once

P = ParamSpec("P")
R = TypeVar("R")
M = TypeVar("M")

_AT_ONCE = 4
_A_DAY_S = 86_400.0


def pass_time(duration: Duration) -> None:
    """Advance the time by `duration` for all ledgers, and queues in stores, of this process and of
    processes that `kill_at` starts. It does not affect RabbitMQ. It ends with the test.

    Leases run out, and waiting messages become due. Raises ConfigError for a wrong duration.
    """
    clock.pass_for_stores(seconds(duration))


@overload
def redeliver(
    fn: Callable[P, Coroutine[Any, Any, R]], /, *args: P.args, **kwargs: P.kwargs
) -> R: ...
@overload
def redeliver(fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R: ...
def redeliver(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call `fn` with the arguments again, in this process, one day later (by `pass_time`): then
    the lease of the killed process is over. Returns the result of `fn`, or raises its error; an
    async function is awaited.

    If the lease is longer than a day, let more time pass before.
    """
    check_handler(fn, "redeliver(charge, message)")
    clock.pass_for_stores(_A_DAY_S)
    return result_of(fn(*args, **kwargs), "redeliver")


def runs_once(
    fn: Callable[Concatenate[M, P], object], message: M, /, *args: P.args, **kwargs: P.kwargs
) -> None:
    """Deliver `message` to `fn`, sync or async: four times at the same time, then once more. Each
    delivery gets its own copy of the message, and the other arguments unchanged.

    Raises AssertionError, which says what happened, unless `fn` ran to its end exactly once. A
    delivery may raise BusyError while another one is running; any other error is unexpected.
    """
    __tracebackhide__ = True
    check_handler(fn, "runs_once(charge, message)")
    runs = _Runs()
    with crash_points.watched_by(runs.note):
        ends = _deliver_all(fn, message, lambda copied: fn(copied, *args, **kwargs))
    wrong = _what_is_wrong(runs, ends, message)
    if wrong is not None:
        errors = (end for end in ends if _is_unexpected(end))
        raise AssertionError(f"{shown_name(fn)} {wrong}") from next(errors, None)


class _Runs:
    """Counts, by the points reached, how often a handler ran to an end that is stored."""

    def __init__(self) -> None:
        self.asked = 0
        """How many claims were asked for."""
        self.count = 0
        self._committing: set[object] = set()
        self._lock = threading.Lock()

    def note(self, point: str) -> None:
        """Note that a point is reached."""
        where = threading.get_ident(), asyncio.current_task() if is_loop_running() else None
        with self._lock:
            match point:
                case "after_claim":
                    self.asked += 1
                    # Its transaction lost against another one, and is repeated as a whole.
                    self.count -= where in self._committing
                    self._committing.discard(where)
                case "after_completed":
                    self.count += 1
                case "before_commit":
                    self._committing.add(where)
                case "after_commit":
                    self._committing.discard(where)


def _is_unexpected(end: object) -> TypeGuard[BaseException]:
    return isinstance(end, BaseException) and not isinstance(end, BusyError)


def _what_is_wrong(runs: _Runs, ends: Sequence[object], message: Any) -> str | None:
    told = f"{len(ends)} deliveries ({_told(ends)})"
    shown = repr(message.id) if isinstance(message, Message) else reprlib.repr(message)
    for error in filter(_is_unexpected, ends):
        return f"raised {describe(error)}, in {told}"
    if not runs.asked:
        return f"ran in each of {told}: it {ASKED_NO_LEDGER}"
    match runs.count:
        case 0:
            return (
                f"did not run in {told}: the ledger had {shown} before, or has set it aside; give "
                "each test an id of its own"
            )
        case 1:
            return None
        case count:
            return (
                f"ran {count} times in {told} of {shown}: see what `key` gives for equal messages"
            )


def _deliver_all(fn: Callable[..., Any], message: Any, call: Callable[[Any], Any]) -> list[object]:
    """The end of each delivery: its result, or its error."""
    if is_async(fn):

        async def deliver_all() -> list[object]:
            at_once = [call(_copy_of(message)) for _ in range(_AT_ONCE)]
            ends: list[object] = await asyncio.gather(*at_once, return_exceptions=True)
            return ends + await asyncio.gather(call(_copy_of(message)), return_exceptions=True)

        # All in one loop: a connection of an async driver belongs to its loop.
        ends: list[object] = result_of(deliver_all(), "runs_once")
        return ends

    def end_of(_: int) -> object:
        try:
            return result_of(call(_copy_of(message)), "runs_once")
        except BaseException as error:  # noqa: BLE001 - every error is reported.
            return error

    return [*at_once(_AT_ONCE, end_of), end_of(_AT_ONCE)]


def _copy_of(message: Any) -> Any:
    """The message of another delivery: equal, but not the same object."""
    try:
        return copy.deepcopy(message)
    except Exception:  # noqa: BLE001 - what cannot be copied, as what holds a connection, is shared.
        return message


def _told(ends: Sequence[object]) -> str:
    """The ends of the deliveries, as text."""
    words = [type(e).__name__ if isinstance(e, BaseException) else "returned" for e in ends]
    at_the_same_moment = ", ".join(words[:_AT_ONCE])
    return f"{_AT_ONCE} at the same moment: {at_the_same_moment}; then once more: {words[-1]}"
