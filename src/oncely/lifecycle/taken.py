"""Taken: settles in the ledger the messages that were taken from it for a retry."""

from collections.abc import Sequence

from oncely.core.errors import WaitingError
from oncely.core.turn import Turn
from oncely.core.verdicts import Ack, Delay, End, Requeue
from oncely.core.waiting import WaitingMessage, retry_name
from oncely.ledger.mailbox import LedgerMailbox
from oncely.stores.store import PutBack


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
    return is_own and end in (End.COMPLETED, End.FAILED, End.EXHAUSTED)
