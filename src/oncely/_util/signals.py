"""An event that is set when the process is told to stop."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import NoReturn

_SHOW_CURSOR = b"\x1b[?25h\n"

_told: list[int] = []
"""The signals that have come while somebody waits for them."""


class StopEvent(threading.Event):
    """An event that tells who waits for it: `on_asked` is called whenever somebody asks."""

    def __init__(self) -> None:
        super().__init__()
        self.on_asked: Callable[[], object] = _nothing

    def is_set(self) -> bool:
        """Whether it is set."""
        self.on_asked()
        return super().is_set()


def is_process_stopping() -> bool:
    """Whether this process was told to stop while somebody waited for that in `told_to_stop`."""
    return bool(_told)


@contextmanager
def told_to_stop(stop: threading.Event | None = None) -> Iterator[threading.Event]:
    """An event, or `stop`, that SIGINT and SIGTERM set; outside the main thread nothing does."""
    stop = stop or threading.Event()
    with on_signals(stop.set):
        yield stop


@contextmanager
def on_signals(
    tell: Callable[[], object], at_second: Callable[[int], object] | None = None
) -> Iterator[None]:
    """The first SIGINT or SIGTERM calls `tell`, from a thread of its own, and each that comes after
    it `at_second` with its number; outside the main thread nothing does.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # A handler of signals interrupts the main thread anywhere, also where that holds the lock of
    # the event that `tell` sets. What a handler puts into such a queue never waits.
    comings: SimpleQueue[bool] = SimpleQueue()
    thread = threading.Thread(target=lambda: comings.get() and tell(), daemon=True)
    thread.start()
    is_first = threading.Lock()

    def come(number: int, _: object) -> None:
        if is_first.acquire(blocking=False):
            _told.append(number)
            comings.put(True)  # noqa: FBT003 - its value is all there is to say.
        elif at_second is not None:
            at_second(number)

    former = {number: signal.signal(number, come) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
        comings.put(False)  # noqa: FBT003 - as above.
        thread.join()
        _told.clear()


def end_at_once(number: int) -> NoReturn:
    """End this process as if the signal had killed it: exit code 128 + `number`.

    The signal itself would do nothing to the first process of a container.
    """
    if os.isatty(2):
        # Progress on a terminal hides it.
        os.write(2, _SHOW_CURSOR)
    os._exit(128 + number)


def _nothing() -> None:
    pass
