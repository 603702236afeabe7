"""What is called when the process ends, before the finalizers of `weakref`."""

import atexit
import weakref
from collections.abc import Callable
from typing import TypeVar

F = TypeVar("F", bound=Callable[..., object])


def at_exit(function: F) -> F:
    """Call the function of a module when the process ends, for what its threads still do.

    Functions are called in the reverse order in which they were registered, and that of `weakref`
    is registered with the first finalizer: it has to be there before. It looks through all
    finalizers, of which SQLAlchemy has one for each connection in use: a thread that takes one
    meanwhile ends it with a traceback on stderr.
    """
    weakref.finalize(function, int).atexit = False
    atexit.register(function)
    return function
