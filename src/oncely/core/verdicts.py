"""Verdicts: what becomes of a delivery, and what follows from how its turn has ended."""

from dataclasses import dataclass
from enum import Enum, IntEnum, auto
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Ack:
    """It is done with: the broker forgets it."""


@dataclass(frozen=True, slots=True)
class Requeue:
    """Deliver it again at once, to anybody."""


@dataclass(frozen=True, slots=True)
class Delay:
    """Deliver it again, and not before `delay_s` seconds are over."""

    delay_s: float


@dataclass(frozen=True, slots=True)
class SetAside:
    """Set it aside for people. The reason is fit to be stored: `errors.describe` makes it so."""

    reason: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """Refuse it permanently: the queue's own dead-letter exchange takes it."""

    reason: str


Settlement = Ack | Requeue | Refuse
"""What a transport does with a delivery."""

Verdict = Ack | Requeue | Delay | SetAside
"""What becomes of a message that was delivered."""


class Phase(IntEnum):
    """How far a message has come."""

    WAITING = auto()
    STARTED = auto()
    """What stands around the handler has begun."""
    RUNNING = auto()
    """What stands behind the claim has begun."""
    CALLED = auto()
    """The handler itself was called, so that it may have had an effect."""
    STORED = auto()
    """The ledger knows how it ended."""


class Told(Enum):
    """What the ledger is told of the end of a handler."""

    COMPLETED = auto()
    FAILED = auto()
    EXHAUSTED = auto()
    """Failed permanently: no further try is granted."""
    RELEASED = auto()
    NOTHING = auto()
    """Nobody knows how far the handler came: its lease runs out, and the message is in doubt."""


class Counted(Enum):
    """As what a delivery is counted; one of these, always."""

    HANDLED = auto()
    DUPLICATE = auto()
    RETRIED = auto()
    """The handler failed, and is tried again."""
    FAILED = auto()
    """The handler failed permanently."""
    REJECTED = auto()
    """The message is unusable, as its handler or its id says."""
    SET_ASIDE = auto()
    """It is not granted, and never will be without people."""
    SKIPPED = auto()
    """What stands around the handler did not call it."""
    GIVEN_BACK = auto()
    """It is redelivered, through no fault of its own."""


class Ending(NamedTuple):
    """What follows when a message's turn is over."""

    told: Told
    verdict: Verdict
    counted: Counted
