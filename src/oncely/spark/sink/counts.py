"""Counts: what became of the deliveries of a task, a batch or a run."""

from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any

MAX_REASONS = 50
"""So many are counted by name, however many tasks and batches there are."""
OTHER_REASONS = "other reasons"
_REASON_LENGTH = 200


@dataclass
class Counts:
    """What is received is, once all is settled, the sum of all the others."""

    received: int = 0
    handled: int = 0
    duplicates_input: int = 0
    """Copies of what was first seen in the same run."""
    duplicates_ledger: int = 0
    """Copies of what the ledger knew before the run."""
    quarantined: Counter[str] = field(default_factory=Counter)
    """By reason."""
    failed: int = 0
    in_doubt: int = 0
    waiting: int = 0
    """Failed, and kept in the ledger to be tried again."""
    errors: int = field(default=0, compare=False)
    """Of those that failed or wait: whose handler ran now. The others were known to have failed."""
    last_error: str = field(default="", compare=False)
    """One of those errors, behind the id of its message."""

    def __post_init__(self) -> None:
        # What was `vars` of counts, and JSON on its way, makes them again.
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
        """Count what was quarantined under its reason, or under `OTHER_REASONS`."""
        name = reason if len(reason) <= _REASON_LENGTH else reason[: _REASON_LENGTH - 1] + "…"
        is_counted = name in self.quarantined or len(self.quarantined) < MAX_REASONS
        self.quarantined[name if is_counted else OTHER_REASONS] += count

    @property
    def new(self) -> int:
        """Deliveries that are not duplicates."""
        return self.settled - self.duplicates_input - self.duplicates_ledger

    @property
    def settled(self) -> int:
        """Deliveries of which it is known what became of them."""
        duplicates = self.duplicates_input + self.duplicates_ledger
        broken = self.quarantined.total()
        settled = self.handled + duplicates + broken + self.failed
        return settled + self.in_doubt + self.waiting

    def in_words(self) -> str:
        """What became of those that were not handled."""
        parts = {
            "failed": self.failed,
            "waiting to be tried again": self.waiting,
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
