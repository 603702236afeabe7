"""Every rule of the ledger, in one pure function: `decide(record, command, now)`.

`TABLE`, at the end of this file, is the specification. A row is a command, a column is where the
record stands when the command arrives, and the cell is the rule that answers. A command that
carries a claim reaches the table only when the claim is the newest of the record; otherwise the
answer is Fenced.

Whoever did not receive the answer to a command may repeat the command, and gets the same answer: an
Acquire by its token (`REPEATED`, below the table), a claim's command by what it has stored.

    standing    the record is
    ABSENT      not there
    HELD        processing, and its lease has not run out
    IN_DOUBT    processing, and its lease is over: nobody knows whether the effect happened
    HANDLED     handled: its deferred messages may wait to be sent
    FAILED      failed; another try may follow
    EXHAUSTED   failed permanently
    COMPLETED   done
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from enum import IntEnum
from typing import Any, NamedTuple

from oncely.core.change import REMOVAL, Change, Removal
from oncely.core.commands import (
    Acquire,
    Busy,
    Command,
    Company,
    Complete,
    Confirm,
    CountDelivery,
    Discard,
    Doubt,
    Duplicate,
    EndClaim,
    Exhausted,
    Extend,
    Fail,
    Fenced,
    Finish,
    Forget,
    Granted,
    Handled,
    Happened,
    Held,
    InDoubt,
    MarkHandled,
    Mismatch,
    Outcome,
    Refused,
    Release,
    Reset,
    Suspect,
    TooOld,
    Waiting,
    Written,
)
from oncely.core.policy import Policy
from oncely.core.record import Claim, Record, State, birth_of, claim_of, version_of


class Decision(NamedTuple):
    """An answer, and what to write so that it becomes true."""

    outcome: Outcome
    change: Change | Removal | None = None
    """None where nothing is to be written."""
    optional: bool = False
    """The answer holds even when the change cannot be written."""


# ---- Where a record stands ---------------------------------------------------------------------


class Standing(IntEnum):
    """The columns of the table."""

    ABSENT = 0
    HELD = 1
    IN_DOUBT = 2
    HANDLED = 3
    FAILED = 4
    EXHAUSTED = 5
    COMPLETED = 6


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
            return Standing.HANDLED


def _lives(record: Record, now: float) -> bool:
    return record.lease_until is None or now < record.lease_until


def decide(
    record: Record | None, command: Command, now: float, horizon: float | None = None
) -> Decision:
    """Answer `command` for `record` as it is stored, at `now` by the store's clock.

    `horizon` is up to when records of its consumer may have been forgotten, by the same clock;
    None where none ever were, and for commands of which `depends_on_horizon` is false.
    """
    row = TABLE[type(command)]
    if isinstance(command, Held):
        if not is_newest(command.claim, record):
            return _after_another(record, command)
    elif isinstance(command, Acquire):
        if record is None:
            if horizon is not None and is_too_old(command, horizon):
                return Decision(TooOld(horizon, command.key))
        elif _differs(record, command):
            return Decision(Mismatch(record))
        elif record.birth == command.token:
            row = REPEATED
    return row[standing(record, now)](record, command, now)


def is_newest(claim: Claim, record: Record | None) -> bool:
    """Whether `claim` is the newest of its record: not released, and none was granted after it."""
    return record is not None and record.fence == claim.fence and record.birth == claim.birth


def _after_another(record: Record | None, command: Held) -> Decision:
    if isinstance(command, Release) and _was_released(command.claim, record):
        return Decision(Written(None if record is None else record.version, record=record))
    return Decision(Fenced(record))


def _was_released(claim: Claim, record: Record | None) -> bool:
    if record is None:
        return claim.former is None
    return record.fence == claim.fence and record.birth == _birth_after(claim.birth)


def _birth_after(birth: int) -> int:
    """The birth that a release leaves: with it, the released claim is not the newest any more."""
    return birth_of(birth + 1)


def _differs(record: Record, ask: Acquire) -> bool:
    return (
        ask.policy.on_mismatch != "ignore"
        and ask.fingerprint is not None
        and record.fingerprint is not None
        and ask.fingerprint != record.fingerprint
    )


def depends_on_horizon(command: Command) -> bool:
    """Whether the answer, where there is no record, depends on what was forgotten."""
    return (
        isinstance(command, Acquire)
        and command.sent_at is not None
        and command.policy.on_too_old != "run"
    )


def is_too_old(ask: Acquire, horizon: float) -> bool:
    """Whether a message that has no record may have been forgotten, and does not run."""
    return depends_on_horizon(ask) and ask.sent_at is not None and ask.sent_at < horizon


# ---- Rules for asking --------------------------------------------------------------------------


def _grant_first(_: None, ask: Acquire, __: float) -> Decision:
    if ask.company is Company.AGAIN:
        return Decision(Suspect(None))
    change = first_change(ask)
    claim = Claim(ask.key, 1, change.version, 1, metadata=change.fields["metadata"])
    return Decision(Granted(claim), change)


def _grant_again(record: Record, ask: Acquire, now: float) -> Decision:
    if ask.policy.is_spent(record.attempts):
        return _exhaust(record, ask, f"gave up after {record.attempts} attempts", now)
    return _grant(record, ask, record.attempts + 1, now)


def _grant_after_death(record: Record, ask: Acquire, now: float) -> Decision:
    # A message that kills its worker never reaches Fail: attempts are counted and limited here. Of
    # claims in company, nobody knows which handler has killed the worker.
    costs = ask.company is not Company.ALONE or _is_marked(record, _ALONE, _UNKNOWN)
    spent = record.attempts if costs else record.attempts - 1
    if not ask.policy.is_spent(spent):
        return _grant(record, ask, spent + 1, now)
    how = f"its worker died {'once' if spent == 1 else f'{spent} times'}"
    if record.error is not None:
        how = f"gave up after {spent} attempts: nobody knows how the last one ended"
    return _exhaust(record, ask, how, now)


def _grant(record: Record, ask: Acquire, attempts: int, now: float) -> Decision:
    change = Change(
        version_of(ask.token, record.version + 1),
        {
            "state": State.PROCESSING,
            "attempts": attempts,
            "fence": record.fence + 1,
            "lease_s": ask.lease_s,
            "fingerprint": record.fingerprint or ask.fingerprint,
            "worker": ask.worker,
        },
    )
    if ask.is_ahead or ask.company is Company.ALONE:
        change = change.but(metadata=_marked(record.metadata, ask, record.fence + 1))
    return Decision(Granted(claim_of(change.to(record, now), record)), change)


_ALONE = "claimed_alone"
"""In metadata: the fence of the last claim that was made alone."""
_AHEAD = "claimed_ahead"
"""The same of a claim that was committed before the transaction of its handler began."""
_UNKNOWN = "effect_unknown"
"""The same of a claim whose handler has raised, so that nobody knows whether it had its effect."""


def _marked(
    metadata: Mapping[str, Any] | None, ask: Acquire, fence: int
) -> Mapping[str, Any] | None:
    """Metadata with how the claim with that fence was made."""
    if ask.company is Company.ALONE:
        metadata = {**(metadata or {}), _ALONE: fence}
    return {**(metadata or {}), _AHEAD: fence} if ask.is_ahead else metadata


def _is_marked(record: Record, *marks: str) -> bool:
    """Whether one of these marks is of the newest claim."""
    kept = record.metadata
    return kept is not None and any(kept.get(mark) == record.fence for mark in marks)


def _grant_the_same(record: Record, ask: Acquire, now: float) -> Decision:
    if _is_marked(record, _UNKNOWN):
        return _after_doubt(record, ask, now)  # Its handler has ended.
    change = Change(record.version + 1, {"lease_s": ask.lease_s, "worker": ask.worker})
    if _is_marked(record, _AHEAD) and not ask.is_ahead:
        # What its handler did may be committed after all.
        change = change.but(metadata={**(record.metadata or {}), _AHEAD: None})
    before = _before_claim(record, ask.policy, now)
    return Decision(Granted(claim_of(change.to(record, now), before)), change)


def _before_claim(record: Record, policy: Policy, now: float) -> Record | None:
    """The record that a release of this claim restores. The stored one does not say what it was
    before, so it is what the policy would grant again: in doubt, or failed where it grants no doubt.
    """
    if record.fence == 1:
        return None
    before = record._replace(attempts=record.attempts - 1, lease_until=now)
    had_failed = before.attempts == 0 or policy.on_in_doubt in ("hold", "dead_letter")
    return before._replace(state=State.FAILED, lease_until=None) if had_failed else before


def _grant_sending(record: Record, ask: Acquire, now: float) -> Decision:
    # No attempt is counted: the handler does not run again. There is no lease either: whoever
    # sends takes the deferred messages one by one.
    change = Change(
        version_of(ask.token, record.version + 1),
        {"fence": record.fence + 1, "duplicates": record.duplicates + 1},
    )
    new = change.to(record, now)
    return Decision(Handled(claim_of(new, record), new), change)


def _send_the_same(record: Record, _: Acquire, __: float) -> Decision:
    return Decision(Handled(claim_of(record, record), record))


def _busy(record: Record, ask: Acquire, _: float) -> Decision:
    # A message that waited in the ledger is the only copy left: if it were dropped here and the
    # other worker died, the message would be lost.
    if ask.policy.on_busy == "discard" and not ask.is_taken:
        return Decision(Duplicate(record))
    return Decision(Busy(record, record.lease_until))


def while_locked(record: Record | None, command: Command, now: float) -> Busy | None:
    """The answer to a command that is not carried out because another transaction holds the key;
    None where the command has no such answer.
    """
    if not isinstance(command, Acquire):
        return None
    # What the transaction writes is not visible yet: only that the message is being processed.
    return Busy(record or first_change(command).but(lease_s=None).to_new(command.key, now), None)


def first_change(ask: Acquire) -> Change:
    """What a first claim writes."""
    is_marked = ask.is_ahead or ask.company is Company.ALONE
    return Change(
        version_of(ask.token, ask.count_from),
        {
            "state": State.PROCESSING,
            "attempts": 1,
            "fence": 1,
            "lease_s": ask.lease_s,
            "metadata": _marked(ask.metadata, ask, 1) if is_marked else ask.metadata,
            "fingerprint": ask.fingerprint,
            "worker": ask.worker,
        },
    )


def first_completion(ask: Acquire) -> Change:
    """What a first claim and its completion write, where both are stored at once."""
    claimed = first_change(ask)
    done = completion(claimed.version)
    return claimed.but(done.version, **done.fields)


_DAY_S = 86_400.0
_SMALL_PART = 30
"""Of a retention, as its divisor. Retention counts from `last_seen`, which a duplicate that is not
counted does not renew: a record may be purged earlier by this part of its retention, no more."""


def spared_s(policy: Policy) -> float:
    """How many seconds after it was last seen a completed record does not count duplicates."""
    if policy.count_duplicates == "each":
        return 0.0
    return min(_DAY_S, policy.retention_s / _SMALL_PART)


def _duplicate(record: Record, ask: Acquire, now: float) -> Decision:
    spared = spared_s(ask.policy)
    # In a transaction `now` is when it began: a record that it waited for may have been seen later.
    if spared and now - record.last_seen < spared:
        return Decision(Duplicate(record))
    counted = Change(record.version + 1, {"duplicates": record.duplicates + 1})
    return Decision(Duplicate(record), counted, optional=True)


def _same_duplicate(record: Record, _: Acquire, __: float) -> Decision:
    return Decision(Duplicate(record))


def _exhausted(record: Record, _: Acquire, __: float) -> Decision:
    return Decision(Exhausted(record))


def _same_exhausted(record: Record, _: Acquire, __: float) -> Decision:
    return Decision(Exhausted(record, is_first=True))


def _ask_after_failure(record: Record, ask: Acquire, now: float) -> Decision:
    due = record.lease_until
    if due is not None and not (ask.is_taken and due <= now):
        # The worker that takes it from the ledger when it is due runs it. This delivery is another
        # copy, or was taken before the message failed. That it came is written: a run that takes
        # the message later knows by that whether it has counted it.
        return Decision(Waiting(record, due), Change(record.version + 1, {}))
    # Without an attempt it was reset: that allows it to run, whatever the policy is.
    match ask.policy.on_failed if record.attempts else "retry":
        case "retry" if ask.company is Company.AGAIN:
            return Decision(Suspect(record))
        case "retry":
            return _grant_again(record, ask, now)
        case "skip":
            return Decision(Duplicate(record))
        case "dead_letter":
            return _exhaust(record, ask, None, now)


def _after_doubt(record: Record, ask: Acquire, now: float) -> Decision:
    # What an error has left in doubt has killed no worker, and is not undone with a transaction.
    is_told = _is_marked(record, _UNKNOWN)
    was_undone = _is_marked(record, _AHEAD) and not is_told
    match "retry" if was_undone else ask.policy.on_in_doubt:
        case "hold":
            return Decision(InDoubt(record))
        case "dead_letter":
            why = None if is_told else "in doubt: a claim ran out"
            return _exhaust(record, ask, why, now)
        case _ if ask.company in (Company.WINDOW, Company.AGAIN) and not is_told:
            return Decision(Suspect(record))
        case "retry":
            return _grant_after_death(record, ask, now)
        case _:
            return _after_probe(record, ask, now)


def _after_probe(record: Record, ask: Acquire, now: float) -> Decision:
    # Since the probe was asked, another worker may have claimed the message and died as well.
    match ask.finding if ask.found_at in (None, record.fence) else "unknown":
        case "happened":
            # A worker that lives on is told that what it has sent is not stored. The birth is not
            # the asker's either, by which it knows what it has handled itself.
            change = completion(record.version)
            change = change.but(version_of(record.birth + _AFTER_DECISION, change.version))
            return Decision(Duplicate(change.to(record, now)), change)
        case "not_happened":
            return _grant_after_death(record, ask, now)
        case _:
            return Decision(InDoubt(record))


def _exhaust(record: Record, ask: Acquire, error: str | None, now: float) -> Decision:
    # The birth is the asker's token: if it asks again, it is told again that it is the first.
    version = version_of(ask.token, record.version + 1)
    change = _failure(record, error, exhausted=True).but(version)
    return Decision(Exhausted(change.to(record, now), is_first=True), change)


# ---- Rules for the holder of a claim -----------------------------------------------------------


def _fenced(record: Record, _: Command, __: float) -> Decision:
    return Decision(Fenced(record))


def _again(record: Record, _: Command, __: float) -> Decision:
    """Nothing to write: the record is as asked, or the same was stored and its answer was lost."""
    return Decision(Written(record.version, is_repeated=True, record=record))


def _mark_handled(record: Record, mark: MarkHandled, _: float) -> Decision:
    return _written(completion(record.version).but(state=State.HANDLED, result=mark.result))


def _complete(record: Record, complete: Complete, _: float) -> Decision:
    change = completion(record.version)
    if complete.result is not None:
        change = change.but(result=complete.result)
    return _written(change)


def _fail(record: Record, fail: Fail, _: float) -> Decision:
    change = _failure(record, fail.error, exhausted=fail.final)
    if fail.retry_s is not None and not fail.final:
        change = change.but(lease_s=fail.retry_s)
    return _written(change)


def _doubt(record: Record, doubt: Doubt, now: float) -> Decision:
    if _is_marked(record, _UNKNOWN):
        return _again(record, doubt, now)
    # As if the lease had run out now: whatever knows what is in doubt knows this record, too.
    metadata = {**noted(record.metadata, doubt.error), _UNKNOWN: record.fence}
    return _written(Change(record.version + 1, {"lease_s": 0.0, "metadata": metadata}))


def _release(record: Record, release: Release, _: float) -> Decision:
    former = release.claim.former
    if former is None:
        return Decision(Written(None), REMOVAL)
    # The fence stays: it never shrinks while the record exists. A record that was in doubt is in
    # doubt again, from now on. The new birth ends the claim that is released.
    change = Change(
        version_of(_birth_after(record.birth), record.version + 1),
        {
            "state": former.state,
            "attempts": former.attempts,
            "lease_s": None if former.lease_until is None else 0.0,
            "exhausted": former.exhausted,
            "duplicates": former.duplicates,
            "metadata": _with_marks_of(former, record.fence),
            "result": former.result,
            "fingerprint": former.fingerprint,
            "worker": former.worker,
        },
    )
    return _written(change)


def _with_marks_of(former: Record, fence: int) -> Mapping[str, Any] | None:
    """Its metadata, where the claim before is the one with that fence from now on."""
    marks = {mark: fence for mark in (_ALONE, _AHEAD, _UNKNOWN) if _is_marked(former, mark)}
    return {**(former.metadata or {}), **marks} if marks else former.metadata


def _extend(record: Record, extend: Extend, now: float) -> Decision:
    if _is_marked(record, _UNKNOWN):
        return _fenced(record, extend, now)
    return _written(Change(record.version + 1, {"lease_s": extend.lease_s}))


# ---- Rules for what needs no claim -------------------------------------------------------------


def _finish(record: Record, _: Finish, now: float) -> Decision:
    return _written(completion(record.version), record, now)


def _count(record: Record, _: CountDelivery, now: float) -> Decision:
    return _written(Change(record.version + 1, {"attempts": record.attempts + 1}), record, now)


# ---- Rules for operators -----------------------------------------------------------------------


def _refuse(record: Record | None, _: Command, __: float) -> Decision:
    return Decision(Refused(record))


_AFTER_DECISION = 183_251_937_967
"""Added to the birth by the decision of an operator or a probe, so that it is neither that of a
claim nor that of a release."""


def _reset(record: Record, reset: Reset, now: float) -> Decision:
    if reset.fence not in (None, record.fence):
        return _refuse(record, reset, now)
    change = Change(
        record.version + 1,
        {
            "state": State.FAILED,
            "attempts": 0,
            # What waits in the ledger is due: a delivery meanwhile is another copy of it.
            "lease_s": 0.0 if reset.is_kept else None,
            "worker": None,
            "exhausted": False,
            "fingerprint": None if reset.is_edited else record.fingerprint,
        },
    )
    return _decided(record, change, "reset", reset, now)


def _happened(record: Record, happened: Happened, now: float) -> Decision:
    if happened.fence not in (None, record.fence):
        return _refuse(record, happened, now)
    return _decided(record, completion(record.version), "happened", happened, now)


def _decided(
    record: Record,
    change: Change,
    what: str,
    said: Reset | Happened | EndClaim | Discard,
    now: float,
) -> Decision:
    """A change as an operator wants it, with who said so, when and why."""
    when = datetime.fromtimestamp(now, UTC).isoformat(timespec="seconds")
    note = {"by": said.by, "at": when, "why": said.why}
    before = change.fields.get("metadata", record.metadata)
    noted = change.but(
        metadata={**(before or {}), what: note},
        # A worker that still runs, after a pause of its machine, say, has lost its claim.
        version=version_of(record.birth + _AFTER_DECISION, change.version),
    )
    return _written(noted, record, now)


def _reset_endless(record: Record, reset: Reset, now: float) -> Decision:
    # A claim without an end never runs out: only an operator can say that it is in doubt.
    is_endless = record.lease_until is None
    return _reset(record, reset, now) if is_endless else _refuse(record, reset, now)


def _happened_endless(record: Record, happened: Happened, now: float) -> Decision:
    is_endless = record.lease_until is None
    return (_happened if is_endless else _refuse)(record, happened, now)


def _happened_again(record: Record, happened: Happened, now: float) -> Decision:
    return _said_again(record, "happened", happened, now)


def _discard(record: Record, discard: Discard, now: float) -> Decision:
    failed = _failure(record, f"discarded by {discard.by}", exhausted=True)
    return _decided(record, failed, "discarded", discard, now)


def _discard_again(record: Record, discard: Discard, now: float) -> Decision:
    return _said_again(record, "discarded", discard, now)


def _reset_untried(_: None, reset: Reset, now: float) -> Decision:
    return _nothing(_, reset, now) if reset.is_kept else _refuse(_, reset, now)


def _nothing(_: None, __: Command, ___: float) -> Decision:
    # It waits, and was never tried: no record says anything of it.
    return Decision(Written(None))


def _said_again(record: Record, what: str, said: Happened | Discard, now: float) -> Decision:
    # Whoever did not hear the answer says it again.
    note = (record.metadata or {}).get(what)
    is_same = isinstance(note, Mapping) and (note.get("by"), note.get("why")) == (said.by, said.why)
    return (_again if is_same else _refuse)(record, said, now)


def _forget_endless(record: Record, forget: Forget, now: float) -> Decision:
    is_endless = record.lease_until is None
    return _forget(record, forget, now) if is_endless else _refuse(record, forget, now)


def _forget(record: Record | None, forget: Forget, _: float) -> Decision:
    if record is not None and forget.version not in (None, record.version):
        return Decision(Refused(record))
    return Decision(Written(None), None if record is None else REMOVAL)


def _end_claim(record: Record, end: EndClaim, now: float) -> Decision:
    if end.version not in (None, record.version):
        return _refuse(record, end, now)
    change = Change(record.version + 1, {"lease_s": 0.0})
    return _decided(record, change, "worker_dead", end, now)


# ---- Shared ------------------------------------------------------------------------------------


def completion(version: int) -> Change:
    """What completes a record that has this version."""
    return Change(version + 1, {"state": State.COMPLETED, "lease_s": None, "worker": None})


def noted(metadata: Mapping[str, Any] | None, error: str) -> Mapping[str, Any]:
    """Metadata with the error of a failure."""
    return {**(metadata or {}), "error": error}


def _failure(record: Record, error: str | None, *, exhausted: bool) -> Change:
    change = completion(record.version).but(state=State.FAILED, exhausted=exhausted)
    return change if error is None else change.but(metadata=noted(record.metadata, error))


def _written(change: Change, record: Record | None = None, now: float = 0.0) -> Decision:
    """The change is to be stored; a `record` that was looked at is answered as it then is."""
    after = None if record is None else change.to(record, now)
    return Decision(Written(change.version, record=after), change)


# Each rule narrows the command's type to its own row, and the record's to its columns; the table
# guarantees that they fit.
_Rule = Callable[[Any, Any, float], Decision]


def _row(*rules: _Rule) -> Sequence[_Rule]:
    """One rule for each standing, in their order."""
    if len(rules) != len(Standing):
        raise ValueError("a row of the table has a cell for every standing")
    return rules


# fmt: off
TABLE: Mapping[type[Command], Sequence[_Rule]] = {
    #                   ABSENT        HELD             IN_DOUBT       HANDLED         FAILED          EXHAUSTED   COMPLETED
    Acquire:           _row(_grant_first, _busy,           _after_doubt,  _grant_sending, _ask_after_failure, _exhausted, _duplicate),
    Confirm:       _row(_fenced,      _again,          _again,        _fenced,        _fenced,        _fenced,    _fenced),
    MarkHandled:   _row(_fenced,      _mark_handled,   _mark_handled, _again,         _fenced,        _fenced,    _again),
    Complete:      _row(_fenced,      _complete,       _complete,     _complete,      _fenced,        _fenced,    _again),
    Fail:          _row(_fenced,      _fail,           _fail,         _fenced,        _again,         _again,     _fenced),
    Doubt:         _row(_fenced,      _doubt,          _doubt,        _fenced,        _fenced,        _fenced,    _fenced),
    Release:       _row(_fenced,      _release,        _release,      _again,         _fenced,        _fenced,    _fenced),
    Extend:        _row(_fenced,      _extend,         _extend,       _again,         _fenced,        _fenced,    _fenced),
    Finish:        _row(_refuse,      _refuse,         _refuse,       _finish,        _refuse,        _refuse,    _again),
    CountDelivery: _row(_refuse,      _count,          _count,        _count,         _count,         _count,     _count),
    Reset:         _row(_reset_untried, _reset_endless,  _reset,        _refuse,        _reset,         _reset,     _refuse),
    Happened:      _row(_refuse,      _happened_endless, _happened,    _refuse,        _refuse,        _refuse,    _happened_again),
    Discard:       _row(_nothing,     _refuse,         _refuse,        _refuse,        _discard,       _discard_again, _refuse),
    Forget:        _row(_forget,      _forget_endless, _forget,       _forget,        _forget,        _forget,    _forget),
    EndClaim:      _row(_refuse,      _end_claim,      _again,         _refuse,        _refuse,        _refuse,    _refuse),
}

# For an Acquire whose token is the record's birth already: its asker did not receive the first answer.
REPEATED: Sequence[_Rule] = \
                   _row(_grant_first, _grant_the_same, _grant_the_same, _send_the_same, _ask_after_failure, _same_exhausted, _same_duplicate)
# fmt: on
