"""Signals: the first tells, a second insists, and none is in the way of what it interrupts."""

import os
import signal
import threading

from oncely._util.signals import is_process_stopping, on_signals


def test_a_second_one() -> None:
    """It is told apart from the first, whichever of the two signals it is."""
    told = threading.Event()
    seconds: list[int] = []
    with on_signals(told.set, seconds.append):
        os.kill(os.getpid(), signal.SIGINT)
        assert told.wait(60)
        assert is_process_stopping()
        assert seconds == []
        os.kill(os.getpid(), signal.SIGTERM)
    assert seconds == [signal.SIGTERM]
    assert not is_process_stopping()


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
