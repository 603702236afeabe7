"""Verdicts: what becomes of a delivery, and what follows from how its turn has ended."""

from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Ack:
    """Acknowledge it: the broker forgets it."""


@dataclass(frozen=True, slots=True)
class Requeue:
    """Deliver it again at once, to any consumer of the queue."""


@dataclass(frozen=True, slots=True)
class Delay:
    """Deliver it again after `delay_s` seconds, not sooner."""

    delay_s: float


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """Set it aside for people. The reason is fit to be stored: `errors.describe` makes it so."""

    reason: str


@dataclass(frozen=True, slots=True)
class Reject:
    """Refuse it permanently: the queue's own dead-letter exchange takes it."""

    reason: str


Acknowledgement = Ack | Requeue | Reject
"""What a transport does with a delivery."""

Verdict = Ack | Requeue | Delay | DeadLetter
"""What becomes of a message that was delivered."""


class End(Enum):
    """What the ledger stores about the end of a handler."""

    COMPLETED = auto()
    FAILED = auto()
    EXHAUSTED = auto()
    """Failed permanently: no further try is granted."""
    IN_DOUBT = auto()
    RELEASED = auto()
    LEFT = auto()
    """Nothing: there is no claim, or its lease runs out, and the message is in doubt."""


KEPT = (End.FAILED, End.EXHAUSTED, End.IN_DOUBT)
"""After these the message itself is kept, where the ledger keeps messages."""


class Counted(Enum):
    """How a delivery is counted: always exactly one of these."""

    HANDLED = auto()
    DUPLICATE = auto()
    RETRIED = auto()
    """The handler failed, and is tried again."""
    FAILED = auto()
    """The handler failed permanently."""
    IN_DOUBT = auto()
    """The handler failed, and nobody knows whether it has had its effect."""
    REJECTED = auto()
    """The message is unusable, as its handler or its id says."""
    SET_ASIDE = auto()
    """Its claim is not granted, and will not be without an operator's help."""
    SKIPPED = auto()
    """A middleware did not call the handler."""
    GIVEN_BACK = auto()
    """It is redelivered, and has not failed."""


class Ending(NamedTuple):
    """What follows when a message's turn is over."""

    end: End
    verdict: Verdict
    counted: Counted
