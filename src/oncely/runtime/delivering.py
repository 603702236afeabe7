"""Delivering: takes deliveries from a queue, hands their messages to a handler, settles them."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from oncely.core.errors import (
    BusyError,
    FencedError,
    MessageError,
    OncelyError,
    RefusedError,
    StoreError,
    describe,
)
from oncely.core.message import check_message, fingerprint_of
from oncely.core.record import Key
from oncely.core.rules import is_final, retry_delay_s
from oncely.crashpoints import reached
from oncely.handling.around import Asked, Handling
from oncely.handling.transacting import Begins, run
from oncely.handling.work import Work
from oncely.handling.wrapping import ended
from oncely.outbox import Relay
from oncely.transports.base import Ack, DeadLetter, Delay, Delivery, Transport, Verdict

_log = logging.getLogger(__name__)

_AGAIN_S = 1.0
"""After which a delivery comes again that could not be handled through no fault of its own."""
_WAIT_S = 0.05
"""How long to wait for a delivery before asking whether all are done."""

Handler = Callable[..., Any]


@dataclass(slots=True, kw_only=True)
class Delivering:
    """Brings the messages of `queue` to `handler`, one after another.

    With `begins`, an Engine or sessionmaker, the handler is given a connection besides, and works
    in one transaction with its claim. With a `relay`, what it defers is sent before its delivery
    is acknowledged.
    """

    transport: Transport
    queue: str
    handling: Handling
    handler: Handler
    begins: Begins | None = None
    relay: Relay | None = None

    def drain(self) -> None:
        """Go on until nothing is waiting, delayed or in flight."""
        while not self.transport.is_drained(self.queue):
            for delivery in self.transport.receive(self.queue, 1, _WAIT_S):
                verdict = self.deliver(delivery)
                reached("before_acknowledge")
                self.transport.settle([(delivery, verdict)])

    def deliver(self, delivery: Delivery) -> Verdict:
        """Handle a message; what is to become of its delivery."""
        message = delivery.message
        try:
            check_message(message, needs_id=False)
            asked = Asked(message.id, fingerprint_of(message.body), message)
            key = self.handling.key_of(asked)
        except MessageError as error:
            return DeadLetter(describe(error))
        handler = _Watched(self.handler)
        try:
            is_settled = self._handle(asked, handler)
        except Exception as error:  # noqa: BLE001 - a handler may raise anything.
            if error is handler.error:
                return self._after_failure(error, key, delivery)
            return self._after(error, key, delivery)
        if not is_settled:
            return Delay(_AGAIN_S)
        self._send_deferred(key)
        return Ack()

    def _handle(self, asked: Asked, handler: "_Watched") -> bool:
        """Whether the ledger knows, in the end, what has come of it."""
        if self.begins is not None:
            run(self.handling, self.begins, asked, lambda link: handler(asked.message, link))
            return True
        with Work(self.handling, asked) as work:
            if work.is_new:
                work.result = handler(asked.message)
        return work.is_settled

    def _after(self, error: Exception, key: Key | None, delivery: Delivery) -> Verdict:
        """What follows where the message was not granted, or its end could not be stored."""
        if isinstance(error, BusyError | FencedError | StoreError):
            return Delay(_AGAIN_S)
        if isinstance(error, RefusedError):
            return DeadLetter(describe(error))
        return self._after_failure(error, key, delivery)

    def _after_failure(self, error: Exception, key: Key | None, delivery: Delivery) -> Verdict:
        """What follows a failure, as the ledger has recorded it."""
        _log.warning("handler_failed", exc_info=error)
        try:
            record = None if key is None else self.handling.ledger.find(key)
        except StoreError:
            return Delay(_AGAIN_S)
        policy = self.handling.policy
        if key is None:
            # Nobody but the broker remembers it.
            is_over = is_final(policy, delivery.count, error)
        else:
            is_over = record is not None and record.exhausted
        if is_over:
            return DeadLetter(describe(error))
        return Delay(retry_delay_s(policy, record.attempts if record else delivery.count, error))

    def _send_deferred(self, key: Key | None) -> None:
        if self.relay is None or key is None:
            return
        try:
            self.relay.send_waiting([key])
        except OncelyError:
            # It is stored: a relay sends it later.
            _log.warning("sending_failed", exc_info=True)


class _Watched:
    """A handler of which is known what it raised itself: the same errors mean something else when
    they come from asking for the claim.
    """

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self.error: Exception | None = None

    def __call__(self, *args: Any) -> Any:
        try:
            return ended(self._handler, *args)
        except Exception as error:
            self.error = error
            raise
