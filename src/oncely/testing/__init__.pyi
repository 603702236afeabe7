from .crashes import kill_at
from .deliveries import pass_time, redeliver, runs_once
from .points import CONSUMER_POINTS, POINTS, RELAY_POINTS, TRANSACTION_POINTS, arm, disarm, reached
from .tools import AdvancingClock, ManualClock, at_once
from .transport_suite import TransportSuite

__all__ = [
    "CONSUMER_POINTS",
    "POINTS",
    "RELAY_POINTS",
    "TRANSACTION_POINTS",
    "AdvancingClock",
    "ManualClock",
    "TransportSuite",
    "arm",
    "at_once",
    "disarm",
    "kill_at",
    "pass_time",
    "reached",
    "redeliver",
    "runs_once",
]
