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
"""The signals that came while a block of `on_signals` was entered."""


class StopEvent(threading.Event):
    """An event that notices when it is asked: `is_set` calls `on_asked` first."""

    def __init__(self) -> None:
        super().__init__()
        self.on_asked: Callable[[], object] = lambda: None

    def is_set(self) -> bool:
        """Whether it is set."""
        self.on_asked()
        return super().is_set()


def is_process_stopping() -> bool:
    """Whether this process was told to stop, and is still in a block of `on_signals`."""
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
    """Inside the block, the first SIGINT or SIGTERM calls `tell` in a separate thread; each later
    one calls `at_second` with its number. Outside the main thread nothing is called.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # A signal handler interrupts the main thread anywhere, also while that holds the lock of the
    # event that `tell` sets. Putting into a SimpleQueue never waits for a lock.
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
        # A progress display on a terminal hides the cursor.
        os.write(2, _SHOW_CURSOR)
    os._exit(128 + number)
