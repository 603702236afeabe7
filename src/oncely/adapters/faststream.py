"""A middleware for FastStream that handles each message once."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from datetime import datetime
from functools import cache, partial
from typing import Any

from faststream import BaseMiddleware, ContextRepo, StreamMessage
from faststream.exceptions import AckMessage, RejectMessage
from faststream.message import SourceType

from oncely.adapters.attempt import Attempt
from oncely.core.durations import Duration
from oncely.core.errors import describe
from oncely.core.ids import Id, fingerprint_of, id_of_key
from oncely.core.message import Message
from oncely.core.policy import Policy
from oncely.core.verdicts import DeadLetter, Delay
from oncely.ledger import Ledger
from oncely.lifecycle.handling import Handling
from oncely.lifecycle.turn import Asked, Turn

_log = logging.getLogger(__name__)

KeyOf = Callable[[StreamMessage[Any]], Id | None]
_Next = Callable[[StreamMessage[Any]], Awaitable[Any]]


def once_middleware(
    ledger: Ledger,
    consumer: str,
    *,
    key: KeyOf | None = None,
    keep_result: bool = False,
    lease: Duration | None = None,
    policy: Policy = Policy(),
) -> Callable[..., BaseMiddleware[Any, Any]]:
    """For a broker's or router's `middlewares`: each subscriber handles a message once.

    Subscribers have records of their own: `consumer`, a dot and the name of the function. The id
    is the `message_id` of RabbitMQ's properties, or what `key` gives for a message. A duplicate is
    acknowledged; where results are kept, its result is published as the first one's. What is busy,
    or meets a store that is away, waits and asks again. What is refused, or where `key` raises, is
    rejected. An error of the handler is recorded and raised as it was: FastStream's AckPolicy
    decides what follows.
    """
    handling = Handling.under(ledger, consumer, policy, lease, keep_result=keep_result)
    handling_of = cache(lambda function: replace(handling, consumer=f"{consumer}.{function}"))
    return partial(_OneMessage, handling_of=handling_of, key_of=key or _message_id)


class _OneMessage(BaseMiddleware[Any, Any]):
    """What surrounds the handling, or publishing, of one message."""

    def __init__(
        self,
        msg: Any,
        /,
        *,
        context: ContextRepo,
        handling_of: Callable[[str], Handling],
        key_of: KeyOf,
    ) -> None:
        super().__init__(msg, context=context)
        self._handling_of = handling_of
        self._key_of = key_of

    async def consume_scope(self, call_next: _Next, msg: StreamMessage[Any]) -> Any:
        """Call the handler, if the message is new."""
        # The answer to a request comes by here as well.
        if msg.source_type is not SourceType.CONSUME:
            return await call_next(msg)
        [first, *_] = self.context.get_local("handler_").calls
        handling = self._handling_of(first.name)
        asked = self._asked(msg)
        attempt = Attempt(handling, Turn(asked))
        while (delay := await _attempted(attempt, call_next, msg)) is not None:
            # Not requeued: it would be redelivered at once, and be counted by quorum queues.
            await asyncio.sleep(delay.delay_s)
            attempt = Attempt(handling, Turn(asked))
        if not attempt.has_result:
            raise AckMessage
        return attempt.result

    def _asked(self, message: StreamMessage[Any]) -> Asked:
        """What the ledger is asked with. Raises RejectMessage where that cannot be told."""
        try:
            message_id = id_of_key(self._key_of(message))
            fingerprint = fingerprint_of(message.body)
        except Exception as error:
            raise _rejected(_message_id(message), describe(error)) from error
        return Asked(message_id, fingerprint, _as_ours(message_id, message))


async def _attempted(
    attempt: Attempt, call_next: _Next, message: StreamMessage[Any]
) -> Delay | None:
    """After what the message is to be tried again; None where it is done."""
    try:
        async with attempt:
            if attempt.is_new:
                attempt.result = await call_next(message)
    except Exception as error:
        match attempt.verdict(error):
            case Delay() as delay:
                return delay
            case DeadLetter(reason):
                raise _rejected(attempt.turn.asked.message_id, reason) from error
            case None:
                raise
    return None


def _rejected(message_id: str | None, reason: str) -> RejectMessage:
    _log.warning("rejected", extra={"message_id": message_id, "reason": reason})
    return RejectMessage()


def _message_id(message: StreamMessage[Any]) -> str | None:
    # FastStream's own makes up an id where there is none.
    return getattr(message.raw_message, "message_id", None)


def _as_ours(message_id: str | None, message: StreamMessage[Any]) -> Message:
    sent_at = getattr(message.raw_message, "timestamp", None)
    headers: Mapping[str, Any] = message.headers
    return Message(
        message_id or "",
        message.body,
        headers={name: str(value) for name, value in headers.items()},
        time=sent_at if isinstance(sent_at, datetime) else None,
        content_type=message.content_type or "application/octet-stream",
    )
