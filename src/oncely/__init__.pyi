from . import lake, spark
from ._util.version import __version__
from .bridge import BridgeReport, bridge
from .consumer import Consumer
from .consumer.report import ConsumerReport
from .core.commands import (
    Busy,
    ClaimOutcome,
    Duplicate,
    Exhausted,
    Fenced,
    Granted,
    Handled,
    InDoubt,
    Mismatch,
    Refused,
    TooOld,
    Waiting,
    WriteOutcome,
    Written,
)
from .core.control import EffectUnknown, Reject, Retry, Unrecoverable
from .core.durations import Duration
from .core.errors import (
    BrokerRefused,
    BusyError,
    ConfigError,
    ContentionError,
    DuplicateError,
    EndedError,
    ExhaustedError,
    FencedError,
    HandlerDied,
    InDoubtError,
    KeysLocked,
    MessageError,
    MismatchError,
    OncelyError,
    PublishRefused,
    RefusedError,
    StoreDenied,
    StoreError,
    StoreUnavailable,
    TooOldError,
    TransportError,
    UnreadableRow,
    UnstorableMessage,
    WaitingError,
)
from .core.ids import Id
from .core.message import Message, Processing, current
from .core.policy import Finding, Policy, Probe, at_least_once, at_most_once, effectively_once
from .core.record import Claim, Key, Record, State
from .core.unanswered import Unanswered
from .core.waiting import DeadLetter, DeferredMessage, Erased, WaitingMessage
from .ledger.async_ledger import AsyncLedger
from .ledger.inbox import AsyncInbox, Inbox, JoinedTransaction
from .ledger.ledger import Ledger, open_ledger
from .ledger.mailbox import LedgerMailbox, Mailbox
from .lifecycle.results import Serializer
from .lifecycle.transacting import AsyncTransactionSource, TransactionSource
from .lifecycle.work import Work, claimed
from .once import once
from .outbox import Relay, RelayReport, publish
from .stores.store import Backlog, Store
from .transports.open_transport import open_transport
from .transports.transport import Delivery, Transport

__all__ = [
    "AsyncInbox",
    "AsyncLedger",
    "AsyncTransactionSource",
    "Backlog",
    "BridgeReport",
    "BrokerRefused",
    "Busy",
    "BusyError",
    "Claim",
    "ClaimOutcome",
    "ConfigError",
    "Consumer",
    "ConsumerReport",
    "ContentionError",
    "DeadLetter",
    "DeferredMessage",
    "Delivery",
    "Duplicate",
    "DuplicateError",
    "Duration",
    "EffectUnknown",
    "EndedError",
    "Erased",
    "Exhausted",
    "ExhaustedError",
    "Fenced",
    "FencedError",
    "Finding",
    "Granted",
    "Handled",
    "HandlerDied",
    "Id",
    "InDoubt",
    "InDoubtError",
    "Inbox",
    "JoinedTransaction",
    "Key",
    "KeysLocked",
    "Ledger",
    "LedgerMailbox",
    "Mailbox",
    "Message",
    "MessageError",
    "Mismatch",
    "MismatchError",
    "OncelyError",
    "Policy",
    "Probe",
    "Processing",
    "PublishRefused",
    "Record",
    "Refused",
    "RefusedError",
    "Reject",
    "Relay",
    "RelayReport",
    "Retry",
    "Serializer",
    "State",
    "Store",
    "StoreDenied",
    "StoreError",
    "StoreUnavailable",
    "TooOld",
    "TooOldError",
    "TransactionSource",
    "Transport",
    "TransportError",
    "Unanswered",
    "UnreadableRow",
    "Unrecoverable",
    "UnstorableMessage",
    "Waiting",
    "WaitingError",
    "WaitingMessage",
    "Work",
    "WriteOutcome",
    "Written",
    "__version__",
    "at_least_once",
    "at_most_once",
    "bridge",
    "claimed",
    "current",
    "effectively_once",
    "lake",
    "once",
    "open_ledger",
    "open_transport",
    "publish",
    "spark",
]
