"""A task's tally: what is counted for rows that were not granted, the same in all modes."""

from oncely.core.control import Reject
from oncely.core.policy import Policy
from oncely.core.record import Record
from oncely.spark.sink.counts import Counts
from oncely.spark.sink.quarantine import Quarantine
from oncely.spark.sink.rows import Row

FIRST_POLL_S = 0.2
"""How soon what another worker holds is asked about again, at first."""
_LAST_POLL_S = 5.0
MISMATCH = "mismatch: the id was seen before with another body"
REJECTED = f"{Reject.__name__}: "
"""What the error of a rejected message starts with: it is kept behind the name of its type."""
MAX_REASONS = 50
"""So many are counted by name."""
OTHER_REASONS = "other reasons"


class Tally:
    """Counts of one task. Duplicates of what was first seen `since` then are in the input."""

    def __init__(self, policy: Policy, quarantine: Quarantine, since: float) -> None:
        self.counts = Counts()
        self._policy = policy
        self._quarantine = quarantine
        self._since = since

    def busy(self, waited_s: float, *, ends: bool) -> float | None:
        """How long to wait before another worker's claim is asked about again, in seconds; None
        where it is counted now: not for ever where a claim has no end.
        """
        if self._policy.on_busy == "discard":
            self.counts.duplicates_input += 1
        elif not ends and waited_s > (self._policy.lease_s or 0.0):
            self.counts.in_doubt += 1
        else:
            return min(max(waited_s / 4, FIRST_POLL_S), _LAST_POLL_S)
        return None

    def duplicate(self, record: Record) -> None:
        """Count a copy of what `record` says is done."""
        if record.first_seen >= self._since:
            self.counts.duplicates_input += 1
        else:
            self.counts.duplicates_ledger += 1

    def exhausted(self, row: Row, record: Record) -> None:
        """Count a message that has failed for good; what was rejected is set aside again."""
        error = record.error or ""
        if error.startswith(REJECTED):
            self.set_aside(row, error.removeprefix(REJECTED))
        else:
            self.counts.failed += 1

    def set_aside(self, row: Row, reason: str) -> None:
        """Put a row into the quarantine, and count it under its reason."""
        self._quarantine.add(row, reason)
        known = reason in self.counts.quarantined or len(self.counts.quarantined) < MAX_REASONS
        self.counts.quarantined[reason if known else OTHER_REASONS] += 1
