"""RowTurn: the processing of one row of a message DataFrame by a task."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

from oncely._util.forking import end_child
from oncely.core.commands import Duplicate, Exhausted, InDoubt, Waiting
from oncely.core.message import Message, entered
from oncely.core.turn import Turn
from oncely.core.verdicts import Counted, DeadLetter, Ending
from oncely.ledger.driver import Driver
from oncely.lifecycle.handler_context import context_of
from oncely.lifecycle.lifecycle import Lifecycle
from oncely.spark.sink.message_rows import Row


class RowTurn(Turn):
    """The turn of a row's message."""

    def __init__(
        self, row: Row, sent_at: float | None, token: int | None, *, is_compared: bool
    ) -> None:
        super().__init__(row.id, row.fingerprint() if is_compared else None)
        self.row = row
        self.token = token
        self.taken = row.taken
        self._pid = os.getpid()
        self._sent_at = sent_at

    @property
    def sent_at(self) -> float | None:
        """For the claim: when the message was sent, or the horizon for which it may run."""
        return self._sent_at

    def probed(self) -> Message:
        """The message for a probe."""
        return self.row.message(None)

    @property
    def is_dead_unheard(self) -> bool:
        """Whether it is a dead letter that was not stored with its end."""
        if self.claim is not None or self.ending is None:
            return False
        # A row that is not a message goes to the quarantine.
        is_message = self.taken is not None or isinstance(self.outcome, Exhausted | InDoubt)
        return is_message and isinstance(self.ending.verdict, DeadLetter)

    @property
    def is_known_dead(self) -> bool:
        """Whether an earlier delivery was dead-lettered."""
        is_first = isinstance(self.outcome, Exhausted) and self.outcome.is_first
        return self.taken is None and not is_first

    @property
    def was_done_before(self) -> bool:
        """Whether its record got its state by an earlier attempt of this same claim."""
        match self.outcome:
            case Duplicate(record) | Waiting(record):
                return self.token is not None and record.birth == self.token
            case _:
                return False

    @property
    def is_unkept(self) -> bool:
        """Whether it was to be dead-lettered, and could not be."""
        is_dead = isinstance(self.outcome, Exhausted | InDoubt)
        return is_dead and cast(Ending, self.ending).counted is Counted.GIVEN_BACK

    @contextmanager
    def calling(self, driver: Driver, lifecycle: Lifecycle) -> Iterator[Message]:
        """For a block that calls the handler, with the message, its steps and sending. An error of
        the block is noted, and not raised.
        """
        self.message = message = self.row.message(self.claim)
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
