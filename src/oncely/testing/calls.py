"""Calls handlers, also async ones, from tests that are not async."""

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

from oncely.core.errors import ConfigError
from oncely.lifecycle.wrapping import name_of

ASKED_NO_LEDGER = (
    "asked no ledger; decorate it with oncely.once, or pass a function that lets its consumer "
    "handle the message"
)


def check_handler(fn: object, written: str) -> None:
    """Raise ConfigError for a value that cannot be called; `written` is an example of the call."""
    if not callable(fn):
        raise ConfigError(
            f"{written.partition('(')[0]}: {fn!r} is not a function; write {written}, where charge "
            "is the handler, not what it returned"
        )


def result_of(returned: Any, caller: str) -> Any:
    """A handler's result; a coroutine is run in an event loop of its own.

    Raises ConfigError for a coroutine if a loop is running already.
    """
    if not inspect.iscoroutine(returned):
        return returned
    if is_loop_running():
        returned.close()
        raise ConfigError(
            f"{caller}: an event loop runs in this test; write `def test_...`, not `async def`"
        )
    return asyncio.run(returned)


def is_loop_running() -> bool:
    """Whether an event loop is running in this thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def shown_name(fn: Callable[..., Any]) -> str:
    """The name of `fn` for errors: for a function inside of a test, without the test's name."""
    return name_of(fn).rpartition("<locals>.")[2]
