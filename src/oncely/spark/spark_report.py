"""Report: the results of a run."""

from dataclasses import dataclass
from typing import Any

from oncely.spark.sink.counts import Counts


@dataclass
class Report:
    """Once all is settled, `received` is the sum of all the others."""

    counts: Counts
    seconds: float
    stopped: bool = False
    """Whether the run was stopped before its end; the next run continues what is not committed."""

    @property
    def received(self) -> int:
        """Deliveries."""
        return self.counts.received

    @property
    def handled(self) -> int:
        """Deliveries that this run handled."""
        return self.counts.handled

    @property
    def duplicates(self) -> int:
        """Copies in the input, and of messages already in the ledger; `counts` has both."""
        return self.counts.duplicates

    @property
    def quarantined(self) -> int:
        """Rows that were set aside; `counts` has them by reason."""
        return self.counts.quarantined.total()

    @property
    def failed(self) -> int:
        """Deliveries of messages that are not retried."""
        return self.counts.failed

    @property
    def in_doubt(self) -> int:
        """Deliveries of messages in doubt: it is not known whether the effect happened."""
        return self.counts.in_doubt

    @property
    def waiting(self) -> int:
        """Deliveries of failed messages that wait in the ledger for a retry."""
        return self.counts.waiting

    @property
    def has_failures(self) -> bool:
        """Whether messages failed permanently or are in doubt."""
        return bool(self.failed or self.in_doubt)

    def as_dict(self) -> dict[str, Any]:
        """The report under the names that `--json` prints."""
        return {**self.counts.as_dict(), "seconds": round(self.seconds, 3)}
