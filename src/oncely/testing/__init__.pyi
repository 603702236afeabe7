from .crashes import kill_at
from .deliveries import pass_time, redeliver, runs_once
from .meddling import MeddlingStore
from .points import (
    CONSUMER_POINTS,
    POINTS,
    RELAY_POINTS,
    TRANSACTION_POINTS,
    arm,
    disarm,
    reached,
)
from .store_suite import StoreConformance
from .tools import AdvancingClock, ManualClock, at_once, granted
from .transport_suite import TransportConformance

__all__ = [
    "CONSUMER_POINTS",
    "POINTS",
    "RELAY_POINTS",
    "TRANSACTION_POINTS",
    "AdvancingClock",
    "ManualClock",
    "MeddlingStore",
    "StoreConformance",
    "TransportConformance",
    "arm",
    "at_once",
    "disarm",
    "granted",
    "kill_at",
    "pass_time",
    "reached",
    "redeliver",
    "runs_once",
]
