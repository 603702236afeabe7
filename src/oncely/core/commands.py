"""What can be asked of the rules, and what they answer: commands and outcomes."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from operator import attrgetter
from typing import Any, NamedTuple

from oncely.core.policy import Finding, Policy
from oncely.core.record import Claim, Key, Record

# Commands and outcomes are values, made for every message: freezing them would cost a microsecond
# each, and nothing changes them.

# ---- What can be asked -------------------------------------------------------------------------


class Company(Enum):
    """What else is at risk in the process of whoever asks for a message, should its handler kill
    that process.
    """

    NONE = auto()
    """Nothing that the rules know of: each death costs the message an attempt."""
    WINDOW = auto()
    """The others of a window. A message that may have killed a worker is not granted."""
    AGAIN = auto()
    """The same, and the message was delivered before: its handler may have begun in a transaction,
    which leaves no record."""
    ALONE = auto()
    """Nothing: the message may have killed a worker. Only deaths of claims like this one cost it an
    attempt."""


class Acquire(NamedTuple):
    """Ask for a claim."""

    key: Key
    policy: Policy
    lease_s: float | None
    token: int
    """Drawn at random by the asker, 0 to 2**39 - 1, once for this command and its repetitions. It
    becomes the birth of the claim: whoever asks again with it is given the same claim again."""
    fingerprint: str | None = None
    metadata: Mapping[str, Any] | None = None
    finding: Finding | None = None
    """What a probe found out about a claim in doubt, where the policy has a probe."""
    found_at: int | None = None
    """The fence of that claim; None: whichever claim is in doubt now."""
    count_from: int = 0
    """The number from which a new record counts its writes: drawn at random for each repetition, up
    to 2**23, so that the records of two repetitions have different versions."""
    sent_at: float | None = None
    """When the message was sent, in seconds since 1970; None where that is not known."""
    is_taken: bool = False
    """Whether it is for a message that waited in the ledger, and was taken from there."""
    company: Company = Company.NONE
    is_ahead: bool = False
    """Whether it is committed before the transaction of its handler begins. Where the worker dies,
    that is rolled back: the effect has not happened, and the message is not in doubt."""
    worker: int | None = None
    """The number of the process that asks."""


@dataclass(slots=True)
class Held:
    """A command of the holder of a claim."""

    claim: Claim

    key = property(attrgetter("claim.key"), doc="The key of the claim's record.")


@dataclass(slots=True)
class Confirm(Held):
    """Ask whether the handler still runs under the claim; nothing is written."""


@dataclass(slots=True)
class MarkHandled(Held):
    """The handler has succeeded; deferred messages may still wait."""

    result: Any = None


@dataclass(slots=True)
class Complete(Held):
    """Handled, and no deferred message waits any more. Without a `result`, one that was kept before
    stays.
    """

    result: Any = None


@dataclass(slots=True)
class Fail(Held):
    """The handler has failed; `final` when no further try may follow."""

    error: str
    final: bool = False
    retry_s: float | None = None
    """Seconds until the retry is due, where the message waits for it in the ledger; else None."""


@dataclass(slots=True)
class Doubt(Held):
    """The handler has raised, and nobody knows whether it has had its effect."""

    error: str


@dataclass(slots=True)
class Release(Held):
    """Give the claim back as if it had never been granted."""


@dataclass(slots=True)
class Extend(Held):
    """Renew the lease, counted from now."""

    lease_s: float | None


@dataclass(slots=True)
class Unclaimed:
    """A command about a record that needs no claim."""

    key: Key


@dataclass(slots=True)
class Finish(Unclaimed):
    """All deferred messages are sent. Whoever sent the last one may say so: no claim is needed."""

    found: Record | None = None
    """The record, where it was read before in the same transaction."""


@dataclass(slots=True)
class CountDelivery(Unclaimed):
    """A delivery came that asks for no claim: count it as an attempt.

    Where this is repeated after a lost reply, one delivery may be counted twice.
    """


@dataclass(slots=True)
class Reset(Unclaimed):
    """An operator allows a failed or in-doubt record to run again."""

    by: str = ""
    why: str = ""
    is_edited: bool = False
    """Whether the message now has other content: the old fingerprint is forgotten."""
    fence: int | None = None
    """Of the claim that the operator has looked at; None for any."""
    is_kept: bool = False
    """Whether its message waits in the ledger, from where a worker takes it."""


@dataclass(slots=True)
class Happened(Unclaimed):
    """An operator says that the effect of a record in doubt has happened: it is done."""

    by: str = ""
    why: str = ""
    fence: int | None = None
    """As Reset has it."""


@dataclass(slots=True)
class Discard(Unclaimed):
    """An operator ends a waiting retry: the message has failed permanently."""

    by: str = ""
    why: str = ""


@dataclass(slots=True)
class Forget(Unclaimed):
    """An operator removes a record that no worker processes."""

    version: int | None = None
    """The one that the operator has seen; None for any."""


@dataclass(slots=True)
class EndClaim(Unclaimed):
    """An operator says that the worker which holds the claim is dead: the message is in doubt."""

    by: str = ""
    why: str = ""
    version: int | None = None
    """Of the record that the operator has seen; None for any."""


OperatorCommand = Reset | Happened | Discard | Forget | EndClaim
"""What a person decides: whoever sends it is not a worker."""
Command = Acquire | Held | Unclaimed
"""Each has the key of its record."""

# ---- What is answered --------------------------------------------------------------------------


@dataclass(slots=True)
class Granted:
    """The asker may process the message."""

    claim: Claim


@dataclass(slots=True)
class Handled:
    """The handler has succeeded before; the asker may send the messages that are still deferred."""

    claim: Claim
    record: Record


@dataclass(slots=True)
class Duplicate:
    """Nothing is left to do."""

    record: Record


@dataclass(slots=True)
class Busy:
    """Another worker holds a live claim until `retry_at` (store's clock; None: no end is set)."""

    record: Record
    retry_at: float | None


@dataclass(slots=True)
class Waiting:
    """The message has failed, and waits in the ledger until it is tried again."""

    record: Record
    due: float
    """When the retry is due (store's clock)."""


@dataclass(slots=True)
class Exhausted:
    """The message has failed permanently."""

    record: Record
    is_first: bool = False
    """Whether this is the first answer that says so."""


@dataclass(slots=True)
class InDoubt:
    """An earlier claim ran out, and the policy does not let the message run again unasked."""

    record: Record


@dataclass(slots=True)
class Mismatch:
    """The id was seen before with another payload."""

    record: Record


@dataclass(slots=True)
class TooOld:
    """The message was sent before the horizon, and has no record: it may have been handled, and its
    record forgotten.
    """

    horizon: float
    """Up to when the consumer's records may have been forgotten (store's clock)."""
    key: Key


@dataclass(slots=True)
class Written:
    """The claim was good, and what was asked is stored."""

    version: int | None
    """The record's from now on; None where it is removed, as after the release of a first claim."""
    is_repeated: bool = False
    """Whether an earlier call stored it, with all that belongs to it, and its answer was lost."""
    record: Record | None = None
    """The record from now on, where it was read: a claim's holder does not need that."""


@dataclass(slots=True)
class Fenced:
    """The claim is not the newest of its record; nothing was written."""

    record: Record | None


@dataclass(slots=True)
class Refused:
    """The state of the record does not allow what was asked."""

    record: Record | None


@dataclass(slots=True)
class Suspect:
    """The message may have killed a worker: it is to be asked for alone."""

    record: Record | None


ClaimOutcome = (
    Granted | Handled | Duplicate | Busy | Waiting | Exhausted | InDoubt | Mismatch | TooOld
)
WriteOutcome = Written | Fenced
Outcome = ClaimOutcome | Suspect | WriteOutcome | Refused
"""A Suspect is answered to windows alone."""
