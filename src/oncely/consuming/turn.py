"""DeliveryTurn: a delivery on its way through a consumer."""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from oncely.lifecycle.turn import Asked, Turn
from oncely.transports.transport import Delivery


class DeliveryTurn(Turn):
    """The turn of a delivery's message, and the handler that takes it."""

    put_off_s: float | None = None
    """How long it is to wait for another of its order."""
    link: Any = None
    """The connection or session of its transaction, where it has one."""
    took_s: float = 0.0
    """How long its handler has run, and what stands around that."""

    def __init__(self, delivery: Delivery, handler: Callable[..., Any]) -> None:
        message = delivery.message
        super().__init__(Asked(message.id, None, message))
        self.delivery = delivery
        self.handler = handler
        self.message = message
        self.deliveries = delivery.count

    def start_over(self) -> None:
        """As Turn says."""
        super().start_over()
        self.link = None


current_turn: ContextVar[DeliveryTurn] = ContextVar("oncely_turn")
"""Whose middleware runs in this thread and task."""
