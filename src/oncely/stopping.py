"""An event that is set when the process is told to stop."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def told_to_stop(stop: threading.Event | None = None) -> Iterator[threading.Event]:
    """An event, or `stop`, that SIGINT and SIGTERM set; outside the main thread nothing does."""
    stop = stop or threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    former = {
        number: signal.signal(number, lambda *_: stop.set())
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield stop
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
