"""Patience with a server that is away for a moment."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from oncely._util import clock
from oncely._util.chance import CHANCE
from oncely.core.errors import StoreUnavailable

P = ParamSpec("P")
T = TypeVar("T")


class TryAgain(Exception):
    """Nothing was done, or only work that is safe to repeat: another try may succeed.

    The text says why; the StoreUnavailable that is raised when no try is left has the same text.
    """


_TRIES = 6
_FIRST_DELAY_S = 0.05


def patiently(call: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    """What `call` returns, as soon as it does not raise TryAgain; any other error ends it at once.

    Between tries it waits, each time up to twice as long: a second and a half in total. Raises
    StoreUnavailable when no try is left.
    """
    for failures in range(_TRIES - 1):
        try:
            return call(*args, **options)
        except TryAgain:
            # Many workers lost the server at the same moment: they must not all return at once.
            clock.sleep(_FIRST_DELAY_S * 2**failures * CHANCE.uniform(0.5, 1.0))
    try:
        return call(*args, **options)
    except TryAgain as error:
        raise StoreUnavailable(str(error)) from error.__cause__
