"""A middleware for FastStream that handles each message once."""

from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import replace
from datetime import datetime
from functools import cache, partial
from inspect import unwrap
from types import TracebackType
from typing import Any

from faststream import BaseMiddleware, ContextRepo, StreamMessage
from faststream.exceptions import AckMessage, IgnoredException, NackMessage, RejectMessage
from faststream.message import SourceType

from oncely._util import clock
from oncely.adapters.attempt import Attempt, log_rejected
from oncely.core.durations import Duration
from oncely.core.errors import ConfigError, describe
from oncely.core.ids import Id, fingerprint_of, id_of_key
from oncely.core.message import Message
from oncely.core.policy import Policy
from oncely.core.turn import Turn
from oncely.core.verdicts import DeadLetter, Delay
from oncely.ledger.ledger import Ledger
from oncely.lifecycle.lifecycle import Lifecycle
from oncely.lifecycle.results import KeepResult
from oncely.lifecycle.wrapping import is_async, name_of
from oncely.once import check_source

KeyOf = Callable[[StreamMessage[Any]], Id | None]
_Next = Callable[[StreamMessage[Any]], Awaitable[Any]]

SESSION = "oncely_session"
"""The name of a handler's connection or session in FastStream's context."""
_LONGEST_SLEEP_S = 1.0
"""How soon a waiting message is requeued after its subscriber has stopped."""


def once_middleware(
    ledger: Ledger,
    consumer: str,
    *,
    key: KeyOf | None = None,
    keep_result: KeepResult = False,
    lease: Duration | None = None,
    policy: Policy = Policy(),
    transaction: Any = None,
) -> Callable[..., BaseMiddleware[Any, Any]]:
    """For a broker's or router's `middlewares`: each subscriber handles a message once.

    The consumer of a subscriber is `consumer`, a dot and the name of its function. The id is
    RabbitMQ's property `message_id`, or the result of `key` for a message. A duplicate is
    acknowledged; if results are kept, the first result is published if it was not before, and is
    the answer to a request. A message that is busy,
    or whose store is unavailable, waits in the worker and is claimed again. A message that is
    refused, or for which `key` raises, is rejected. An error of the handler is recorded and raised
    unchanged: FastStream's AckPolicy decides what follows. If the policy sets tries or backoff, it
    decides instead: the message waits in the worker, is retried, and is rejected in the end.

    With `transaction`, a SQLAlchemy AsyncEngine or async_sessionmaker, the handler and the claim
    share a transaction. The handler takes its connection or session from the context:
    `session: Annotated[AsyncSession, Context("oncely_session")]`. A handler that is not async
    raises ConfigError at its first message.
    """
    lifecycle = Lifecycle.under(ledger, consumer, policy, lease, keep_result=keep_result)
    if transaction is not None:
        check_source(transaction, "what FastStream calls", ledger, awaits=True)
    lifecycle_of = cache(lambda function: replace(lifecycle, consumer=f"{consumer}.{function}"))
    return partial(
        _OneMessage, lifecycle_of=lifecycle_of, key_of=key or _message_id, source=transaction
    )


class _OneMessage(BaseMiddleware[Any, Any]):
    _attempt: Attempt | None = None

    def __init__(
        self,
        msg: Any,
        /,
        *,
        context: ContextRepo,
        lifecycle_of: Callable[[str], Lifecycle],
        key_of: KeyOf,
        source: Any,
    ) -> None:
        super().__init__(msg, context=context)
        self._lifecycle_of = lifecycle_of
        self._key_of = key_of
        self._source = source

    async def consume_scope(self, call_next: _Next, msg: StreamMessage[Any]) -> Any:
        """Call the handler, if the message is new."""
        # The response to a request passes here, too.
        if msg.source_type is not SourceType.CONSUME:
            return await call_next(msg)
        subscriber = self.context.get_local("handler_")
        [first, *_] = subscriber.calls
        if self._source is not None:
            for each in subscriber.calls:
                handler = unwrap(each.handler._original_call)
                if not is_async(handler):
                    raise ConfigError(
                        f"transaction: {name_of(handler)} is not async, and its session is; "
                        "write it with `async def`"
                    )
        lifecycle = self._lifecycle_of(first.name)
        serializer = lifecycle.serializer_of(unwrap(first.handler._original_call))
        while True:
            turn = self._turn(msg)
            turn.serializer = serializer
            attempt = Attempt("faststream", lifecycle, turn, self._source, is_followed=True)
            delay = await self._attempted(attempt, call_next, msg, lifecycle.policy)
            if delay is None:
                break
            # Not requeued: it would be redelivered at once, and be counted by quorum queues.
            await _wait(delay.delay_s, subscriber)
        if not attempt.has_result or (attempt.is_repeated and not msg.reply_to):
            raise AckMessage
        self._attempt = attempt
        return attempt.result

    async def after_processed(
        self,
        exc_type: type[BaseException] | None = None,
        exc_val: BaseException | None = None,
        exc_tb: TracebackType | None = None,
    ) -> bool | None:
        """The result is published."""
        if self._attempt is not None and exc_type is None:
            await self._attempt.finish_async()
        return await super().after_processed(exc_type, exc_val, exc_tb)

    async def _attempted(
        self, attempt: Attempt, call_next: _Next, message: StreamMessage[Any], policy: Policy
    ) -> Delay | None:
        """Handle the message; return the delay of its retry, or None if it is done."""
        acknowledged: list[AckMessage] = []

        async def call(*sessions: Any) -> Any:
            acknowledged.clear()
            try:
                with ExitStack() as stack:
                    for session in sessions:
                        stack.enter_context(self.context.scope(SESSION, session))
                    return await call_next(message)
            except AckMessage as raised:
                # The message is done, and must not be undone.
                acknowledged.append(raised)

        try:
            await attempt.run_async(call)
        except Exception as error:
            verdict = attempt.verdict(error)
            is_failure = verdict is None and not isinstance(error, IgnoredException)
            if is_failure and policy.sets_retries:
                attempt.log_failure(error)
                verdict = attempt.own_verdict
            match verdict:
                case Delay() as delay:
                    return delay
                case DeadLetter(reason):
                    raise _rejected(attempt.turn.message_id, reason) from error
                case _:
                    raise
        if acknowledged:
            await attempt.finish_async()
            raise acknowledged[0]
        return None

    def _turn(self, message: StreamMessage[Any]) -> Turn:
        """The claim to ask for. Raises RejectMessage if `key` fails."""
        try:
            message_id = id_of_key(self._key_of(message))
            fingerprint = fingerprint_of(message.body)
        except Exception as error:
            raise _rejected(_message_id(message), describe(error)) from error
        sent_at = getattr(message.raw_message, "timestamp", None)
        as_ours = Message(
            message_id or "",
            message.body,
            headers={name: str(value) for name, value in message.headers.items()},
            time=sent_at if isinstance(sent_at, datetime) else None,
            content_type=message.content_type or "application/octet-stream",
        )
        return Turn(message_id, fingerprint, as_ours)


async def _wait(delay_s: float, subscriber: Any) -> None:
    """Wait. Raises NackMessage if the subscriber stops during that: others may have the message."""
    until = clock.monotonic() + delay_s
    while (left_s := until - clock.monotonic()) > 0:
        await clock.pause(min(left_s, _LONGEST_SLEEP_S))
        if not subscriber.running:
            raise NackMessage


def _rejected(message_id: str | None, reason: str) -> RejectMessage:
    log_rejected(message_id, reason)
    return RejectMessage()


def _message_id(message: StreamMessage[Any]) -> str | None:
    # FastStream's own property invents an id if the message has none.
    return getattr(message.raw_message, "message_id", None)
