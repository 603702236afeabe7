"""RowTurn: the processing of one row of a message DataFrame by a task."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from oncely._util.forking import end_child
from oncely.core.commands import Busy, Exhausted, InDoubt, Suspect, TooOld
from oncely.core.message import Message, entered
from oncely.core.turn import Turn, seconds_since_1970
from oncely.ledger.driver import Driver
from oncely.lifecycle.handler_context import context_of
from oncely.lifecycle.lifecycle import Lifecycle
from oncely.spark.sink.message_rows import Row


class RowTurn(Turn):
    """The turn of a row's message, until the row is settled."""

    held_since: float | None = None
    """`time.monotonic()` when it was first found that another worker holds the message."""

    passed: float | None = None
    """The horizon for which an older message may run."""
    source: Any = None
    """The rows of which it is one, where the task needs them."""

    def __init__(self, row: Row, token: int) -> None:
        super().__init__(row.id)
        self.row = row
        self.token = token
        self.taken = row.taken
        self._pid = os.getpid()

    @property
    def sent_at(self) -> float | None:
        """For the claim: when the message was sent, or the horizon for which it may run. If the
        ledger forgets more in the meantime, the message is too old again.
        """
        if self.is_due:
            return None
        return seconds_since_1970(self.row.time) if self.passed is None else self.passed

    def probed(self) -> Message:
        """The message for a probe."""
        return self.row.message()

    def begins_anew(self) -> None:
        """As in Turn; but the token stays where nothing can have been granted for it."""
        token, held_since = None, None
        if isinstance(self.outcome, Busy | Suspect | TooOld):
            token, held_since = self.token, self.held_since
        super().begins_anew()
        self.token, self.held_since = token, held_since

    @property
    def is_dead_unheard(self) -> bool:
        """As in Turn; but a row that is not a message goes to the quarantine."""
        is_message = self.taken is not None or isinstance(self.outcome, Exhausted | InDoubt)
        return is_message and super().is_dead_unheard

    @contextmanager
    def calling(self, driver: Driver, lifecycle: Lifecycle) -> Iterator[Message]:
        """For a block that calls the handler, with the message, its steps and sending. An error of
        the block is noted, and not raised.
        """
        self.message = message = self.row.message()
        context = context_of(self, driver, lifecycle)
        self.called()
        try:
            with entered(context):
                yield message
                context.check_awaited()
        except BaseException as error:  # noqa: BLE001 - a handler may raise anything.
            context.check_awaited(error)
            self.raised(error)
        finally:
            if os.getpid() != self._pid:
                # In a forked child: the rest is the parent's.
                end_child(self.error)
            context.end()
