"""The barrier: a function that runs once for each message, which an interceptor names before."""

import inspect
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar, cast

from oncely.claiming.inline import InlineCalls
from oncely.core.errors import ConfigError, MessageError
from oncely.core.message import Message, fingerprint_of
from oncely.core.policy import Duration, Policy
from oncely.handling.around import Asked, Handling
from oncely.handling.work import JoinedWork, Work
from oncely.handling.wrapping import (
    check_function,
    is_async,
    message_in,
    within,
    within_async,
    wrapped,
)
from oncely.ledger import Ledger

_log = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])

_NAME = "idempotent_consumer"


class _Context(NamedTuple):
    message_id: str | None
    consumer_queue: str
    connection: Any


_current: ContextVar[_Context | None] = ContextVar("oncely_message_context", default=None)


@contextmanager
def message_context(
    message_id: str | None, consumer_queue: str, connection: Any = None
) -> Iterator[None]:
    """While this is entered, that message of that queue is what this thread and task consume.

    Functions behind a barrier take part in the transaction of `connection`, any that
    `Ledger.transaction` takes, where there is one; its owner commits it.
    """
    token = _current.set(_Context(message_id, consumer_queue, connection))
    try:
        yield
    finally:
        _current.reset(token)


def idempotent_consumer(
    ledger: Ledger,
    *,
    keep_result: bool = False,
    lease: Duration | None = None,
    policy: Policy = Policy(),
) -> Callable[[F], F]:
    """Run the decorated function or method, sync or async, once for each message of a queue.

    The message is that of the `message_context` around the call. For a message seen before the
    function does not run: that is logged, and the call returns the kept result, else None. An
    error of the function is raised as it was, and nothing is stored: with a connection in the
    context, its owner rolls the function's own writes back, too. Where a Message is among the
    arguments, the same id with another body is refused.

    The call raises MessageError where there is no context, or no id in it; and what a function
    under `once` raises.
    """
    if inspect.isroutine(ledger):
        raise ConfigError(f"{_NAME}: it takes arguments; write @{_NAME}(ledger)")
    # Whose messages they are is known when one comes.
    handling = Handling.under(ledger, _NAME, policy, lease, keep_result=keep_result)
    barrier = _Barrier(replace(handling, forgets_failures=True))

    def decorate(function: F) -> F:
        check_function(function, _NAME)
        if is_async(function):
            return cast(F, wrapped(function, within_async(barrier.opened_async)))
        return cast(F, wrapped(function, within(barrier.opened)))

    return decorate


class _Barrier:
    """Opens work under the key (consumer queue, message id)."""

    def __init__(self, handling: Handling) -> None:
        self._ledger = handling.ledger
        self._like = handling
        self._handlings: dict[str, Handling] = {}

    @contextmanager
    def opened(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Work]:
        """Work for a function that is not async."""
        context = _context()
        handling, asked = self._handling(context), _asked(context, message_in(args, kwargs))
        with ExitStack() as stack:
            work = Work(handling, asked)
            if context.connection is not None:
                inbox = stack.enter_context(self._ledger.transaction(context.connection))
                work = JoinedWork(handling, asked).join(InlineCalls(inbox))
            yield _logged(stack.enter_context(work), context)

    @asynccontextmanager
    async def opened_async(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> AsyncIterator[Work]:
        """Work for an async function."""
        context = _context()
        handling, asked = self._handling(context), _asked(context, message_in(args, kwargs))
        async with AsyncExitStack() as stack:
            work = Work(handling, asked)
            if context.connection is not None:
                joining = self._ledger.transaction(context.connection)
                work = JoinedWork(handling, asked).join(await stack.enter_async_context(joining))
            yield _logged(await stack.enter_async_context(work), context)

    def _handling(self, context: _Context) -> Handling:
        queue = context.consumer_queue
        if queue not in self._handlings:
            self._handlings.setdefault(queue, replace(self._like, consumer=queue))
        return self._handlings[queue]


def _context() -> _Context:
    context = _current.get()
    if context is None:
        raise MessageError(
            "no message is being consumed here: call this inside "
            '`with message_context(message_id="...", consumer_queue="..."):`'
        )
    return context


def _asked(context: _Context, message: Message | None) -> Asked:
    fingerprint = None if message is None else fingerprint_of(message.body)
    return Asked(context.message_id, fingerprint, message)


def _logged(work: Work, context: _Context) -> Work:
    if not work.is_new:
        names = {"message_id": context.message_id, "consumer": context.consumer_queue}
        _log.warning("duplicate", extra=names)
    return work
