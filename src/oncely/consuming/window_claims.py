"""Claims of a window of deliveries: asked for in one batch, and ended in one batch."""

import threading
from collections.abc import Sequence

from oncely._util import clock
from oncely.consuming.settings import ConsumerSettings
from oncely.consuming.turn import DeliveryTurn
from oncely.core.errors import MessageError
from oncely.core.ids import fingerprint_of
from oncely.core.message import check_message
from oncely.core.verdicts import DeadLetter
from oncely.ledger.driver import run_inline
from oncely.lifecycle.claim_keeper import AWAY, PAUSE_S
from oncely.lifecycle.lifecycle import Lifecycle


class Claims:
    """Claims and ends the turns of one consumer, as `lifecycle` says.

    `stop` is set when the consumer must stop.
    """

    def __init__(
        self, settings: ConsumerSettings, lifecycle: Lifecycle, stop: threading.Event
    ) -> None:
        self._lifecycle = lifecycle
        self._driver = lifecycle.sync_driver
        self._metadata_of = settings.metadata_of
        self._stop = stop

    def prepare(self, turn: DeliveryTurn) -> None:
        """Find the message's key in the ledger; an invalid message is refused."""
        message = turn.message
        try:
            check_message(message, needs_id=False)
            turn.fingerprint = fingerprint_of(message.body)
            if self._metadata_of is not None:
                try:
                    turn.metadata = self._metadata_of(message)
                except Exception as error:
                    told = f"the function for its metadata failed: {error!r}"
                    raise MessageError(told) from error
            turn.key = self._lifecycle.key_of(turn)
        except MessageError as error:
            turn.refused(error)

    def begin(self, turns: Sequence[DeliveryTurn]) -> None:
        """Claim all, and repeat that until the store answers. If the consumer stops before that,
        the turns have no answer.
        """
        while not self._stop.is_set():
            try:
                run_inline(self._lifecycle.claim(self._driver, turns))
            except AWAY as error:
                self._lifecycle.outage.met(error, "claims")
                clock.wait(self._stop, PAUSE_S)
                continue
            self._lifecycle.outage.over("claims")
            return

    def end(self, turns: Sequence[DeliveryTurn]) -> None:
        """Store the ends of handlers, and the messages that did not run and must wait."""
        run_inline(self._lifecycle.store(self._driver, turns))
        # Dead letters that were not stored with their end, and what waits.
        kept = [
            turn
            for turn in turns
            if turn.waits or (isinstance(turn.verdict, DeadLetter) and turn.claim is None)
        ]
        if kept:
            for turn in run_inline(self._lifecycle.put_aside(self._driver, kept)):
                turn.waits = False

    def give_back(self, turns: Sequence[DeliveryTurn]) -> None:
        """Release the turns that have not run to their end, if they may run again."""
        run_inline(self._lifecycle.give_back(self._driver, turns))
