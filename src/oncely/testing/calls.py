"""Calls of handlers, async ones among them, from tests that are not async."""

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

from oncely.core.errors import ConfigError
from oncely.lifecycle.wrapping import name_of

ASKED_NO_LEDGER = (
    "asked no ledger; decorate it with oncely.once, or hand over a function that lets its consumer "
    "handle the message"
)


def check_handler(fn: object, written: str) -> None:
    """Raise ConfigError for what cannot be called; `written` is the call as it should stand."""
    if not callable(fn):
        raise ConfigError(
            f"{written.partition('(')[0]}: {fn!r} is not a function; write {written}, where charge "
            "is the handler, not what it returned"
        )


def result_of(returned: Any, caller: str) -> Any:
    """What a handler returned, and a coroutine of it comes to, in an event loop of its own.

    Raises ConfigError for a coroutine where a loop runs already.
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
    """Whether this is called, however deep, by a coroutine."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def shown_name(fn: Callable[..., Any]) -> str:
    """What an error calls `fn`: a function inside a test without the test's name."""
    return name_of(fn).rpartition("<locals>.")[2]
