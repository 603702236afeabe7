"""The barrier: a function that runs once for each message; an interceptor sets the message's id."""

import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple, TypeVar, cast

from oncely._util.event_log import EventLog
from oncely.core.durations import Duration
from oncely.core.errors import ConfigError, MessageError
from oncely.core.ids import Id, fingerprint_of, id_text
from oncely.core.policy import Policy
from oncely.core.turn import Turn
from oncely.ledger.driver import SyncDriver
from oncely.ledger.inbox import AsyncInboxDriver
from oncely.ledger.ledger import Ledger
from oncely.lifecycle.lifecycle import Lifecycle
from oncely.lifecycle.results import KeepResult, Serializer
from oncely.lifecycle.work import JoinedWork, Work, run_new, run_new_async
from oncely.lifecycle.wrapping import check_function, is_async, message_in, wrapped

_log = EventLog(__name__)

F = TypeVar("F", bound=Callable[..., Any])

_NAME = "idempotent_consumer"


class _Context(NamedTuple):
    message_id: Id | None
    consumer_queue: str
    connection: Any


_current: ContextVar[_Context | None] = ContextVar("oncely_message_context", default=None)


@contextmanager
def message_context(
    message_id: Id | None, consumer_queue: str, connection: Any = None
) -> Iterator[None]:
    """While this is entered, this thread or task consumes that message of that queue.

    With a `connection`, of any kind that `Ledger.transaction` takes, functions behind a barrier
    take part in its transaction; its owner commits it.
    """
    token = _current.set(_Context(message_id, consumer_queue, connection))
    try:
        yield
    finally:
        _current.reset(token)


def idempotent_consumer(
    ledger: Ledger,
    *,
    keep_result: KeepResult = False,
    lease: Duration | None = None,
    policy: Policy = Policy(),
) -> Callable[[F], F]:
    """Run the decorated function or method, sync or async, once for each message of a queue.

    The message is that of the `message_context` around the call. For a message seen before the
    function does not run: that is logged, and the call returns the kept result, else None. Results
    are kept as `once` keeps them. An
    error of the function is raised as it was, and nothing is stored: with a connection in the
    context, its owner rolls the function's own writes back, too. Where a Message is among the
    arguments, the same id with another body is refused.

    The call raises MessageError where there is no context, or no id in it; besides, it raises what
    a function under `once` raises.
    """
    if inspect.isroutine(ledger):
        raise ConfigError(f"{_NAME}: it takes arguments; write @{_NAME}(ledger)")
    # The consumer is the queue of the context, which is known when a message comes.
    lifecycle = Lifecycle.under(ledger, _NAME, policy, lease, keep_result=keep_result)
    lifecycle = replace(lifecycle, forgets_failures=True)

    def decorate(function: F) -> F:
        check_function(function, _NAME)
        barrier = _Barrier(lifecycle, lifecycle.serializer_of(function))
        return cast(F, wrapped(function, barrier.run_async if is_async(function) else barrier.run))

    return decorate


class _Barrier:
    """Runs functions under the key (consumer queue, message id)."""

    def __init__(self, lifecycle: Lifecycle, serializer: Serializer) -> None:
        self._ledger = lifecycle.ledger
        self._serializer = serializer
        self._lifecycle_of = cache(lambda queue: replace(lifecycle, consumer=queue))

    def run(self, call: Callable[[], Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a function that is not async."""
        context, lifecycle, turn = self._asked(args, kwargs)
        with ExitStack() as stack:
            work = Work(lifecycle, turn)
            if context.connection is not None:
                inbox = stack.enter_context(self._ledger.transaction(context.connection))
                work = JoinedWork(lifecycle, turn, SyncDriver(inbox, is_joined=True))
            run_new(work, call)
        return _told(work, context)

    async def run_async(
        self, call: Callable[[], Awaitable[Any]], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run an async function."""
        context, lifecycle, turn = self._asked(args, kwargs)
        async with AsyncExitStack() as stack:
            work = Work(lifecycle, turn)
            if context.connection is not None:
                joining = self._ledger.transaction(context.connection)
                inbox = await stack.enter_async_context(joining)
                work = JoinedWork(lifecycle, turn, AsyncInboxDriver(inbox))
            await run_new_async(work, call)
        return _told(work, context)

    def _asked(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[_Context, Lifecycle, Turn]:
        context, message = _current.get(), message_in(args, kwargs)
        if context is None:
            raise MessageError(
                "no message is being consumed here: call this inside "
                '`with message_context(message_id="...", consumer_queue="..."):`'
            )
        fingerprint = None if message is None else fingerprint_of(message.body)
        turn = Turn(id_text(context.message_id), fingerprint, message)
        turn.serializer = self._serializer
        return context, self._lifecycle_of(context.consumer_queue), turn


def _told(work: Work, context: _Context) -> Any:
    """The work's result; a duplicate is logged."""
    if not work.is_new:
        names = {"message_id": context.message_id, "consumer": context.consumer_queue}
        _log.warning(
            "message '%(message_id)s' of '%(consumer)s' is a duplicate: it does not run again",
            extra={"event": "duplicate", **names},
        )
    return work.result
