"""DeliveryTurn: a delivery on its way through a consumer."""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from oncely.core.verdicts import Verdict
from oncely.core.waiting import QueuedRow, WaitingMessage
from oncely.lifecycle.turn import Asked, Turn
from oncely.transports.transport import Delivery


class DeliveryTurn(Turn):
    """The turn of a delivery's message, and the handler that takes it, where one does."""

    waits: bool = False
    """Whether it does not run now, and is kept until its time has come: behind another of its
    order, or until somebody is there who takes its type."""
    link: Any = None
    """The connection or session of its transaction, where it has one."""
    took_s: float = 0.0
    """How long its handler has run, and what stands around that."""

    def __init__(self, delivery: Delivery, handler: Callable[..., Any] | None) -> None:
        message = delivery.message
        super().__init__(Asked(message.id, None, message))
        self.delivery = delivery
        self.handler = handler or _never
        self.message = message
        self.deliveries = delivery.count
        self.taken = delivery.tag if isinstance(delivery.tag, WaitingMessage) else None
        self.queued = delivery.tag if isinstance(delivery.tag, QueuedRow) else None

    @property
    def has_handler(self) -> bool:
        """Whether anything here takes messages of its type."""
        return self.handler is not _never

    @property
    def verdict(self) -> Verdict | None:
        """What becomes of it; None before it has ended."""
        return None if self.ending is None else self.ending.verdict

    def start_over(self) -> None:
        """As Turn says."""
        super().start_over()
        self.link = None


current_turn: ContextVar[DeliveryTurn] = ContextVar("oncely_turn")
"""Whose middleware runs in this thread and task."""


def _never(*_: object) -> None:
    raise AssertionError("what nothing takes is not run")
