"""Wrapping: a function, sync or async, that runs as a piece of work; what decorators share."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from oncely.core.errors import ConfigError
from oncely.core.message import Message

F = TypeVar("F", bound=Callable[..., Any])

Run = Callable[[Callable[..., Any], Sequence[Any], Mapping[str, Any]], Any]
"""Calls its first argument, unless the message is a duplicate; the others are the arguments with
which the wrapped function was called.
"""


def is_async(function: Callable[..., Any]) -> bool:
    """Whether what `function` returns is to be awaited."""
    call = getattr(type(function), "__call__", None)  # noqa: B004 - an object may have it.
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def message_in(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Message | None:
    """The first Message that a function was called with, by place or by name."""
    for each in (*args, *kwargs.values()):
        if isinstance(each, Message):
            return each
    return None


def wrapped(function: Callable[..., Any], run: Run) -> Callable[..., Any]:
    """`function`, called by `run`. Further arguments that `run` gives follow the positional ones,
    or go by name.

    Where the function is async, `run` is async, too.
    """
    if is_async(function):

        @functools.wraps(function)
        async def async_wrapper(*args: Any, **kwargs: Any) -> Any:
            return await run(functools.partial(function, *args, **kwargs), args, kwargs)

        return async_wrapper

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return run(functools.partial(ended, function, *args, **kwargs), args, kwargs)

    return wrapper


# ---- Functions that cannot be meant ------------------------------------------------------------


def check_function(function: Callable[..., Any], decorator: str) -> None:
    """Raise ConfigError where `function` cannot run as a piece of work."""
    if isinstance(function, classmethod | staticmethod):
        kind = type(function).__name__
        raise ConfigError(f"{decorator}: put it below @{kind}, next to the function")
    call = getattr(type(function), "__call__", None)  # noqa: B004 - an object may have it.
    if any(
        inspect.isgeneratorfunction(each) or inspect.isasyncgenfunction(each)
        for each in (function, call)
    ):
        raise ConfigError(
            f"{decorator}: {name_of(function)} is a generator, which runs after it has "
            "returned; decorate a function that does its work when it is called"
        )


def ended(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """What `function`, which is not async, returns when its work is done.

    Raises ConfigError where the work has not run yet: it returned an awaitable or a generator.
    """
    result = function(*args, **kwargs)
    if result is None:
        return None  # The usual case: the checks below take longer than most functions do.
    if inspect.isawaitable(result) or inspect.isgenerator(result) or inspect.isasyncgen(result):
        for stop in ("close", "cancel"):
            getattr(result, stop, lambda: None)()
        raise ConfigError(
            f"{name_of(function)} returned a {type(result).__name__}, whose work is not done; "
            "write `async def` and await it, or do the work before returning"
        )
    return result


def name_of(function: Callable[..., Any]) -> str:
    """The name of `function` in an error's text."""
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def check_takes(function: Callable[..., Any], what: str, names: Sequence[str]) -> None:
    """Raise ConfigError where `function` cannot be called with these as positional arguments."""
    try:
        signature = inspect.signature(function)
    except ValueError:
        return  # A function written in C may have no signature to read.
    try:
        signature.bind(*names)
    except TypeError:
        name = name_of(function)
        raise ConfigError(
            f"{what}: {name} takes {signature}; write `def {name}({', '.join(names)}):`"
        ) from None


def check_called(function: F, what: str, names: Sequence[str]) -> F:
    """Return `function` if it can be called with these, without awaiting. Raises ConfigError."""
    if not callable(function):
        raise ConfigError(f"{what}: {function!r} is not a function of ({', '.join(names)})")
    if is_async(function):
        raise ConfigError(f"{what}: {name_of(function)} is async; write it without async")
    check_takes(function, what, names)
    return function
