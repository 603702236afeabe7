"""Garbage collection that gets out of the way of many short-lived values."""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_VALUES_BETWEEN = 250_000

_lock = threading.Lock()
_transaction: list[tuple[int, int, int]] = []
"""The thresholds that each block inside found when it was entered."""


@contextmanager
def rarely_collecting() -> Iterator[None]:
    """Inside the block, collect garbage once in several windows or chunks, not several times in
    each.

    Their messages, records and claims are small values that live as long as the window; looking
    through them again and again takes an eighth of the time. It holds for the whole process, until
    the last such block is left.
    """
    with _lock:
        former = gc.get_threshold()
        _transaction.append(former)
        gc.set_threshold(_VALUES_BETWEEN, *former[1:])
    try:
        yield
    finally:
        with _lock:
            first = _transaction[0]
            _transaction.pop()
            if not _transaction:
                gc.set_threshold(*first)
