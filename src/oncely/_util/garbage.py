"""Garbage collection that gets out of the way of many short-lived values."""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_VALUES_BETWEEN = 250_000

_lock = threading.Lock()
_inside: list[tuple[int, int, int]] = []
"""The settings that each found who is inside."""


@contextmanager
def rarely_collecting() -> Iterator[None]:
    """Meanwhile collect garbage once in several windows or chunks, and not several times in each.

    Their messages, records and claims are small values that live as long as they do; looking
    through them again and again is an eighth of the time. This is for the whole process, until the
    last that asked for it is done.
    """
    with _lock:
        former = gc.get_threshold()
        _inside.append(former)
        gc.set_threshold(_VALUES_BETWEEN, *former[1:])
    try:
        yield
    finally:
        with _lock:
            first = _inside[0]
            _inside.pop()
            if not _inside:
                gc.set_threshold(*first)
