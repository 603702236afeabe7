"""DeliveryTurn: the processing of one delivery by a consumer."""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from oncely.core.message import Message
from oncely.core.turn import Turn
from oncely.core.verdicts import Verdict
from oncely.core.waiting import QueuedRow, WaitingMessage
from oncely.ledger.driver import Driver
from oncely.transports.transport import Delivery


class DeliveryTurn(Turn):
    """The turn of a delivery's message, and its handler, if there is one."""

    message: Message

    waits: bool = False
    """Whether it does not run now, but waits: behind another message of its order, or for a worker
    that takes its type."""
    link: Any = None
    """The connection or session of its transaction, if it has one."""
    driver: Driver | None = None
    """The driver over that transaction."""
    took_s: float = 0.0
    """Seconds that its handler, with the middleware, has run."""

    def __init__(self, delivery: Delivery, handler: Callable[..., Any] | None) -> None:
        super().__init__(delivery.message.id, message=delivery.message)
        self.delivery = delivery
        self.handler = handler or _never
        self.deliveries = delivery.count
        self.taken = delivery.tag if isinstance(delivery.tag, WaitingMessage) else None
        self.queued = delivery.tag if isinstance(delivery.tag, QueuedRow) else None

    @property
    def has_handler(self) -> bool:
        """Whether a handler here takes messages of its type."""
        return self.handler is not _never

    @property
    def verdict(self) -> Verdict | None:
        """How it has ended; None before that."""
        return None if self.ending is None else self.ending.verdict

    def begins_anew(self) -> None:
        """As in Turn."""
        super().begins_anew()
        self.link = self.driver = None


current_turn: ContextVar[DeliveryTurn] = ContextVar("oncely_turn")
"""The turn whose middleware runs in this thread and task."""


def _never(*_: object) -> None:
    raise AssertionError("a message without a handler does not run")
