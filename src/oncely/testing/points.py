"""The names of the points at which the process of a handler can be killed, and the function by
which a handler reports its own points.
"""

from oncely._util.crash_points import arm, disarm, reached

POINTS = ("after_claim", "before_completed", "after_completed")
"""The points of every handler: under `once`, in a consumer, in a transaction or not."""

TRANSACTION_POINTS = (*POINTS, "before_commit", "after_commit")
"""The points of a handler whose effect and claim are one transaction."""

CONSUMER_POINTS = (*POINTS, "before_acknowledge")
"""The points of a handler that a consumer calls."""

RELAY_POINTS = ("between_sends", "after_publish")
"""The points of a relay, or of a consumer that sends deferred messages itself. The first one is
between two messages.
"""

KNOWN = frozenset((*TRANSACTION_POINTS, *CONSUMER_POINTS, *RELAY_POINTS))
"""All points: one of them may have been meant by an unknown name."""

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
