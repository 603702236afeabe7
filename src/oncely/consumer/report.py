"""ConsumerReport: what a consumer has done."""

from dataclasses import asdict, dataclass, field

from oncely.core.errors_by_kind import Kinds


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
    in_doubt: int = 0
    """Deliveries whose handler failed, and nobody knows whether it had its effect."""
    dead_lettered: int = 0
    """Deliveries that became dead letters: the handler failed, or could not run."""
    deferred_sent: int = 0
    """Deferred messages of handlers that were sent."""
    errors: Kinds = field(default_factory=dict, compare=False)
    """Why attempts failed, and messages were set aside, by kind of error."""

    def counts(self) -> dict[str, int]:
        """The counts by their names, without the errors."""
        return {name: value for name, value in asdict(self).items() if name != "errors"}
