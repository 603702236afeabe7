"""Counts: what became of the deliveries of a task, a batch or a run."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Counts:
    """received = handled + duplicates + quarantined + failed + in_doubt, once all are settled."""

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

    def add(self, other: "Counts") -> None:
        """Count what `other` counted as well."""
        self.received += other.received
        self.handled += other.handled
        self.duplicates_input += other.duplicates_input
        self.duplicates_ledger += other.duplicates_ledger
        self.quarantined.update(other.quarantined)
        self.failed += other.failed
        self.in_doubt += other.in_doubt

    @property
    def settled(self) -> int:
        """Deliveries of which it is known what became of them."""
        duplicates = self.duplicates_input + self.duplicates_ledger
        broken = self.quarantined.total()
        return self.handled + duplicates + broken + self.failed + self.in_doubt

    def as_dict(self) -> dict[str, Any]:
        """The counts under the names that `--json` prints."""
        return {
            "received": self.received,
            "handled": self.handled,
            "duplicates": {"input": self.duplicates_input, "ledger": self.duplicates_ledger},
            "quarantined": dict(sorted(self.quarantined.items())),
            "failed": self.failed,
            "in_doubt": self.in_doubt,
        }

    @classmethod
    def from_dict(cls, counts: Mapping[str, Any]) -> "Counts":
        """The inverse of `as_dict`."""
        return cls(
            received=counts["received"],
            handled=counts["handled"],
            duplicates_input=counts["duplicates"]["input"],
            duplicates_ledger=counts["duplicates"]["ledger"],
            quarantined=Counter(counts["quarantined"]),
            failed=counts["failed"],
            in_doubt=counts["in_doubt"],
        )
