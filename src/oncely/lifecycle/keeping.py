"""Keeping: what of a consumer's messages waits in the ledger, to be tried again or for people."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from oncely.core.errors import ExhaustedError, InDoubtError, describe, traced
from oncely.core.message import Message
from oncely.core.record import Key
from oncely.core.verdicts import Delay, SetAside
from oncely.core.waiting import WaitingMessage, digest, retries_of, retry_name
from oncely.lifecycle.turn import Turn

_REASON = 200
"""Letters of it that a copy tells."""


@dataclass(frozen=True, slots=True)
class Keeping:
    """Which messages of `consumer` wait, and as what.

    Where it `is_ordered`, messages of one ordering key are one lane. Copies of dead letters go to
    the `error_queue`, where there is one.
    """

    consumer: str
    is_ordered: bool = False
    error_queue: str | None = None

    @property
    def queue(self) -> str:
        """Where they wait."""
        return retries_of(self.consumer)

    def lane_of(self, message: Message) -> str | None:
        """In which the message waits for others of its key; None where it waits for none."""
        if not self.is_ordered or message.key is None:
            return None
        return digest(self.queue, "key", message.key)

    def key_of(self, turn: Turn) -> Key:
        """Under which what is kept of a turn waits."""
        return turn.key or Key(self.consumer, "")

    def rows_of(self, turn: Turn) -> Sequence[WaitingMessage]:
        """What is to be kept with the end of a turn."""
        if turn.ending is None or turn.asked.message is None:
            return ()
        match turn.ending.verdict:
            case Delay(delay_s):
                row = replace(self._row(turn), delay_s=delay_s)
                # One that only stands behind another was not tried.
                return [replace(row, error=describe(turn.error))] if turn.error else [row]
            case SetAside(reason):
                return self._dead(turn, reason)
            case _:
                return ()

    def _dead(self, turn: Turn, reason: str) -> Sequence[WaitingMessage]:
        error = turn.error or turn.refusal
        text = reason if error is None else traced(error)
        letter = replace(self._row(turn), reason=reason, error=text, is_set_aside=True)
        if self.error_queue is None:
            return [letter]
        headers = {"oncely-consumer": self.consumer, "oncely-reason": reason[:_REASON]}
        message = replace(letter.message, headers={**letter.message.headers, **headers})
        name = f"{random.getrandbits(128):032x}"
        copy = WaitingMessage(message.id, self.error_queue, message, letter.parent, name=name)
        return [letter, copy]

    def _row(self, turn: Turn) -> WaitingMessage:
        message = turn.asked.message
        assert message is not None  # noqa: S101 - asked before.
        attempts = 0 if turn.held is None else turn.held.claim.attempts
        if turn.taken is not None:
            return replace(turn.taken, attempts=attempts, delay_s=0.0)
        name = retry_name(self.queue) if _is_itself(turn) else f"{random.getrandbits(128):032x}"
        return WaitingMessage(
            id=message.id,
            destination="",
            # Its claim is over, and a middleware's changes are for its handler only.
            message=replace(message, claim=None),
            parent=self.key_of(turn),
            attempts=attempts,
            queue=self.queue,
            name=name,
            lane=self.lane_of(message) or digest(self.queue, *(turn.key or ("",)), name),
        )


def _is_itself(turn: Turn) -> bool:
    """Whether it is the message that the ledger knows by that key, and no other under its id."""
    if turn.key is None:
        return False
    own = ExhaustedError | InDoubtError
    return turn.refusal is None or isinstance(turn.refusal, own)
