"""A task's tally: counts rows that were not granted, the same in all modes."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from oncely.core.commands import (
    Busy,
    Duplicate,
    Exhausted,
    Handled,
    InDoubt,
    Mismatch,
    Outcome,
    Waiting,
)
from oncely.core.control import Reject
from oncely.core.errors import MessageError, describe
from oncely.core.errors_by_kind import with_error
from oncely.core.ids import check_id
from oncely.core.policy import Policy
from oncely.core.record import Record
from oncely.spark.sink.counts import Counts
from oncely.spark.sink.message_rows import Row

FIRST_POLL_S = 0.2
"""The first delay before a row that another worker holds is claimed again."""
_LAST_POLL_S = 5.0
MISMATCH = "mismatch: the id was seen before with another body"
REJECTED = f"^({Reject.__name__}|{MessageError.__name__}): "
"""The beginning of a rejected message's error: the name of its type."""


Aside = Callable[[Row, str], None]
"""Puts a row that is not a message into the quarantine, with the reason."""


@dataclass(eq=False)
class RunTally:
    """Counts of one task, added to `counts`. Duplicates of messages first seen at `since` or later
    count as duplicates in the input.
    """

    _policy: Policy
    _aside: Aside
    _since: float
    counts: Counts = field(default_factory=Counts)

    def is_message(self, row: Row) -> bool:
        """Whether the row is a message; sets it aside if not."""
        reason = row.broken
        if reason is None:
            try:
                check_id(row.id)
            except MessageError as error:
                reason = str(error)
        if reason is not None:
            self.set_aside(row, reason)
        return reason is None

    def refused(
        self, outcome: Outcome, row: Callable[[], Row], waited_s: float = 0.0
    ) -> float | None:
        """Count a row that was not granted. If another worker holds it, return the seconds to wait
        before it is claimed again; it has waited for `waited_s` so far.
        """
        match outcome:
            case Busy(_, retry_at):
                # Not for ever: a claim may have no lease.
                if retry_at is not None or waited_s <= (self._policy.lease_s or 0.0):
                    return min(max(waited_s / 4, FIRST_POLL_S), _LAST_POLL_S)
                self.counts.in_doubt += 1
            case InDoubt():
                self.counts.in_doubt += 1
            case Duplicate(record) | Handled(_, record):
                self.duplicates([record.first_seen])
            case Waiting(record) if record.last_seen >= self._since:
                # Its first delivery in this run shows whether it still waits.
                self.counts.duplicates_input += 1
            case Waiting(record):
                self.counts.waiting += 1
                self._note_old(record)
            case Exhausted(record) if re.match(REJECTED, record.error or ""):
                # A rejected message is set aside again.
                self.set_aside(row(), re.sub(REJECTED, "", record.error or ""))
            case Exhausted(record, is_first):
                self.counts.failed += 1
                self.counts.newly_failed += is_first
                self._note_old(record)
            case Mismatch():
                self.set_aside(row(), MISMATCH)
        return None

    def duplicates(self, first_seen: Sequence[float]) -> None:
        """Count duplicates of messages that were first seen at these times."""
        in_input = sum(moment >= self._since for moment in first_seen)
        self.counts.duplicates_input += in_input
        self.counts.duplicates_ledger += len(first_seen) - in_input

    def _note_old(self, record: Record) -> None:
        self.counts.old_errors = with_error(self.counts.old_errors, record.error)

    def erred(self, message_id: str, error: BaseException | None, *, is_again: bool) -> None:
        """Record a failed attempt, in addition to the count of its message; `is_again` if that has
        failed in this run before.
        """
        self.counts.failed_attempts += 1
        if not is_again:
            self.counts.errors = with_error(self.counts.errors, error)
        self.counts.last_error = f"message {message_id[:100]!r}: {describe(error or '', 200)}"

    def set_aside(self, row: Row, reason: str) -> None:
        """Put a row into the quarantine, and count it under its reason."""
        self._aside(row, reason)
        self.counts.set_aside(reason)
