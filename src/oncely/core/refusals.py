"""Refusals: why a handler does not run, as an error."""

from datetime import UTC, datetime

from oncely.core.commands import (
    Busy,
    ClaimOutcome,
    Duplicate,
    Exhausted,
    Granted,
    Handled,
    InDoubt,
    Mismatch,
    TooOld,
    Waiting,
)
from oncely.core.errors import (
    BusyError,
    DuplicateError,
    ExhaustedError,
    InDoubtError,
    MismatchError,
    OncelyError,
    TooOldError,
    WaitingError,
)
from oncely.core.shown import utc


def refusal(outcome: ClaimOutcome) -> OncelyError:
    """The error to raise to a caller who is not granted the message."""
    match outcome:
        case Granted(claim) | Handled(claim):
            raise AssertionError(f"{claim.key} is granted")
        case Duplicate(record):
            return DuplicateError(f"{record.key.message_id!r} was processed before")
        case Busy(record):
            id_, end = record.key.message_id, record.lease_until
            until = f"until {utc(end)} unless it is extended" if end else "without an end"
            return BusyError(f"{id_!r} is being processed by another worker, {until}")
        case Waiting(record, due):
            when = datetime.fromtimestamp(due, UTC).isoformat(" ", "seconds")
            return WaitingError(
                f"{record.key.message_id!r} has failed, and waits for a retry: due {when}"
            )
        case Mismatch(record):
            return MismatchError(f"{record.key.message_id!r} was seen before with other content")
        case Exhausted(record, is_first):
            error = ExhaustedError(
                f"{record.key.message_id!r} has failed permanently: {record.error}"
            )
            error.is_first = is_first
            return error
        case InDoubt(record):
            told = "is in doubt: its claim ran out, and it is held until it is settled"
            return InDoubtError(f"{record.key.message_id!r} {told}")
        case TooOld(horizon, key):
            when = datetime.fromtimestamp(horizon, UTC).isoformat(" ", "seconds")
            return TooOldError(
                f"{key.message_id!r} was sent before {when}, and the ledger has forgotten records "
                "from before that time: it may have been handled"
            )
