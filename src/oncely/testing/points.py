"""The points at which the process that handles a message can be killed: their names, and the
function by which a handler tells of its own.
"""

from oncely._util.crash_points import arm, disarm, reached

POINTS = ("after_claim", "before_completed", "after_completed")
"""Those that every handler meets: under `once`, in a consumer, in a transaction or not."""

TRANSACTION_POINTS = (*POINTS, "before_commit", "after_commit")
"""Those of a handler whose effect and claim are one transaction."""

CONSUMER_POINTS = (*POINTS, "before_acknowledge")
"""Those of a handler that a consumer calls."""

RELAY_POINTS = ("between_sends", "after_publish")
"""Those of whoever sends deferred messages: a relay, or the consumer itself. The first is met
between two messages.
"""

KNOWN = frozenset((*TRANSACTION_POINTS, *CONSUMER_POINTS, *RELAY_POINTS))
"""What a name may have been meant for."""

__all__ = [
    "CONSUMER_POINTS",
    "KNOWN",
    "POINTS",
    "RELAY_POINTS",
    "TRANSACTION_POINTS",
    "arm",
    "disarm",
    "reached",
]
