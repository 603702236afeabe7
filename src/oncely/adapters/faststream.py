"""A middleware for FastStream that handles each message once."""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from contextlib import ExitStack, closing
from dataclasses import replace
from datetime import datetime
from functools import cache
from inspect import unwrap
from typing import Any

from faststream import AckPolicy, BaseMiddleware, ContextRepo, StreamMessage, exceptions
from faststream.exceptions import AckMessage, IgnoredException, NackMessage, RejectMessage
from faststream.message import SourceType

from oncely._util import clock
from oncely.adapters.attempt import Attempt, StartError, check_ledger, log_rejected
from oncely.adapters.resender import Resender
from oncely.core.durations import Duration
from oncely.core.errors import ConfigError, StoreError, TransportError, describe
from oncely.core.ids import Id, fingerprint_of, id_of_key
from oncely.core.message import Message
from oncely.core.policy import Policy
from oncely.core.turn import AGAIN_S, Turn
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
_SEND_S = 30.0
"""How long a broker has to take a message that is sent again."""
_EARLY, _AGAIN = (AckPolicy.ACK_FIRST, AckPolicy.MANUAL), AckPolicy.NACK_ON_ERROR
# With Confluent's client, the next commit is also of messages that are to be read again.
_LOSES = {"kafka": _EARLY, "nats": _EARLY, "confluent": (*_EARLY, _AGAIN)}
"""FastStream's brokers without dead letters: under which policies they may lose a message."""


def once_middleware(
    ledger: Ledger,
    consumer: str,
    *,
    key: KeyOf | None = None,
    keep_result: KeepResult = False,
    lease: Duration | None = None,
    policy: Policy = Policy(),
    transaction: Any = None,
) -> "OnceMiddleware":
    """For a broker's or router's `middlewares`: each subscriber handles a message once.

    The consumer of a subscriber is `consumer`, a dot and the name of its function. The id is
    RabbitMQ's property `message_id`, elsewhere the header `message-id` or that of a CloudEvent; or
    the result of `key` for a message. A duplicate is acknowledged; if results are kept, the first
    result is published if it was not before, and is the answer to a request. A message that is
    busy, or whose store is unavailable, waits in the worker and is claimed again. A message that is
    refused, or for which `key` raises, is rejected. An error of the handler is recorded and raised
    unchanged: FastStream's AckPolicy decides what follows. If the policy sets tries or backoff, it
    decides instead: the message waits in the worker, is retried, and is rejected in the end.

    Kafka and NATS have no dead letters: what they do not deliver again is one of the ledger, where
    that is in SQL, and a worker sends it again when people retry it. Subscribers that would lose
    messages are refused: await `start(broker)` of the middleware first.

    With `transaction`, a SQLAlchemy AsyncEngine or async_sessionmaker, the handler and the claim
    share a transaction. The handler takes its connection or session from the context:
    `session: Annotated[AsyncSession, Context("oncely_session")]`. Handlers have to be async.
    """
    lifecycle = Lifecycle.under(ledger, consumer, policy, lease, keep_result=keep_result)
    if transaction is not None:
        check_source(transaction, "what FastStream calls", ledger, awaits=True)
    return OnceMiddleware(lifecycle, key or _message_id, transaction)


class OnceMiddleware:
    """Makes a middleware for each message; see `once_middleware`."""

    def __init__(self, like: Lifecycle, key_of: KeyOf, source: Any) -> None:
        self.key_of, self.source, self._ledger = key_of, source, like.ledger
        self.lifecycle_of = cache(lambda name: replace(like, consumer=f"{like.consumer}.{name}"))
        self._resending: dict[Any, asyncio.Task[None]] = {}

    def __call__(self, msg: Any, /, *, context: ContextRepo) -> BaseMiddleware[Any, Any]:
        """The middleware of one message."""
        return _OneMessage(msg, context=context, once=self)

    async def start(self, broker: Any) -> None:
        """To be awaited before the broker starts. Raises ConfigError for a ledger that was not
        migrated or a subscriber that loses messages; then sends again what people retry.
        """
        await asyncio.to_thread(check_ledger, self._ledger)
        for subscriber in broker.subscribers:
            self.check(subscriber)
        self.resend(broker)

    def check(self, subscriber: Any) -> None:
        """Raise ConfigError for a subscriber whose messages cannot be handled once."""
        for each in subscriber.calls if self.source is not None else ():
            handler = unwrap(each.handler._original_call)
            if not is_async(handler):
                raise ConfigError(
                    f"transaction: {name_of(handler)} is not async, and its session is; "
                    "write it with `async def`"
                )
        if subscriber.calls and (loses := _loses(subscriber)):
            policy, name = subscriber.ack_policy, next(iter(subscriber.calls)).name
            if policy in loses:
                why = f"under AckPolicy.{policy.name} a message is lost when its worker dies"
                raise StartError(f"{name}: {why}; write ack_policy=AckPolicy.ACK")
            if "Batch" in type(subscriber).__name__:
                raise StartError(f"{name}: a batch has no id; subscribe without batches")

    def resend(self, broker: Any) -> None:
        """Let a task send again what people retry, unless one does."""
        task = self._resending.get(broker)
        if (task is None or task.done()) and any(map(_loses, broker.subscribers)):
            self._resending[broker] = asyncio.create_task(self._resend(broker))

    async def _resend(self, broker: Any) -> None:
        loop = asyncio.get_running_loop()

        def send(message: Message) -> None:
            # To where it came from, as `_keep_dead` has noted that.
            options: dict[str, Any] = {"headers": {**message.headers}}
            options |= {} if message.key is None else {"key": message.key.encode()}
            options |= {"stream": message.source, "timeout": _SEND_S} if message.source else {}
            sending = broker.publish(message.body, message.type, **options)
            taken = asyncio.run_coroutine_threadsafe(sending, loop).result(_SEND_S)
            if getattr(taken, "duplicate", False):
                raise TransportError("JetStream has dropped it: it still knows the Nats-Msg-Id")

        names = [call.name for each in broker.subscribers for call in each.calls]
        consumers = {self.lifecycle_of(name).consumer for name in names}
        with closing(Resender(self._ledger, "faststream", consumers, send)):
            await asyncio.Event().wait()


class _OneMessage(BaseMiddleware[Any, Any]):
    _attempt: Attempt | None = None

    def __init__(self, msg: Any, /, *, context: ContextRepo, once: OnceMiddleware) -> None:
        super().__init__(msg, context=context)
        self._once = once

    async def consume_scope(self, call_next: _Next, msg: StreamMessage[Any]) -> Any:
        """Call the handler, if the message is new."""
        # The response to a request passes here, too.
        if msg.source_type is not SourceType.CONSUME:
            return await call_next(msg)
        subscriber = self.context.get_local("handler_")
        [first, *_] = subscriber.calls
        lifecycle = self._once.lifecycle_of(first.name)
        serializer = lifecycle.serializer_of(unwrap(first.handler._original_call))
        self._once.resend(self.context.get("broker"))
        ours = _as_ours(msg)
        while True:
            turn = Turn(None, message=ours)
            turn.serializer = serializer
            attempt = Attempt("faststream", lifecycle, turn, self._once.source, is_followed=True)
            try:
                self._once.check(subscriber)
                self._identify(turn, msg, ours)
                delay = await self._attempted(attempt, call_next, msg, lifecycle.policy)
            except Exception as error:
                delay = await self._keep_dead(attempt, msg, error) if _loses(subscriber) else None
                if delay is None:
                    raise
            if delay is None:
                break
            # Not requeued: it would be redelivered at once, and be counted by quorum queues.
            await _wait(delay.delay_s, subscriber)
        if not attempt.has_result or (attempt.is_repeated and not msg.reply_to):
            raise AckMessage
        self._attempt = attempt
        return attempt.result

    async def after_processed(
        self, exc_type: Any = None, exc_val: Any = None, exc_tb: Any = None
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

    async def _keep_dead(self, attempt: Attempt, message: Any, error: Exception) -> Delay | None:
        """Keep the message in the ledger, if FastStream lets the broker forget it after that error;
        return a delay if the store is away, since the message must not be acknowledged then.
        """
        raw, subscriber = message.raw_message, self.context.get_local("handler_")
        cause = error.__cause__ if isinstance(error, RejectMessage) else None
        is_left = isinstance(error, exceptions.HandlerException) or subscriber.ack_policy is _AGAIN
        if is_left and not isinstance(error, RejectMessage):
            return None
        if not isinstance(message.body, bytes):
            await message.nack()  # A batch is left to others.
            return None
        topic, key = (raw.subject, None) if hasattr(raw, "subject") else (raw.topic, raw.key)
        if callable(topic):
            topic, key = raw.topic(), raw.key()
        text = None if key is None else key.decode(errors="backslashreplace")
        source = getattr(getattr(subscriber, "stream", None), "name", "")
        sent = replace(_as_ours(message), type=topic, key=text, source=source)
        try:
            await asyncio.to_thread(attempt.keep_dead, sent, cause or error)
        except StoreError:
            return Delay(AGAIN_S)
        return None

    def _identify(self, turn: Turn, message: StreamMessage[Any], ours: Message) -> None:
        """Find the message's id. Raises RejectMessage if `key` fails."""
        try:
            turn.message_id = id_of_key(self._once.key_of(message))
            turn.fingerprint = fingerprint_of(message.body)
        except Exception as error:
            shown = getattr(message.raw_message, "message_id", message.message_id)
            raise _rejected(shown, describe(error)) from error
        turn.message = replace(ours, id=turn.message_id or "")


def _as_ours(message: StreamMessage[Any]) -> Message:
    sent_at = getattr(message.raw_message, "timestamp", None)
    return Message(
        "",
        message.body,
        headers={name: str(value) for name, value in message.headers.items()},
        time=sent_at if isinstance(sent_at, datetime) else None,
        content_type=message.content_type or "application/octet-stream",
    )


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
    raw, headers = message.raw_message, message.headers
    # FastStream's own property invents an id if the message has none.
    is_amqp = hasattr(raw, "message_id")
    given: str | None = raw.message_id if is_amqp else headers.get("message-id")
    if not (is_amqp or given) and ("ce_id" in headers or "ce-id" in headers):
        return Message.from_cloudevent(headers, message.body).id
    return given


def _loses(subscriber: Any) -> Collection[AckPolicy]:
    return _LOSES.get(type(subscriber).__module__.split(".")[1], ())
