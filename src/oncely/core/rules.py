"""Every rule of the ledger, in one pure function: `decide(record, command, now)`.

`TABLE`, at the end of this file, is the specification. A row is a command, a column is where the
record stands when the command arrives, and the cell is the rule that answers. A command that
carries a claim reaches the table only when its fence is the newest of the record; otherwise the
answer is Fenced.

    standing    the record is
    ABSENT      not there
    HELD        processing, and its lease has not run out
    IN_DOUBT    processing, and its lease has run out: nobody knows whether the effect happened
    SENDING     handled, and somebody holds it to send what was deferred
    UNSENT      handled, and nobody holds it
    FAILED      failed; another try may follow
    EXHAUSTED   failed for good
    COMPLETED   done
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import IntEnum
from typing import Any, NamedTuple

from oncely.core.control import Reject, Unrecoverable
from oncely.core.policy import Finding, Policy
from oncely.core.record import Claim, Key, Record, State, first_version

# Commands and outcomes are values, made for every message: freezing them would cost a microsecond
# each, and nothing changes them.

# ---- What can be asked -------------------------------------------------------------------------


@dataclass(slots=True)
class Ask:
    """Ask for a claim."""

    key: Key
    policy: Policy
    lease_s: float | None
    draw: int
    """A random number of up to 39 bits: the birth of what is granted."""
    fingerprint: str | None = None
    metadata: Mapping[str, Any] | None = None
    finding: Finding | None = None
    """What a probe found out about the claim in doubt, where the policy has one."""


@dataclass(slots=True)
class Held:
    """A command of the holder of a claim."""

    claim: Claim


@dataclass(slots=True)
class MarkHandled(Held):
    """The handler has succeeded; deferred messages may still wait. Renews the lease."""


@dataclass(slots=True)
class Complete(Held):
    """Handled, and nothing waits any more."""

    result: Any = None


@dataclass(slots=True)
class Fail(Held):
    """The handler has failed; `final` when no further try may follow."""

    error: str
    final: bool = False


@dataclass(slots=True)
class Release(Held):
    """Give the claim back as if it had never been granted."""


@dataclass(slots=True)
class Extend(Held):
    """Renew the lease, counted from now."""

    lease_s: float | None


@dataclass(slots=True)
class Reset:
    """An operator allows a failed or in-doubt record to run again."""

    by: str = ""
    why: str = ""


@dataclass(slots=True)
class Forget:
    """An operator removes a record that nobody works on."""

    version: int | None = None
    """The one that the operator has seen; None for any."""


Command = Ask | Held | Reset | Forget

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
class Exhausted:
    """The message has failed for good."""

    record: Record


@dataclass(slots=True)
class InDoubt:
    """An earlier claim ran out, and the policy does not let the message run again unasked."""

    record: Record


@dataclass(slots=True)
class Mismatch:
    """The id was seen before with another payload."""

    record: Record


@dataclass(slots=True)
class Written:
    """The claim was good, and what was asked is stored. `record` is None after a release of a
    first claim, and after a forget.
    """

    record: Record | None


@dataclass(slots=True)
class Fenced:
    """The claim is not the newest of its record; nothing was written."""

    record: Record | None


@dataclass(slots=True)
class Refused:
    """The state of the record does not allow what the operator asked."""

    record: Record | None


ClaimOutcome = Granted | Handled | Duplicate | Busy | Exhausted | InDoubt | Mismatch
WriteOutcome = Written | Fenced
Outcome = ClaimOutcome | WriteOutcome | Refused


class Decision(NamedTuple):
    """An answer, and what is to be stored for it to become true."""

    outcome: Outcome
    new: Record | None
    """The record itself when nothing changes, None when it is to be removed."""
    optional: bool = False
    """The answer holds even when `new` cannot be stored."""


# ---- Where a record stands ---------------------------------------------------------------------


class Standing(IntEnum):
    """The columns of the table."""

    ABSENT = 0
    HELD = 1
    IN_DOUBT = 2
    SENDING = 3
    UNSENT = 4
    FAILED = 5
    EXHAUSTED = 6
    COMPLETED = 7


PURGEABLE = (State.COMPLETED, State.FAILED)
"""Records in processing, and those with deferred messages waiting, are never purged."""


def standing(record: Record | None, now: float) -> Standing:
    """Where `record` stands at `now`, by the store's clock."""
    if record is None:
        return Standing.ABSENT
    match record.state:
        case State.COMPLETED:
            return Standing.COMPLETED
        case State.FAILED:
            return Standing.EXHAUSTED if record.exhausted else Standing.FAILED
        case State.PROCESSING:
            return Standing.HELD if _lives(record, now) else Standing.IN_DOUBT
        case State.HANDLED:
            return Standing.SENDING if _lives(record, now) else Standing.UNSENT


def _lives(record: Record, now: float) -> bool:
    return record.lease_until is None or now < record.lease_until


def decide(record: Record | None, command: Command, now: float) -> Decision:
    """Answer `command` for `record` as it is stored, at `now` by the store's clock."""
    if isinstance(command, Held) and not _is_newest(command.claim, record):
        return Decision(Fenced(record), record)
    if isinstance(command, Ask) and record is not None and _differs(record, command):
        return Decision(Mismatch(record), record)
    return TABLE[type(command)][standing(record, now)](record, command, now)


def _is_newest(claim: Claim, record: Record | None) -> bool:
    return record is not None and record.fence == claim.fence and record.birth == claim.record.birth


def _differs(record: Record, ask: Ask) -> bool:
    return (
        ask.policy.on_mismatch != "ignore"
        and ask.fingerprint is not None
        and record.fingerprint is not None
        and ask.fingerprint != record.fingerprint
    )


def is_final(policy: Policy, claim: Claim, error: BaseException) -> bool:
    """Whether no further try may follow the failure of a handler under `claim`."""
    return isinstance(error, Unrecoverable | Reject) or policy.is_spent(claim.attempts)


# ---- Rules for asking --------------------------------------------------------------------------


def _grant_first(_: None, ask: Ask, now: float) -> Decision:
    record = Record(
        key=ask.key,
        state=State.PROCESSING,
        attempts=1,
        fence=1,
        first_seen=now,
        last_seen=now,
        lease_until=_lease_end(ask.lease_s, now),
        metadata=ask.metadata,
        fingerprint=ask.fingerprint,
        version=first_version(ask.draw),
    )
    return Decision(Granted(Claim(record, ask.lease_s)), record)


def _grant_again(record: Record, ask: Ask, now: float) -> Decision:
    # A message that kills its worker never reaches Fail: attempts are counted and limited here.
    if ask.policy.is_spent(record.attempts):
        return _exhaust(record, f"gave up after {record.attempts} attempts", now)
    new = record._replace(
        state=State.PROCESSING,
        attempts=record.attempts + 1,
        fence=record.fence + 1,
        last_seen=now,
        lease_until=_lease_end(ask.lease_s, now),
        fingerprint=record.fingerprint or ask.fingerprint,
        version=first_version(ask.draw),
    )
    return Decision(Granted(Claim(new, ask.lease_s, record)), new)


def _grant_sending(record: Record, ask: Ask, now: float) -> Decision:
    # No attempt is counted: the handler does not run again.
    new = record._replace(
        fence=record.fence + 1,
        last_seen=now,
        lease_until=_lease_end(ask.lease_s, now),
        version=first_version(ask.draw),
    )
    return Decision(Handled(Claim(new, ask.lease_s, record)), new)


def _busy(record: Record, _: Ask, __: float) -> Decision:
    return Decision(Busy(record, record.lease_until), record)


def _duplicate(record: Record, _: Ask, now: float) -> Decision:
    counted = record._replace(
        duplicates=record.duplicates + 1, last_seen=now, version=record.version + 1
    )
    return Decision(Duplicate(record), counted, optional=True)


def _exhausted(record: Record, _: Ask, __: float) -> Decision:
    return Decision(Exhausted(record), record)


def _after_failure(record: Record, ask: Ask, now: float) -> Decision:
    match ask.policy.on_failed:
        case "retry":
            return _grant_again(record, ask, now)
        case "skip":
            return Decision(Duplicate(record), record)
        case "dead_letter":
            return _exhaust(record, None, now)


def _after_doubt(record: Record, ask: Ask, now: float) -> Decision:
    match ask.policy.on_in_doubt:
        case "retry":
            return _grant_again(record, ask, now)
        case "hold":
            return Decision(InDoubt(record), record)
        case "dead_letter":
            return _exhaust(record, "in doubt: a claim ran out", now)
        case _:
            return _after_probe(record, ask, now)


def _after_probe(record: Record, ask: Ask, now: float) -> Decision:
    match ask.finding:
        case "happened":
            new = record._replace(
                state=State.COMPLETED, lease_until=None, last_seen=now, version=record.version + 1
            )
            return Decision(Duplicate(new), new)
        case "not_happened":
            return _grant_again(record, ask, now)
        case _:
            return Decision(InDoubt(record), record)


def _exhaust(record: Record, error: str | None, now: float) -> Decision:
    new = _failed(record, error, now, exhausted=True)
    return Decision(Exhausted(new), new)


# ---- Rules for the holder of a claim -----------------------------------------------------------


def _fenced(record: Record, _: Command, __: float) -> Decision:
    return Decision(Fenced(record), record)


def _again(record: Record, _: Command, __: float) -> Decision:
    """The same was stored before, and its answer was lost."""
    return Decision(Written(record), record)


def _mark_handled(record: Record, mark: MarkHandled, now: float) -> Decision:
    new = record._replace(
        state=State.HANDLED,
        last_seen=now,
        lease_until=_lease_end(mark.claim.lease_s, now),
        version=record.version + 1,
    )
    return Decision(Written(new), new)


def _complete(record: Record, complete: Complete, now: float) -> Decision:
    new = record._replace(
        state=State.COMPLETED,
        last_seen=now,
        lease_until=None,
        result=complete.result,
        version=record.version + 1,
    )
    return Decision(Written(new), new)


def _fail(record: Record, fail: Fail, now: float) -> Decision:
    new = _failed(record, fail.error, now, exhausted=fail.final)
    return Decision(Written(new), new)


def _release(record: Record, release: Release, now: float) -> Decision:
    former = release.claim.former
    if former is None:
        return Decision(Written(None), None)
    # The fence stays where it is: it never shrinks while the record exists. What was in doubt
    # is in doubt again, from now on. The new birth ends the claim that is released.
    new = former._replace(
        fence=record.fence,
        lease_until=None if former.lease_until is None else now,
        version=first_version(record.birth + 1),
    )
    return Decision(Written(new), new)


def _release_sending(record: Record, _: Release, now: float) -> Decision:
    # The handler has run: only the right to send goes back.
    new = record._replace(lease_until=now, version=first_version(record.birth + 1))
    return Decision(Written(new), new)


def _extend(record: Record, extend: Extend, now: float) -> Decision:
    new = record._replace(
        last_seen=now, lease_until=_lease_end(extend.lease_s, now), version=record.version + 1
    )
    return Decision(Written(new), new)


# ---- Rules for operators -----------------------------------------------------------------------


def _refuse(record: Record | None, _: Command, __: float) -> Decision:
    return Decision(Refused(record), record)


def _reset(record: Record, reset: Reset, now: float) -> Decision:
    when = datetime.fromtimestamp(now, UTC).isoformat(timespec="seconds")
    note = {"by": reset.by, "at": when, "why": reset.why}
    new = record._replace(
        state=State.FAILED,
        attempts=0,
        last_seen=now,
        lease_until=None,
        metadata={**(record.metadata or {}), "reset": note},
        exhausted=False,
        version=record.version + 1,
    )
    return Decision(Written(new), new)


def _forget(record: Record | None, forget: Forget, _: float) -> Decision:
    if record is not None and forget.version not in (None, record.version):
        return Decision(Refused(record), record)
    return Decision(Written(None), None)


# ---- Shared ------------------------------------------------------------------------------------


def _lease_end(lease_s: float | None, now: float) -> float | None:
    return None if lease_s is None else now + lease_s


def _failed(record: Record, error: str | None, now: float, *, exhausted: bool) -> Record:
    metadata = record.metadata if error is None else {**(record.metadata or {}), "error": error}
    return record._replace(
        state=State.FAILED,
        last_seen=now,
        lease_until=None,
        metadata=metadata,
        exhausted=exhausted,
        version=record.version + 1,
    )


# Each rule narrows the command's type to its own row, and the record's to its columns; the table
# is what guarantees that they meet.
_Rule = Callable[[Any, Any, float], Decision]


def _row(*rules: _Rule) -> Sequence[_Rule]:
    """One rule for each standing, in their order."""
    if len(rules) != len(Standing):
        raise ValueError("a row of the table has a cell for every standing")
    return rules


# fmt: off
TABLE: Mapping[type[Command], Sequence[_Rule]] = {
    #                 ABSENT        HELD           IN_DOUBT       SENDING           UNSENT            FAILED          EXHAUSTED   COMPLETED
    Ask:         _row(_grant_first, _busy,         _after_doubt,  _busy,            _grant_sending,   _after_failure, _exhausted, _duplicate),
    MarkHandled: _row(_fenced,      _mark_handled, _mark_handled, _again,           _again,           _fenced,        _fenced,    _fenced),
    Complete:    _row(_fenced,      _complete,     _complete,     _complete,        _complete,        _fenced,        _fenced,    _again),
    Fail:        _row(_fenced,      _fail,         _fail,         _fenced,          _fenced,          _again,         _again,     _fenced),
    Release:     _row(_fenced,      _release,      _release,      _release_sending, _release_sending, _fenced,        _fenced,    _fenced),
    Extend:      _row(_fenced,      _extend,       _extend,       _extend,          _extend,          _fenced,        _fenced,    _fenced),
    Reset:       _row(_refuse,      _refuse,       _reset,        _refuse,          _refuse,          _reset,         _reset,     _refuse),
    Forget:      _row(_forget,      _refuse,       _forget,       _refuse,          _forget,          _forget,        _forget,    _forget),
}
# fmt: on
