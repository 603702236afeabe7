"""Counts: the results of the deliveries of a task, a batch or a run; and a run's report."""

from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any

MAX_REASONS = 50
"""The most reasons that are counted by name, over all tasks and batches."""
OTHER_REASONS = "other reasons"
_REASON_LENGTH = 200


@dataclass
class Counts:
    """Once all is settled, `received` is the sum of all the others."""

    received: int = 0
    handled: int = 0
    duplicates_input: int = 0
    """Copies of messages first seen in the same run."""
    duplicates_ledger: int = 0
    """Copies of messages that the ledger knew before the run."""
    quarantined: Counter[str] = field(default_factory=Counter)
    """Quarantined rows by reason."""
    failed: int = 0
    in_doubt: int = 0
    waiting: int = 0
    """Failed messages that wait in the ledger for a retry."""
    errors: int = field(default=0, compare=False)
    """Failed and waiting messages whose handler ran in this run; others had failed before."""
    last_error: str = field(default="", compare=False)
    """One of those errors, after the id of its message."""

    def __post_init__(self) -> None:
        # So that `vars` of counts, sent as JSON, makes counts again.
        self.quarantined = Counter(self.quarantined)

    def __add__(self, other: "Counts") -> "Counts":
        numbers = {
            each.name: getattr(self, each.name) + getattr(other, each.name)
            for each in fields(self)
            if each.name not in {"quarantined", "last_error"}
        }
        last_error = other.last_error or self.last_error
        total = Counts(quarantined=self.quarantined, last_error=last_error, **numbers)
        for reason, count in other.quarantined.items():
            total.set_aside(reason, count)
        return total

    def set_aside(self, reason: str, count: int = 1) -> None:
        """Count quarantined rows under their reason, or under `OTHER_REASONS`."""
        name = reason if len(reason) <= _REASON_LENGTH else reason[: _REASON_LENGTH - 1] + "…"
        is_counted = name in self.quarantined or len(self.quarantined) < MAX_REASONS
        self.quarantined[name if is_counted else OTHER_REASONS] += count

    @property
    def duplicates(self) -> int:
        """Copies in the input, and of messages already in the ledger."""
        return self.duplicates_input + self.duplicates_ledger

    @property
    def new(self) -> int:
        """Deliveries that are not duplicates."""
        broken = self.quarantined.total()
        return self.handled + broken + self.failed + self.in_doubt + self.waiting

    @property
    def settled(self) -> int:
        """Deliveries whose result is known."""
        # Asked for each message: a sum without calls.
        waiting = self.in_doubt + self.waiting
        known = self.handled + self.duplicates_input + self.duplicates_ledger
        return known + self.quarantined.total() + self.failed + waiting

    def in_words(self) -> str:
        """The counts of messages that were not handled, as text."""
        parts = {
            "failed": self.failed,
            "waiting for a retry": self.waiting,
            "in doubt": self.in_doubt,
            "quarantined": self.quarantined.total(),
        }
        said = ", ".join(f"{count:,} {name}" for name, count in parts.items() if count)
        return f"{said}; last error: {self.last_error}" if self.last_error else said

    def as_dict(self) -> dict[str, Any]:
        """The counts under the names that `--json` prints."""
        return {
            "received": self.received,
            "handled": self.handled,
            "duplicates": {"input": self.duplicates_input, "ledger": self.duplicates_ledger},
            "quarantined": dict(sorted(self.quarantined.items())),
            "failed": self.failed,
            "in_doubt": self.in_doubt,
            "waiting": self.waiting,
        }


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
