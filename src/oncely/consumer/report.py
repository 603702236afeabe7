"""ConsumerReport: what a consumer has done."""

from dataclasses import dataclass


@dataclass(slots=True)
class ConsumerReport:
    """Counts of deliveries; `deferred_sent` counts messages."""

    received: int = 0
    handled: int = 0
    """Deliveries whose handler succeeded."""
    duplicates: int = 0
    """Deliveries of messages that were handled before."""
    failed: int = 0
    """Deliveries whose handler failed, and that are not retried."""
    retried: int = 0
    """Deliveries whose handler failed, and that are retried."""
    dead_lettered: int = 0
    """Deliveries that became dead letters: the handler failed, or could not run."""
    deferred_sent: int = 0
    """Deferred messages of handlers that were sent."""
