"""How a handler's run over one row ended: what is to be stored, and counted, for it."""

import json
from collections.abc import Callable, Sequence
from enum import IntEnum, auto
from typing import Any, NamedTuple

from oncely.core.context import entered
from oncely.core.control import Reject
from oncely.core.deferred import DeferredMessage
from oncely.core.errors import MessageError, reason_of
from oncely.core.message import Message
from oncely.core.policy import Policy
from oncely.core.record import Claim
from oncely.core.rules import is_final, retry_delay_s
from oncely.handling.held_message import HeldMessage
from oncely.spark.sink.rows import Row


class Kind(IntEnum):
    """What is to be stored for the end of a run, in the order in which it is stored."""

    DONE = auto()
    SENDING = auto()
    """Done, and what the handler has sent is to be stored with that."""
    REJECTED = auto()
    FAILED = auto()
    """For good."""
    LEFT = auto()
    """Failed, and by policy not tried again; what a redelivery meets is the policy's to say."""
    AGAIN = auto()
    """Failed, and to be tried again."""
    UNBEGUN = auto()
    """The claim ran out before its turn came: the handler was not called."""

    @property
    def is_final(self) -> bool:
        """Whether it is a failure after which no try is granted."""
        return self in (Kind.REJECTED, Kind.FAILED)


class End(NamedTuple):
    """How the handler's run over one row ended."""

    row: Row
    claim: Claim
    kind: Kind
    result: Any = None
    error: Exception | None = None
    delay_s: float = 0.0
    """For AGAIN: how long to wait."""
    deferred: Sequence[DeferredMessage] = ()
    """For SENDING."""
    stored: bool = False
    """Whether the ledger took it; where not, another worker has the claim."""


def run_handler(
    row: Row, held: HeldMessage, message: Message, call: Callable[[Message], Any], policy: Policy
) -> End:
    """Call the handler, so that the message has steps and can be sent; what came of it."""
    try:
        try:
            with entered(held):
                result = call(message)
        finally:
            deferred = held.end()
        if policy.results == "keep":
            # As it is now: what a handler returns may be changed by its next run.
            result = json.loads(json.dumps(result, allow_nan=False))
    except Exception as error:  # noqa: BLE001 - a handler may raise anything.
        return ended_badly(row, held.claim, error, policy)
    kind = Kind.SENDING if deferred else Kind.DONE
    return End(row, held.claim, kind, result, deferred=deferred)


def ended_badly(row: Row, claim: Claim, error: Exception, policy: Policy) -> End:
    """What follows where the handler raised `error` under `claim`."""
    if isinstance(error, Reject | MessageError):
        return End(row, claim, Kind.REJECTED, error=Reject(reason_of(error)))
    if is_final(policy, claim.attempts, error):
        return End(row, claim, Kind.FAILED, error=error)
    if policy.on_failed != "retry":
        return End(row, claim, Kind.LEFT, error=error)
    delay_s = retry_delay_s(policy, claim.attempts, error)
    return End(row, claim, Kind.AGAIN, error=error, delay_s=delay_s)


def results_of(ends: Sequence[End], policy: Policy) -> Sequence[Any] | None:
    """What the handlers returned, where that is kept."""
    return [end.result for end in ends] if policy.results == "keep" else None
