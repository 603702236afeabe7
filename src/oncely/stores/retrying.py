"""Patience with a server that is away for a moment."""

import random
import time
from collections.abc import Callable
from typing import TypeVar

from oncely.core.errors import StoreUnavailable

T = TypeVar("T")


class TryAgain(Exception):
    """Nothing was done, or nothing that does harm when it is done twice: another try may succeed.

    The text says why, for the StoreUnavailable that is raised when no try is left.
    """


_TRIES = 6
_FIRST_DELAY_S = 0.05


def patiently(call: Callable[[], T]) -> T:
    """What `call` returns, as soon as it raises no TryAgain; any other error ends it at once.

    Between tries it waits, each time up to twice as long: a second and a half in sum. Raises
    StoreUnavailable when no try is left.
    """
    for failures in range(_TRIES - 1):
        try:
            return call()
        except TryAgain:
            # Many workers lost the server at one moment: they should not all be back at one.
            time.sleep(_FIRST_DELAY_S * 2**failures * random.uniform(0.5, 1.0))  # noqa: S311
    try:
        return call()
    except TryAgain as error:
        raise StoreUnavailable(str(error)) from error.__cause__
