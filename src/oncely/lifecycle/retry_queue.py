"""RetryQueue: where a consumer's messages wait in the ledger, for a retry or for people."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from oncely._util.chance import new_name
from oncely.core.errors import (
    ConfigError,
    ExhaustedError,
    InDoubtError,
    WaitingError,
    describe,
    storable,
    traced,
)
from oncely.core.ids import MAX_ID_LENGTH
from oncely.core.message import Message
from oncely.core.record import Key
from oncely.core.turn import Turn
from oncely.core.verdicts import KEPT, Ack, DeadLetter, Delay, End, Requeue
from oncely.core.waiting import MAX_QUEUE_LENGTH, WaitingMessage, digest, retries_of, retry_name
from oncely.ledger.mailbox import LedgerMailbox
from oncely.stores.store import PutBack

_REASON = 200
"""Characters of a reason in the headers of a copy."""
_WHOLE_ID = "oncely-id"
_FIRST_OF_ID = MAX_ID_LENGTH - 33
"""Characters that are kept of an id that is too long; its digest follows them."""


@dataclass(frozen=True, slots=True)
class RetryQueue:
    """The messages of `consumer` that wait in the ledger, and as which rows.

    Where it `is_ordered`, messages of one ordering key are one lane. Copies of dead letters go to
    the `error_queue`, where there is one.
    """

    consumer: str
    is_ordered: bool = False
    error_queue: str | None = None

    def __post_init__(self) -> None:
        """Raise ConfigError where the consumer's name leaves no room for the queue's."""
        if len(self.consumer) > MAX_QUEUE_LENGTH:
            raise ConfigError(
                f"consumer: a name of {len(self.consumer)} characters is over {MAX_QUEUE_LENGTH}, "
                "and leaves no room for that of its retries; write a shorter name"
            )

    @property
    def name(self) -> str:
        """The name of the queue in the ledger."""
        return retries_of(self.consumer)

    def lane_of(self, message: Message | None) -> str | None:
        """The lane in which the message waits behind others of its ordering key; None where it does
        not have to.
        """
        if not self.is_ordered or message is None or message.key is None:
            return None
        return digest(self.name, "key", message.key)

    def key_of(self, turn: Turn) -> Key:
        """The key under which the message of a turn waits."""
        return turn.key or Key(self.consumer, "")

    def sent_by(self, turn: Turn) -> Key | None:
        """The key under which a turn that has ended may have left messages to be sent; None where
        it has left none.
        """
        is_dead = turn.ending is not None and isinstance(turn.ending.verdict, DeadLetter)
        if is_dead and self.error_queue is not None:
            return self.key_of(turn)
        return turn.key if turn.may_have_sent else None

    def rows_of(self, turn: Turn) -> Sequence[WaitingMessage]:
        """The rows to keep with the end of a turn."""
        if turn.ending is None or turn.message is None:
            return ()
        match turn.ending.verdict:
            case Delay(delay_s):
                row = replace(self._row(turn), delay_s=delay_s)
                # A message that only waits behind another has no error: it was not tried.
                return [replace(row, error=describe(turn.error))] if turn.error else [row]
            case DeadLetter(reason):
                return self.dead_letters(turn, reason)
            case _:
                return ()

    def dead_letters(self, turn: Turn, reason: str) -> Sequence[WaitingMessage]:
        """The rows to keep of a turn that is set aside for people."""
        error = turn.error or turn.refusal
        text = reason if error is None else traced(error)
        letter = replace(self._row(turn), reason=reason, error=text, is_set_aside=True)
        if self.error_queue is None:
            return [letter]
        headers = {"oncely-consumer": self.consumer, "oncely-reason": reason[:_REASON]}
        message = replace(letter.message, headers={**letter.message.headers, **headers})
        name = new_name()
        copy = WaitingMessage(message.id, self.error_queue, message, letter.parent, name=name)
        return [letter, copy]

    def _row(self, turn: Turn) -> WaitingMessage:
        message = turn.message
        assert message is not None  # noqa: S101 - asked before.
        attempts = 0 if turn.claim is None else turn.claim.attempts
        if turn.taken is not None:
            return replace(turn.taken, attempts=attempts, delay_s=0.0)
        # The message of the record with that key, and not another one under its id.
        is_itself = turn.key is not None and isinstance(
            turn.refusal, ExhaustedError | InDoubtError | None
        )
        name = retry_name(self.name) if is_itself else new_name()
        kept = _storable(message)
        return WaitingMessage(
            id=kept.id,
            destination="",
            message=kept,
            parent=self.key_of(turn),
            attempts=attempts,
            queue=self.name,
            name=name,
            lane=self.lane_of(message) or digest(self.name, *(turn.key or ("",)), name),
        )


def _storable(message: Message) -> Message:
    """The message as every store can keep it: a header has the whole id, where that is too long."""
    names = ("id", "type", "source", "content_type", "key")
    texts = {name: value for name in names if isinstance(value := getattr(message, name), str)}
    changed: dict[str, Any] = {
        name: text for name, value in texts.items() if (text := storable(value)) != value
    }
    id_ = changed.get("id", message.id)
    if isinstance(id_, str) and len(id_) > MAX_ID_LENGTH:
        changed["id"] = f"{id_[:_FIRST_OF_ID]}…{digest(id_)}"
        return replace(message, headers={**message.headers, _WHOLE_ID: id_}, **changed)
    return replace(message, **changed) if changed else message


def settle_taken(mailbox: LedgerMailbox, turns: Sequence[Turn]) -> None:
    """Remove the taken messages that are done with, and put back those that wait on. Those that
    were settled in the commit of a handler's end are left alone. Raises StoreError.
    """
    done: list[WaitingMessage] = []
    left: list[PutBack] = []
    for turn in turns:
        if isinstance(turn.refusal, WaitingError):
            continue  # It has failed since it was taken, and waits again.
        match turn.taken, None if turn.ending is None else turn.ending.verdict:
            case WaitingMessage() as taken, Ack() if not _is_stored(turn):
                done.append(taken)
            case WaitingMessage() as taken, Delay(delay_s) if not _is_stored(turn):
                left.append(PutBack(taken, None, delay_s, is_try=False))
            case WaitingMessage() as taken, Requeue() | None:
                left.append(PutBack(taken, None, 0.0, is_try=False))
    if done or left:
        mailbox.let_go(done, left)


def _is_stored(turn: Turn) -> bool:
    """Whether the message was settled in the commit of its handler's end."""
    end = turn.ending.end if turn.ending else End.LEFT
    is_own = turn.taken is not None and turn.taken.name == retry_name(turn.taken.queue)
    return is_own and (end is End.COMPLETED or end in KEPT)
