"""Due retries: failed messages that wait in the ledger, as rows of a task."""

import time
from collections.abc import Sequence
from contextlib import suppress

from oncely.core.durations import Duration
from oncely.core.waiting import WaitingMessage
from oncely.ledger.mailbox import LedgerMailbox
from oncely.lifecycle.claim_keeper import AWAY
from oncely.spark.sink.message_rows import Row
from oncely.stores.store import PutBack

_LOOK_S = 1.0
"""How often a task looks for due retries between its own rows."""


def taken_row(taken: WaitingMessage, number: int) -> Row:
    """The row of a message that was taken from the ledger; its number is not one of the input."""
    given = taken.message
    headers = list(given.headers.items())
    values = (given.id, given.type, given.body, headers, given.source, given.time, given.key)
    return Row(*values, number=number, taken=taken)


class DueRetries:
    """Takes due messages of `queue`; no other worker gets them for the time of `hold`."""

    def __init__(self, mailbox: LedgerMailbox, queue: str, hold: Duration) -> None:
        self._mailbox = mailbox
        self._queue = queue
        self._hold = hold
        self._look_at = time.monotonic() + _LOOK_S

    def take(self, most: int, *, at_once: bool) -> Sequence[WaitingMessage]:
        """At most so many messages; none if the last look was just now, unless `at_once`."""
        if not at_once and time.monotonic() < self._look_at:
            return []
        self._look_at = time.monotonic() + _LOOK_S
        # To look is a cheap read; to take is a write.
        if self._mailbox.free_in_s(self._queue) != 0:
            return []
        return self._mailbox.take(most, self._hold, queue=self._queue)

    def give_back(self, taken: Sequence[WaitingMessage]) -> None:
        """Make these available to others at once, except those that are settled."""
        with suppress(*AWAY):
            left = [PutBack(each, None, 0.0, is_try=False) for each in taken]
            self._mailbox.let_go([], left)
