"""`once`: a function that runs once for each message id, as a decorator."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, overload

from oncely.core.durations import Duration
from oncely.core.errors import ConfigError
from oncely.core.fingerprint import content_of
from oncely.core.ids import Id, fingerprint_of, id_of_key
from oncely.core.policy import Policy
from oncely.core.turn import Turn
from oncely.ledger.ledger import Ledger
from oncely.lifecycle.lifecycle import Lifecycle
from oncely.lifecycle.results import KeepResult
from oncely.lifecycle.transacting import run, run_async
from oncely.lifecycle.work import Work, run_new, run_new_async
from oncely.lifecycle.wrapping import check_function, is_async, message_in, name_of, wrapped

R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])


@overload
def once(
    ledger: Ledger,
    *,
    consumer: str,
    key: Callable[..., Id | None],
    keep_result: KeepResult = False,
    fingerprint: Callable[..., Any] | bool = False,
    lease: Duration | None = None,
    policy: Policy = Policy(),
    transaction: None = None,
) -> Callable[[F], F]: ...
@overload
def once(
    ledger: Ledger,
    *,
    consumer: str,
    key: Callable[..., Id | None],
    keep_result: KeepResult = False,
    fingerprint: Callable[..., Any] | bool = False,
    lease: Duration | None = None,
    policy: Policy = Policy(),
    transaction: Any,
) -> Callable[[Callable[..., R]], Callable[..., R]]: ...
def once(
    ledger: Any,
    *,
    consumer: Any = None,
    key: Any = None,
    keep_result: KeepResult = False,
    fingerprint: Any = False,
    lease: Duration | None = None,
    policy: Policy = Policy(),
    transaction: Any = None,
) -> Callable[[F], Any]:
    """Run the decorated function, sync or async, once for each id that `key` gives.

    `key` and `fingerprint` are called with the function's own arguments; True stands for a
    fingerprint of them all, or of the body of the Message among them. For a duplicate the function
    does not run, and the call returns the kept result, else None. `keep_result` keeps it, as JSON:
    True by the type that the function's annotation names, that type where there is none, or an
    object with `dumps` and `loads`. A result that cannot be kept is logged: a duplicate gets None.
    An error of the function is recorded and raised as it was; the policy decides what follows.
    Inside the function, messages have steps and can be sent.

    With `transaction`, a SQLAlchemy Engine or sessionmaker (for async functions, an async one),
    the function is called with a connection or session as its last argument. Its transaction holds
    the claim, too: all is stored together, or nothing. Where it loses against another transaction,
    the function is called again.

    The call raises BusyError, MismatchError, ExhaustedError, InDoubtError or TooOldError where the
    ledger does not grant the message, and MessageError for an unusable id, and for a fingerprint of
    a value that has no JSON form. It raises StoreUnavailable, before the function runs, when the
    ledger cannot be reached, and FencedError, after the function ran, when another worker has taken
    the message over. A function that can never run, or whose results cannot be kept by their type,
    raises ConfigError when it is decorated.
    """
    if inspect.isroutine(ledger):
        raise ConfigError("once: it takes arguments; write @once(ledger, consumer=..., key=...)")
    _check_asking(key, fingerprint)
    lifecycle = Lifecycle.under(
        ledger, consumer, policy, lease, keep_result=keep_result, is_called=True
    )

    def decorate(function: F) -> Any:
        check_function(function, "once")
        serializer = lifecycle.serializer_of(function)

        def turn(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Turn:
            message_id = id_of_key(key(*args, **kwargs))
            message = message_in(args, kwargs)
            content = None
            if callable(fingerprint):
                content = content_of(fingerprint(*args, **kwargs))
            elif fingerprint or (not message_id and policy.on_missing_id == "fingerprint"):
                content = message.body if message is not None else content_of([args, kwargs])
            made = Turn(message_id, None if content is None else fingerprint_of(content), message)
            made.serializer = serializer
            return made

        if transaction is not None:
            check_transaction(transaction, function, lifecycle.ledger)
            runs: Any = run_async if is_async(function) else run
            runs = functools.partial(runs, lifecycle, transaction)
            return wrapped(function, lambda call, args, kwargs: runs(turn(args, kwargs), call))
        new: Any = run_new_async if is_async(function) else run_new
        return wrapped(
            function, lambda call, args, kwargs: new(Work(lifecycle, turn(args, kwargs)), call)
        )

    return decorate


_NO_SOURCES = {
    *("Connection", "AsyncConnection", "Session", "AsyncSession"),
    *("scoped_session", "async_scoped_session"),
}
"""Classes of SQLAlchemy that are in use already, or can be in one transaction only."""


def _check_asking(key: object, fingerprint: object) -> None:
    if not callable(key):
        raise ConfigError(f"key: {key!r} is not a function; write key=lambda message: message.id")
    if not (callable(fingerprint) or isinstance(fingerprint, bool)):
        raise ConfigError(
            f"fingerprint: {fingerprint!r} is not a function; write "
            "fingerprint=lambda message: message.body, or True"
        )
    for name, function in (("key", key), ("fingerprint", fingerprint)):
        if callable(function) and is_async(function):
            raise ConfigError(f"{name}: {name_of(function)} is async; write it without async")


def check_transaction(source: object, function: Callable[..., Any], ledger: Ledger) -> None:
    """Raise ConfigError where `source` does not begin transactions as `function` needs them."""
    check_source(source, name_of(function), ledger, awaits=is_async(function))


def check_source(source: object, user: str, ledger: Ledger, *, awaits: bool) -> None:
    """Raise ConfigError where `source` does not begin transactions that `ledger` can be part of:
    for a `user` that `awaits` them, or for one that does not.
    """
    kinds = type(source).__mro__
    if not callable(getattr(source, "begin", None)) or {k.__name__ for k in kinds} & _NO_SOURCES:
        raise ConfigError(
            f"transaction: a {type(source).__name__} does not begin transactions; "
            "hand over an Engine or a sessionmaker"
        )
    is_theirs = any(kind.__module__.startswith("sqlalchemy.") for kind in kinds)
    is_async_one = any(kind.__module__.startswith("sqlalchemy.ext.asyncio") for kind in kinds)
    if is_theirs and is_async_one is not awaits:
        wanted = "an AsyncEngine or async_sessionmaker" if awaits else "an Engine or a sessionmaker"
        defined = "async" if awaits else "not async"
        raise ConfigError(f"transaction: {user} is {defined}; hand over {wanted}")
    ledger.check_joins(source)
