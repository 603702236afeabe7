from . import spark
from .async_ledger import AsyncLedger
from .consumer import Consumer
from .core.commands import (
    Busy,
    Duplicate,
    Exhausted,
    Fenced,
    Granted,
    Handled,
    InDoubt,
    Mismatch,
    Written,
)
from .core.context import current
from .core.control import Reject, Retry, Unrecoverable
from .core.errors import (
    BusyError,
    ConfigError,
    ContentionError,
    DuplicateError,
    EndedError,
    ExhaustedError,
    FencedError,
    InDoubtError,
    MessageError,
    MismatchError,
    OncelyError,
    RefusedError,
    StoreError,
    StoreUnavailable,
    TooOldError,
    TransportError,
)
from .core.message import Message
from .core.policy import Policy, at_least_once, at_most_once, effectively_once
from .core.record import Claim, Key, Record, State
from .handling.work import claimed
from .ledger import Ledger, open_ledger
from .once import once
from .outbox import Relay
from .transports.opening import open_transport

__all__ = [
    "AsyncLedger",
    "Busy",
    "BusyError",
    "Claim",
    "ConfigError",
    "Consumer",
    "ContentionError",
    "Duplicate",
    "DuplicateError",
    "EndedError",
    "Exhausted",
    "ExhaustedError",
    "Fenced",
    "FencedError",
    "Granted",
    "Handled",
    "InDoubt",
    "InDoubtError",
    "Key",
    "Ledger",
    "Message",
    "MessageError",
    "Mismatch",
    "MismatchError",
    "OncelyError",
    "Policy",
    "Record",
    "RefusedError",
    "Reject",
    "Relay",
    "Retry",
    "State",
    "StoreError",
    "StoreUnavailable",
    "TooOldError",
    "TransportError",
    "Unrecoverable",
    "Written",
    "at_least_once",
    "at_most_once",
    "claimed",
    "current",
    "effectively_once",
    "once",
    "open_ledger",
    "open_transport",
    "spark",
]
