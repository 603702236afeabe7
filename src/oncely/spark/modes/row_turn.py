"""RowTurn: a row of a message DataFrame on its way through a task."""

import os
from collections.abc import Callable
from typing import Any, cast

from oncely._util.forking import end_child
from oncely.core.commands import Duplicate, Exhausted, InDoubt, Waiting
from oncely.core.message import Message, entered
from oncely.core.verdicts import Counted, Ending, Phase, SetAside
from oncely.engine.request import json_value
from oncely.lifecycle.held_message import HeldMessage
from oncely.lifecycle.turn import Asked, Turn
from oncely.spark.sink.message_rows import Row


class RowTurn(Turn):
    """The turn of a row's message."""

    def __init__(
        self, row: Row, sent_at: float | None, token: int | None, *, is_compared: bool
    ) -> None:
        super().__init__(Asked(row.id, row.fingerprint() if is_compared else None))
        self.row = row
        self.token = token
        self.taken = row.taken
        self._pid = os.getpid()
        self._sent_at = sent_at

    @property
    def sent_at(self) -> float | None:
        """As it is asked for: when the message was sent, or the horizon for which it may run."""
        return self._sent_at

    def probed(self) -> Message:
        """What a probe is asked with."""
        return self.row.message(None)

    @property
    def is_dead_unheard(self) -> bool:
        """Whether it is for people, and was not kept for them with its end."""
        if self.held is not None or self.ending is None:
            return False
        # What is not a message of the source is for the quarantine.
        is_message = self.taken is not None or isinstance(self.outcome, Exhausted | InDoubt)
        return is_message and isinstance(self.ending.verdict, SetAside)

    @property
    def is_known_dead(self) -> bool:
        """Whether it was set aside by an earlier delivery."""
        is_first = isinstance(self.outcome, Exhausted) and self.outcome.is_first
        return self.taken is None and not is_first

    @property
    def was_done_before(self) -> bool:
        """Whether its record was brought to where it is under this very asking."""
        match self.outcome:
            case Duplicate(record) | Waiting(record):
                return self.token is not None and record.birth == self.token
            case _:
                return False

    @property
    def is_unkept(self) -> bool:
        """Whether it was to be kept for people, and could not be."""
        is_dead = isinstance(self.outcome, Exhausted | InDoubt)
        return is_dead and cast(Ending, self.ending).counted is Counted.GIVEN_BACK

    def run(self, held: HeldMessage, call: Callable[[Message], Any], *, keeps_result: bool) -> None:
        """Call the handler, so that the message has steps and can be sent; note how that ended."""
        message = self._entering(held)
        try:
            with entered(held):
                result = call(message)
            # As it is now: what a handler returns may be changed by its next run.
            self.result = json_value(result) if keeps_result else None
        except BaseException as error:  # noqa: BLE001 - a handler may raise anything.
            self.error = error
        finally:
            self._leaving(held)

    async def run_async(
        self, held: HeldMessage, call: Callable[[Message], Any], *, keeps_result: bool
    ) -> None:
        """The same for a handler that is async."""
        message = self._entering(held)
        try:
            with entered(held):
                result = await call(message)
            self.result = json_value(result) if keeps_result else None
        except BaseException as error:  # noqa: BLE001 - a handler may raise anything.
            self.error = error
        finally:
            self._leaving(held)

    def _entering(self, held: HeldMessage) -> Message:
        held.message = self.asked.message = message = self.row.message(held.claim)
        self.phase = Phase.CALLED
        return message

    def _leaving(self, held: HeldMessage) -> None:
        if os.getpid() != self._pid:
            # What follows is the parent's.
            end_child(self.error)
        held.end()
