"""Claims: those of a window of deliveries, asked for in one batch and ended in one batch."""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from oncely._util import clock
from oncely.consuming.turn import DeliveryTurn
from oncely.core.errors import MessageError
from oncely.core.ids import fingerprint_of
from oncely.core.message import Message, check_message
from oncely.engine.async_calls import AsyncCalls
from oncely.engine.inline_calls import InlineCalls, run_inline
from oncely.lifecycle.handling import Handling
from oncely.lifecycle.patience import AWAY, PAUSE_S

_log = logging.getLogger(__name__)

MetadataOf = Callable[[Message], Mapping[str, Any] | None]


class Claims:
    """Asks and ends for the turns of one consumer, as `handling` says.

    `calls` are what handlers ask for steps; `stop` is set when the consumer is to stop.
    """

    def __init__(
        self,
        handling: Handling,
        metadata_of: MetadataOf | None,
        calls: AsyncCalls,
        stop: threading.Event,
    ) -> None:
        self.handling = handling
        self._inline = InlineCalls(handling.ledger)
        self._metadata_of = metadata_of
        self._calls = calls
        self._stop = stop

    def prepare(self, turn: DeliveryTurn) -> None:
        """Find out what the ledger knows the message by; a bad one is refused."""
        message = turn.message
        try:
            check_message(message, needs_id=False)
            turn.asked.fingerprint = fingerprint_of(message.body)
            if self._metadata_of is not None:
                turn.asked.metadata = self._metadata(self._metadata_of, message)
            turn.key = self.handling.key_of(turn.asked)
        except MessageError as error:
            turn.refusal = error

    def _metadata(self, metadata_of: MetadataOf, message: Message) -> Mapping[str, Any] | None:
        try:
            return metadata_of(message)
        except Exception as error:
            raise MessageError(f"its metadata cannot be told: {error!r}") from error

    def begin(self, turns: Sequence[DeliveryTurn]) -> None:
        """Ask for all, until the store answers. Where it is to stop before that, they are left
        without an answer.
        """
        while not self._stop.is_set():
            try:
                run_inline(self.handling.begin(self._inline, turns))
            except AWAY:
                _log.warning("store_is_away", extra={"consumer": self.handling.consumer})
                clock.wait(self._stop, PAUSE_S)
                continue
            for turn in turns:
                if turn.held is not None:
                    turn.held.calls = self._calls
            return

    def end(self, turns: Sequence[DeliveryTurn]) -> None:
        """Store how handlers have ended."""
        run_inline(self.handling.end(self._inline, turns))

    def give_back(self, turns: Sequence[DeliveryTurn]) -> None:
        """Release what has not run to its end, as far as that may run again."""
        run_inline(self.handling.give_back(self._inline, turns))
