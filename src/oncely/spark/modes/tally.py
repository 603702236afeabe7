"""A task's tally: what is counted for rows that were not granted, the same in all modes."""

import re
from collections.abc import Callable

from oncely.core.commands import (
    Busy,
    Duplicate,
    Exhausted,
    Handled,
    InDoubt,
    Mismatch,
    Outcome,
)
from oncely.core.control import Reject
from oncely.core.errors import MessageError
from oncely.core.policy import Policy
from oncely.core.record import Claim
from oncely.spark.sink.counts import Counts
from oncely.spark.sink.message_rows import Row
from oncely.spark.sink.quarantine import Quarantine

FIRST_POLL_S = 0.2
"""How soon what another worker holds is asked about again, at first."""
_LAST_POLL_S = 5.0
MISMATCH = "mismatch: the id was seen before with another body"
REJECTED = f"^({Reject.__name__}|{MessageError.__name__}): "
"""How the error of a rejected message begins: it is kept behind the name of its type."""
MAX_REASONS = 50
"""So many are counted by name."""
OTHER_REASONS = "other reasons"


class RunTally:
    """Counts of one task. Duplicates of what was first seen `since` then are in the input."""

    def __init__(self, policy: Policy, quarantine: Quarantine, since: float) -> None:
        self.counts = Counts()
        self._policy = policy
        self._quarantine = quarantine
        self._since = since

    def refused(
        self, outcome: Outcome, row: Callable[[], Row], waited_s: float = 0.0
    ) -> float | None:
        """Count a row that was not granted; of what another worker holds, return how long to wait
        before it is asked about again, in seconds, where that went on for `waited_s`.
        """
        match outcome:
            case Busy(_, retry_at):
                # Not for ever where a claim has no end.
                if retry_at is not None or waited_s <= (self._policy.lease_s or 0.0):
                    return min(max(waited_s / 4, FIRST_POLL_S), _LAST_POLL_S)
                self.counts.in_doubt += 1
            case InDoubt():
                self.counts.in_doubt += 1
            case Duplicate(record) | Handled(Claim(record)):
                if record.first_seen >= self._since:
                    self.counts.duplicates_input += 1
                else:
                    self.counts.duplicates_ledger += 1
            case Exhausted(record):
                self._exhausted(row, record.error or "")
            case Mismatch():
                self.set_aside(row(), MISMATCH)
        return None

    def _exhausted(self, row: Callable[[], Row], error: str) -> None:
        """Count a message that has failed permanently; what was rejected is set aside again."""
        if re.match(REJECTED, error):
            self.set_aside(row(), re.sub(REJECTED, "", error))
        else:
            self.counts.failed += 1

    def set_aside(self, row: Row, reason: str) -> None:
        """Put a row into the quarantine, and count it under its reason."""
        self._quarantine.add(row, reason)
        known = reason in self.counts.quarantined or len(self.counts.quarantined) < MAX_REASONS
        self.counts.quarantined[reason if known else OTHER_REASONS] += 1
