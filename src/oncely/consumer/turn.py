"""DeliveryTurn: the processing of one delivery by a consumer."""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from oncely.core.message import Message
from oncely.core.turn import Turn
from oncely.core.waiting import QueuedRow, WaitingMessage
from oncely.ledger.driver import Driver
from oncely.transports.transport import Delivery


class DeliveryTurn(Turn):
    """The turn of a delivery's message, and its handler; None where no handler here takes it."""

    message: Message

    link: Any = None
    """The connection or session of its transaction, if it has one."""
    driver: Driver | None = None
    """The driver over that transaction."""

    def __init__(self, delivery: Delivery, handler: Callable[..., Any] | None) -> None:
        super().__init__(delivery.message.id, message=delivery.message)
        self.delivery = delivery
        self.handler: Callable[..., Any] | None = handler
        self.deliveries = delivery.count
        self.taken = delivery.tag if isinstance(delivery.tag, WaitingMessage) else None
        self.queued = delivery.tag if isinstance(delivery.tag, QueuedRow) else None

    def begins_anew(self) -> None:
        """As in Turn."""
        super().begins_anew()
        self.link = self.driver = None


current_turn: ContextVar[DeliveryTurn] = ContextVar("oncely_turn")
"""The turn whose middleware runs in this thread and task."""
