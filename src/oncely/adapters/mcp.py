"""once_tool: a tool of an MCP server that runs once for each call, for models that ask again."""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.mcpserver.utilities.context_injection import find_context_parameter
from pydantic_core import to_jsonable_python

from oncely.core import errors
from oncely.core.durations import Duration
from oncely.core.fingerprint import content_of
from oncely.core.ids import Id, fingerprint_of, id_of_key
from oncely.core.policy import Policy, effectively_once
from oncely.core.turn import leaves_doubt
from oncely.lifecycle.wrapping import check_function, is_async, name_of
from oncely.once import once

F = TypeVar("F", bound=Callable[..., Any])

_CONTEXT = "oncely_context"
_context: ContextVar[Any] = ContextVar(_CONTEXT, default=None)
_DOUBT = "Nobody knows whether '{}' happened. Do not repeat it; ask a person to find out."
_AGAIN = "Ask again later, with the same key and arguments."
_WORDS = {
    errors.BusyError: f"'{{}}' is at work on this call. {_AGAIN} Do not start another.",
    errors.InDoubtError: _DOUBT,
    errors.FencedError: _DOUBT,
    errors.MismatchError: "Nothing was done: another call of '{}' had this key. Use a new one.",
    errors.ExhaustedError: "'{}' has failed permanently, and does not run again: ask a person.",
    errors.StoreError: f"Nothing was done: the ledger of '{{}}' cannot be reached. {_AGAIN}",
}
"""What a model is told: of other errors the SDK hides the text."""


def once_tool(
    ledger: Any,
    *,
    consumer: str | None = None,
    key: Callable[..., Id] | None = None,
    scope: Callable[[Any], str] | None = None,
    lease: Duration | None = None,
    policy: Policy = effectively_once(),
) -> Callable[[F], F]:
    """Run a tool, sync or async, once for each call; a repeated call gets the first one's result.

    Write it below the server's own decorator. A call's key is what `key` makes of the arguments,
    given by name; else the `idempotencyKey` in the request's `_meta`; else a digest of the
    arguments. `scope` names the caller of a request's Context: callers never meet each other's
    calls. The consumer is the function's name, if none is named.

    Where the ledger does not let the call run, ToolError tells the model in words what is known,
    and what to do. Other errors are as `once` says.
    """

    def decorate(function: F) -> Any:
        check_function(function, "once_tool")
        signature, own = inspect.signature(function), find_context_parameter(function)
        tool = getattr(function, "__name__", name_of(function))

        def called_with(*args: Any, **kwargs: Any) -> dict[str, Any]:
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            return {name: value for name, value in given.arguments.items() if name != own}

        def content(*args: Any, **kwargs: Any) -> Any:
            return to_jsonable_python(called_with(*args, **kwargs))

        def id_of(*args: Any, **kwargs: Any) -> str:
            given: Any = signature.bind(*args, **kwargs).arguments
            context = given.get(own, _context.get())
            named = id_of_key(key(**called_with(*args, **kwargs))) if key else None
            named = named or (
                context and (context.request_context.meta or {}).get("idempotencyKey")
            )
            whose = f"{fingerprint_of(scope(context).encode())}/" if scope else ""
            return f"{whose}{named or fingerprint_of(content_of(content(*args, **kwargs)))}"

        rules: Any = {"keep_result": True, "fingerprint": content, "lease": lease, "policy": policy}
        decorator: Any = once(ledger, consumer=consumer or tool, key=id_of, **rules)
        guarded = decorator(function)

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with _in_words(tool, policy, kwargs.pop(_CONTEXT, None)):
                return guarded(*args, **kwargs)

        @functools.wraps(function)
        async def run_async(*args: Any, **kwargs: Any) -> Any:
            with _in_words(tool, policy, kwargs.pop(_CONTEXT, None)):
                return await guarded(*args, **kwargs)

        made: Any = run_async if is_async(function) else run
        if own is None:
            # The server gives the Context to whoever has a parameter for it.
            asks = inspect.Parameter(_CONTEXT, inspect.Parameter.KEYWORD_ONLY, annotation=Context)
            made.__signature__ = signature.replace(
                parameters=[*signature.parameters.values(), asks]
            )
            made.__annotations__ = {**function.__annotations__, _CONTEXT: Context}
        return made

    return decorate


@contextmanager
def _in_words(tool: str, policy: Policy, context: object) -> Iterator[None]:
    _context.set(context)
    try:
        yield
    except Exception as error:
        words = [words for kind, words in _WORDS.items() if isinstance(error, kind)]
        if not words and not leaves_doubt(policy, error):
            raise
        raise ToolError((words or [_DOUBT])[0].format(tool)) from error
