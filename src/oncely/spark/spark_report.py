"""Report: what a run came to."""

from dataclasses import dataclass
from typing import Any

from oncely.spark.sink.counts import Counts


@dataclass
class Report:
    """What is received is, once all is settled, the sum of all the others."""

    counts: Counts
    seconds: float
    stopped: bool = False
    """Told to stop before its input was through; what was not committed is taken up again."""

    @property
    def received(self) -> int:
        """Deliveries."""
        return self.counts.received

    @property
    def handled(self) -> int:
        """Deliveries whose effect this run had."""
        return self.counts.handled

    @property
    def duplicates(self) -> int:
        """Copies, in the input and of what the ledger knew; `counts` tells them apart."""
        return self.counts.duplicates_input + self.counts.duplicates_ledger

    @property
    def quarantined(self) -> int:
        """Rows that were set aside; `counts` has them by reason."""
        return self.counts.quarantined.total()

    @property
    def failed(self) -> int:
        """Deliveries of messages that are not tried again."""
        return self.counts.failed

    @property
    def in_doubt(self) -> int:
        """Deliveries of messages of which nobody knows whether the effect happened."""
        return self.counts.in_doubt

    @property
    def waiting(self) -> int:
        """Deliveries of messages that have failed, and wait in the ledger to be tried again."""
        return self.counts.waiting

    @property
    def has_failures(self) -> bool:
        """Whether messages failed permanently or are in doubt."""
        return bool(self.failed or self.in_doubt)

    def as_dict(self) -> dict[str, Any]:
        """The report under the names that `--json` prints."""
        return {**self.counts.as_dict(), "seconds": round(self.seconds, 3)}
