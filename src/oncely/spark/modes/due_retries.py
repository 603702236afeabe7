"""Due retries: messages that have failed before and wait in the ledger, as rows of a task."""

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Self

from oncely.core.durations import Duration
from oncely.core.message import Message
from oncely.core.record import Claim
from oncely.core.waiting import WaitingMessage
from oncely.engine.mailbox import LedgerMailbox
from oncely.lifecycle.patience import AWAY
from oncely.spark.sink.message_rows import Row
from oncely.stores.store import PutBack

_LOOK_S = 1.0
"""How often a task looks for them between its own rows."""


class TakenRow(Row):
    """A message as it waited in the ledger."""

    _taken: WaitingMessage

    @classmethod
    def of(cls, taken: WaitingMessage, number: int) -> Self:
        """The row of what was taken there; its number is none of the input."""
        given = taken.message
        headers = list(given.headers.items())
        row = cls(
            given.id,
            given.type,
            given.body,
            headers,
            given.source,
            given.time,
            given.key,
            None,
            None,
            number,
        )
        row._taken = taken
        return row

    @property
    def taken(self) -> WaitingMessage:
        """As what it waited."""
        return self._taken

    def message(self, claim: Claim | None) -> Message:
        """The message as it was kept, with what no column holds."""
        return replace(self._taken.message, claim=claim)


class DueRetries:
    """Takes what is due in `queue`; nobody else is given it for the time of `hold`."""

    def __init__(self, mailbox: LedgerMailbox, queue: str, hold: Duration) -> None:
        self._mailbox = mailbox
        self._queue = queue
        self._hold = hold
        self._look_at = time.monotonic() + _LOOK_S

    def take(self, most: int, *, at_once: bool) -> Sequence[WaitingMessage]:
        """At most so many; none where it is not `at_once` and it was looked for just now."""
        if not at_once and time.monotonic() < self._look_at:
            return []
        self._look_at = time.monotonic() + _LOOK_S
        # A look costs nobody anything; to take is a write.
        if self._mailbox.free_in_s(self._queue) != 0:
            return []
        return self._mailbox.take(most, self._hold, queue=self._queue)

    def give_back(self, taken: Sequence[WaitingMessage]) -> None:
        """Let others have these at once; not those of which it is settled what becomes of them."""
        with suppress(*AWAY):
            left = [PutBack(each, None, 0.0, is_try=False) for each in taken]
            self._mailbox.let_go([], left)
