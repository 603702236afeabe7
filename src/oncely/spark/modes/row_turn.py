"""RowTurn: a row of a message DataFrame on its way through a task."""

from collections.abc import Callable
from typing import Any

from oncely.core.message import Message, entered
from oncely.core.verdicts import Phase
from oncely.engine.request import json_value
from oncely.lifecycle.held_message import HeldMessage
from oncely.lifecycle.turn import Asked, Turn
from oncely.spark.sink.message_rows import Row


class RowTurn(Turn):
    """The turn of a row's message."""

    def __init__(self, row: Row, sent_at: float | None, *, is_compared: bool) -> None:
        super().__init__(Asked(row.id, row.fingerprint() if is_compared else None))
        self.row = row
        self._sent_at = sent_at

    @property
    def sent_at(self) -> float | None:
        """As it is asked for: when the message was sent, or the horizon for which it may run."""
        return self._sent_at

    def probed(self) -> Message:
        """What a probe is asked with."""
        return self.row.message(None)

    def run(self, held: HeldMessage, call: Callable[[Message], Any], *, keeps_result: bool) -> None:
        """Call the handler, so that the message has steps and can be sent; note how that ended."""
        held.message = message = self.row.message(held.claim)
        self.phase = Phase.CALLED
        try:
            with entered(held):
                result = call(message)
            # As it is now: what a handler returns may be changed by its next run.
            self.result = json_value(result) if keeps_result else None
        except BaseException as error:  # noqa: BLE001 - a handler may raise anything.
            self.error = error
        finally:
            held.end()
