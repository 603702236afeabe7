"""Verdicts: what is to become of a delivery whose message was not handled."""

from oncely.core.errors import (
    BusyError,
    FencedError,
    MessageError,
    RefusedError,
    StoreError,
    describe,
)
from oncely.core.policy import Policy
from oncely.core.record import Record
from oncely.core.rules import is_final, retry_delay_s
from oncely.transports.base import DeadLetter, Delay

AGAIN_S = 1.0
"""After which a delivery comes again that could not be handled through no fault of its own."""


def after_refusal(error: Exception, *, is_begun: bool) -> Delay | DeadLetter | None:
    """What follows an error that is not the handler's own: `is_begun` where that was granted.

    None where it is a failure of the message all the same, which the ledger has recorded, and for
    what is no error of the message's processing at all.
    """
    if isinstance(error, BusyError | FencedError | StoreError):
        return Delay(AGAIN_S)
    # Once it is begun, it is the handler's result that is unusable.
    if isinstance(error, RefusedError) or (isinstance(error, MessageError) and not is_begun):
        return DeadLetter(describe(error))
    return None


def after_failure(
    policy: Policy, record: Record | None, count: int, error: BaseException
) -> Delay | DeadLetter:
    """What follows a failure, as the ledger has recorded it.

    `count` is how often the message was delivered: it decides where there is no record, as of a
    message that is not tracked.
    """
    attempts = count if record is None else record.attempts
    is_over = is_final(policy, count, error) if record is None else record.exhausted
    return DeadLetter(describe(error)) if is_over else Delay(retry_delay_s(policy, attempts, error))
