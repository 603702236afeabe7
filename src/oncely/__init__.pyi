from .async_ledger import AsyncLedger
from .core.control import Reject, Retry, Unrecoverable
from .core.errors import (
    BusyError,
    ConfigError,
    ContentionError,
    ExhaustedError,
    FencedError,
    InDoubtError,
    MessageError,
    MismatchError,
    OncelyError,
    RefusedError,
    StoreError,
    StoreUnavailable,
)
from .core.message import Message
from .core.policy import Policy, at_least_once, at_most_once, effectively_once
from .core.record import Claim, Key, Record, State
from .core.rules import (
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
from .ledger import Ledger, open_ledger
from .once import once

__all__ = [
    "AsyncLedger",
    "Busy",
    "BusyError",
    "Claim",
    "ConfigError",
    "ContentionError",
    "Duplicate",
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
    "Retry",
    "State",
    "StoreError",
    "StoreUnavailable",
    "Unrecoverable",
    "Written",
    "at_least_once",
    "at_most_once",
    "effectively_once",
    "once",
    "open_ledger",
]
