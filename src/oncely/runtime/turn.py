"""Turn: a delivery on its way through a consumer."""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from oncely.core.record import Key
from oncely.handling.around import Asked, Begun
from oncely.transports.base import Delivery, Verdict


class Turn:
    """What is known of a delivery so far, and the handler that takes it."""

    asked: Asked | None = None
    """What the ledger is asked for; None before, and without a ledger."""
    key: Key | None = None
    """What the ledger knows it by; None where it runs untracked."""
    is_alone: bool = False
    """Whether more is to be asked of the ledger than of the others of its window."""
    begun: Begun | None = None
    """Under which the handler is to run; or what a duplicate gets."""
    may_send: bool = False
    """Whether an earlier run may have left messages to be sent."""
    put_off_s: float | None = None
    """How long it is to wait for another of its order."""
    refusal: Exception | None = None
    """Why the handler does not run."""
    link: Any = None
    """The connection or session of its transaction, where it has one."""
    has_started: bool = False
    """Whether it was begun to be handled, by a middleware or the handler."""
    has_run: bool = False
    """Whether what stands behind `idempotent` has run, or has begun to."""
    is_called: bool = False
    """Whether the handler itself was called, so that it may have had an effect."""
    is_stored: bool = False
    """Whether the ledger knows how it ended."""
    result: Any = None
    error: BaseException | None = None
    """What the handler raised; or a middleware around it, where the handler did not run."""
    took_s: float = 0.0
    verdict: Verdict | None = None
    """What is to become of the delivery, once that is known."""

    def __init__(self, delivery: Delivery, handler: Callable[..., Any]) -> None:
        # The rest stands in the class until it is known: one is made for each delivery.
        self.delivery = delivery
        self.handler = handler
        self.message = delivery.message

    def start_over(self) -> None:
        """Forget what has happened in a transaction that is undone."""
        self.begun = self.refusal = self.link = self.result = self.error = None
        self.has_started = self.has_run = self.is_called = self.may_send = False


current_turn: ContextVar[Turn] = ContextVar("oncely_turn")
"""Whose middleware runs in this thread and task."""
