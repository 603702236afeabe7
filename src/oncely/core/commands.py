"""What can be asked of the rules, and what they answer: commands and outcomes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from oncely.core.policy import Finding, Policy
from oncely.core.record import Claim, Key, Record

# Commands and outcomes are values, made for every message: freezing them would cost a microsecond
# each, and nothing changes them.

# ---- What can be asked -------------------------------------------------------------------------


@dataclass(slots=True)
class Ask:
    """Ask for a claim."""

    key: Key
    policy: Policy
    lease_s: float | None
    token: int
    """Drawn at random by the asker, 0 to 2**39 - 1, once for this asking and its repetitions: the
    birth of what is granted. Who asks again under it is given the same claim again."""
    fingerprint: str | None = None
    metadata: Mapping[str, Any] | None = None
    finding: Finding | None = None
    """What a probe found out about a claim in doubt, where the policy has one."""
    found_at: int | None = None
    """The fence of that claim; None: whichever is in doubt now."""
    count_from: int = 0
    """Where a record that begins here counts its writes from: drawn at random for each repetition,
    up to 2**23, since what two of them write is not to look alike."""
    sent_at: float | None = None
    """When the message was sent, in seconds since 1970; None where that is not known."""
    is_taken: bool = False
    """Whether it is for a message that waited in the ledger, and whose time has come."""


@dataclass(slots=True)
class Held:
    """A command of the holder of a claim."""

    claim: Claim


@dataclass(slots=True)
class Confirm(Held):
    """Ask whether the handler still runs under the claim; nothing is written."""


@dataclass(slots=True)
class MarkHandled(Held):
    """The handler has succeeded; deferred messages may still wait."""

    result: Any = None


@dataclass(slots=True)
class Complete(Held):
    """Handled, and nothing waits any more. A `result` that was kept before stays where this has
    none.
    """

    result: Any = None


@dataclass(slots=True)
class Fail(Held):
    """The handler has failed; `final` when no further try may follow."""

    error: str
    final: bool = False
    retry_s: float | None = None
    """In how many seconds the message is due, where it is kept and waits for that in the ledger."""


@dataclass(slots=True)
class Release(Held):
    """Give the claim back as if it had never been granted."""


@dataclass(slots=True)
class Extend(Held):
    """Renew the lease, counted from now."""

    lease_s: float | None


@dataclass(slots=True)
class Finish:
    """What was deferred is all sent. Whoever sent the last of it may say so: no claim is needed."""


@dataclass(slots=True)
class CountDelivery:
    """A delivery came that asks for no claim: it is counted among the attempts.

    Nothing tells one count from another: where it is repeated after a lost reply, it may count
    twice.
    """


@dataclass(slots=True)
class Reset:
    """An operator allows a failed or in-doubt record to run again."""

    by: str = ""
    why: str = ""
    is_edited: bool = False
    """Whether its content is to be another than it was."""


@dataclass(slots=True)
class Forget:
    """An operator removes a record that nobody works on."""

    version: int | None = None
    """The one that the operator has seen; None for any."""


Command = Ask | Held | Finish | CountDelivery | Reset | Forget

# ---- What is answered --------------------------------------------------------------------------


@dataclass(slots=True)
class Granted:
    """The message is the asker's to process."""

    claim: Claim


@dataclass(slots=True)
class Handled:
    """The handler has run before; the asker may send what is still deferred."""

    claim: Claim


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
    """When it is (store's clock)."""


@dataclass(slots=True)
class Exhausted:
    """The message has failed permanently."""

    record: Record
    is_first: bool = False
    """Whether that was found out by this asking, and nobody was told before."""


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
    """The message was sent before the horizon, and is not in the ledger: it may have been handled,
    and forgotten.
    """

    horizon: float
    """Up to when the consumer's records may have been forgotten (store's clock)."""
    key: Key


@dataclass(slots=True)
class Written:
    """The claim was good, and what was asked is stored. `record` is None after a release of a
    first claim, and after a forget.
    """

    record: Record | None
    is_repeated: bool = False
    """Whether it was stored before, with all that belongs to it: its answer was lost."""


@dataclass(slots=True)
class Fenced:
    """The claim is not the newest of its record; nothing was written."""

    record: Record | None


@dataclass(slots=True)
class Refused:
    """The state of the record does not allow what was asked."""

    record: Record | None


ClaimOutcome = (
    Granted | Handled | Duplicate | Busy | Waiting | Exhausted | InDoubt | Mismatch | TooOld
)
WriteOutcome = Written | Fenced
Outcome = ClaimOutcome | WriteOutcome | Refused
