"""Counts: what became of the deliveries of a task, a batch or a run."""

from collections import Counter
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

    def __post_init__(self) -> None:
        # What was `vars` of counts, and JSON on its way, makes them again.
        self.quarantined = Counter(self.quarantined)

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(**{name: count + getattr(other, name) for name, count in vars(self).items()})

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
