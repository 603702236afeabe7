"""Claims: those of a window of deliveries, asked for in one batch and ended in one batch."""

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from oncely._util import clock
from oncely.async_ledger import SteadyLedger
from oncely.consuming.health import Outage
from oncely.consuming.settings import ConsumerSettings, MetadataOf
from oncely.consuming.turn import DeliveryTurn
from oncely.core.errors import MessageError
from oncely.core.ids import fingerprint_of
from oncely.core.message import Message, check_message
from oncely.core.verdicts import SetAside
from oncely.engine.inline_calls import InlineCalls, run_inline
from oncely.lifecycle.handling import Handling
from oncely.lifecycle.patience import AWAY, PAUSE_S


class Claims:
    """Asks and ends for the turns of one consumer, as `handling` says.

    `stop` is set when the consumer is to stop; `outage` is told whether the store is away.
    """

    def __init__(
        self,
        settings: ConsumerSettings,
        handling: Handling,
        stop: threading.Event,
        outage: Outage,
    ) -> None:
        self._handling = handling
        self._metadata_of = settings.metadata_of
        self._inline = InlineCalls(handling.ledger)
        is_async = settings.parts.are_async
        self._calls = SteadyLedger(handling.ledger) if is_async else self._inline
        """What handlers ask for steps."""
        self._stop = stop
        self._outage = outage

    def prepare(self, turn: DeliveryTurn) -> None:
        """Find out what the ledger knows the message by; a bad one is refused."""
        message = turn.message
        try:
            check_message(message, needs_id=False)
            turn.asked.fingerprint = fingerprint_of(message.body)
            if self._metadata_of is not None:
                turn.asked.metadata = _metadata(self._metadata_of, message)
            turn.key = self._handling.key_of(turn.asked)
        except MessageError as error:
            turn.refusal = error

    def begin(self, turns: Sequence[DeliveryTurn]) -> None:
        """Ask for all, until the store answers. Where it is to stop before that, they are left
        without an answer.
        """
        while not self._stop.is_set():
            try:
                run_inline(self._handling.begin(self._inline, turns))
            except AWAY as error:
                self._outage.met(error)
                clock.wait(self._stop, PAUSE_S)
                continue
            self._outage.over()
            for turn in turns:
                if turn.held is not None:
                    turn.held.calls = self._calls
            return

    def end(self, turns: Sequence[DeliveryTurn]) -> None:
        """Store how handlers have ended, and what is to wait of those that did not run."""
        run_inline(self._handling.end(self._inline, turns))
        kept = [turn for turn in turns if turn.waits or _is_dead_unheard(turn)]
        if kept:
            for turn in run_inline(self._handling.keep(self._inline, kept)):
                turn.waits = False

    def give_back(self, turns: Sequence[DeliveryTurn]) -> None:
        """Release what has not run to its end, as far as that may run again."""
        run_inline(self._handling.give_back(self._inline, turns))


def _metadata(metadata_of: MetadataOf, message: Message) -> Mapping[str, Any] | None:
    try:
        return metadata_of(message)
    except Exception as error:
        raise MessageError(f"its metadata cannot be told: {error!r}") from error


def _is_dead_unheard(turn: DeliveryTurn) -> bool:
    """Whether it is a dead letter, and not yet kept as one with its end."""
    return isinstance(turn.verdict, SetAside) and turn.held is None and not turn.waits
