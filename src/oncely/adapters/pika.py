"""A callback for pika's `basic_consume` that handles each message once."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pika import BasicProperties

from oncely.adapters.attempt import Attempt, check_ledger, log_rejected
from oncely.core.durations import Duration
from oncely.core.errors import ConfigError, describe
from oncely.core.ids import Id, fingerprint_of, id_of_key
from oncely.core.message import Message
from oncely.core.policy import Policy
from oncely.core.turn import Turn
from oncely.core.verdicts import Ack, DeadLetter, Delay, Verdict
from oncely.ledger.ledger import Ledger
from oncely.lifecycle.lifecycle import Lifecycle
from oncely.lifecycle.wrapping import check_function, ended, is_async, name_of
from oncely.once import check_transaction
from oncely.transports.rabbitmq.messages import count_of, message_of, properties_of

Callback = Callable[[Any, Any, BasicProperties, bytes], None]
KeyOf = Callable[[BasicProperties, bytes], Id | None]


def once_callback(
    ledger: Ledger,
    consumer: str,
    handler: Callable[..., Any],
    *,
    key: KeyOf | None = None,
    lease: Duration | None = None,
    policy: Policy = Policy(),
    transaction: Any = None,
) -> Callback:
    """A callback for `basic_consume`, with auto_ack off: runs `handler` once for each message.

    The id is the property `message_id`, or the result of `key` for properties and body. Handled
    messages and duplicates are acknowledged. A message that waits for another worker, for the
    store or for its retry stays unacknowledged, and is handled again later. A message is rejected
    if it is refused, has failed permanently, or if `key` raises: it goes to the queue's dead-letter
    exchange. With `transaction`, a SQLAlchemy Engine or sessionmaker, the handler gets a connection
    or session after the message, in one transaction with the claim. Raises ConfigError for a
    handler that can never run, and for a ledger that was not migrated.
    """
    check_function(handler, "once_callback")
    if is_async(handler):
        raise ConfigError(f"once_callback: {name_of(handler)} is async; pika awaits nothing")
    lifecycle = Lifecycle.under(ledger, consumer, policy, lease)
    check_ledger(lifecycle.ledger)
    if transaction is not None:
        check_transaction(transaction, handler, ledger)
    key_of = key or (lambda properties, _: properties.message_id)
    return _Callback(lifecycle, handler, key_of, transaction)


@dataclass(eq=False)
class _Callback:
    lifecycle: Lifecycle
    handler: Callable[..., Any]
    key_of: KeyOf
    source: Any

    def __call__(self, channel: Any, method: Any, properties: BasicProperties, body: bytes) -> None:
        said = properties_of(properties)
        message = message_of(said, body)
        verdict: Verdict
        try:
            message = replace(message, id=id_of_key(self.key_of(properties, body)) or "")
        except Exception as error:  # noqa: BLE001 - a user's function may raise anything.
            verdict = DeadLetter(f"key: {describe(error)}")
        else:
            verdict = self._verdict(message, count_of(said, method.redelivered))
        match verdict:
            case Ack():
                channel.basic_ack(method.delivery_tag)
            case Delay(delay_s):
                # Not requeued: it would be redelivered at once, and be counted by quorum queues.
                connection = channel.connection
                # A BlockingConnection has timers itself; the other connections use their event
                # loop's.
                is_blocking = hasattr(connection, "call_later")
                again = partial(self._again, channel, method, properties, body)
                (connection if is_blocking else connection.ioloop).call_later(delay_s, again)
            case DeadLetter(reason):
                log_rejected(message.id, reason)
                channel.basic_reject(method.delivery_tag, requeue=False)

    def _again(self, channel: Any, *delivery: Any) -> None:
        # If the channel is closed, the broker has requeued the message.
        if channel.is_open:
            self(channel, *delivery)

    def _verdict(self, message: Message, count: int) -> Verdict:
        turn = Turn(message.id, fingerprint_of(message.body), message)
        turn.deliveries = count
        attempt = Attempt("pika", self.lifecycle, turn, self.source)
        try:
            attempt.run(partial(ended, self.handler, message))
        except Exception as error:  # noqa: BLE001 - a handler may raise anything.
            verdict = attempt.verdict(error)
            if verdict is not None:
                return verdict
            attempt.log_failure(error)
        return attempt.own_verdict
