"""An event that is set when the process is told to stop."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_told = threading.Event()


def is_process_stopping() -> bool:
    """Whether this process was told to stop while somebody waited for that in `told_to_stop`."""
    return _told.is_set()


@contextmanager
def told_to_stop(stop: threading.Event | None = None) -> Iterator[threading.Event]:
    """An event, or `stop`, that SIGINT and SIGTERM set; outside the main thread nothing does."""
    stop = stop or threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def tell(*_: object) -> None:
        _told.set()
        stop.set()

    former = {number: signal.signal(number, tell) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        _told.clear()
        for number, handler in former.items():
            signal.signal(number, handler)
