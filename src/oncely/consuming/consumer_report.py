"""ConsumerReport: what a consumer has done."""

from dataclasses import dataclass, fields
from typing import Self


@dataclass(slots=True)
class ConsumerReport:
    """Counts, each of deliveries but for `deferred_sent`."""

    received: int = 0
    handled: int = 0
    """Whose handler succeeded."""
    duplicates: int = 0
    """Of messages that were handled before."""
    failed: int = 0
    """Whose handler failed, and is not tried again."""
    retried: int = 0
    """Whose handler failed, and is tried again."""
    dead_lettered: int = 0
    """Set aside, whether a handler failed or none could run."""
    deferred_sent: int = 0
    """Messages that handlers have sent."""

    def add(self, other: Self) -> None:
        """Count what another consumer has done as well."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))
