"""The rules as a table: what is stored, what is asked, what is answered, what is stored then."""

import dataclasses
from itertools import product
from typing import Any, NamedTuple, TypeVar

import pytest

from oncely.core import commands, rules
from oncely.core.change import Change
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
from oncely.core.policy import Finding, OnFailed, Policy
from oncely.core.record import Claim, Key, Record, State, claim_of
from oncely.core.rules import REPEATED, TABLE, Standing, depends_on_horizon, standing

C = TypeVar("C", bound=Command)

ABSENT, HELD, IN_DOUBT, HANDLED, FAILED, EXHAUSTED, COMPLETED = Standing
KEY = Key("billing", "abc-123")
BIRTH = 7 << 24

BASE = Record(
    key=KEY,
    state=State.PROCESSING,
    attempts=2,
    fence=3,
    first_seen=1.0,
    last_seen=5.0,
    lease_until=10.0,
    metadata={"tenant": "a"},
    fingerprint="one",
    version=BIRTH + 4,
)

STORED: dict[Standing, Record | None] = {
    ABSENT: None,
    HELD: BASE,
    IN_DOUBT: BASE,
    HANDLED: BASE._replace(state=State.HANDLED, lease_until=None, result="kept"),
    FAILED: BASE._replace(state=State.FAILED, lease_until=None),
    EXHAUSTED: BASE._replace(state=State.FAILED, lease_until=None, exhausted=True),
    COMPLETED: BASE._replace(state=State.COMPLETED, lease_until=None, result="kept"),
}

# The holder of the newest claim, as it got it: its own times count from the claim.
FORMER = BASE._replace(state=State.FAILED, attempts=1, fence=2, lease_until=None, version=BIRTH + 3)
CLAIM = claim_of(BASE, FORMER)

ASK = Acquire(KEY, Policy(), lease_s=5.0, token=9, fingerprint="one", metadata={"tenant": "b"})
CONFIRM = Confirm(CLAIM)
MARK = MarkHandled(CLAIM, "first")
COMPLETE = Complete(CLAIM, "new")
FAIL = Fail(CLAIM, "no")
FINAL = Fail(CLAIM, "no", final=True)
DOUBT = Doubt(CLAIM, "no")
RELEASE = Release(CLAIM)
EXTEND = Extend(CLAIM, 20.0)
FINISH = Finish(KEY)
COUNT = CountDelivery(KEY)
RESET = Reset(KEY, "ann", "paid by hand")
HAPPENED = Happened(KEY, "ann", "paid by hand")
RESET_KEPT = Reset(KEY, "ann", "paid by hand", is_kept=True)
DISCARD = Discard(KEY, "ann", "paid by hand")
FORGET = Forget(KEY)
DEAD = EndClaim(KEY, "ann", "paid by hand")


def replace(command: C, **fields: Any) -> C:
    """The command with other fields."""
    other: Any = command
    is_tuple = isinstance(command, Acquire)
    changed: C = other._replace(**fields) if is_tuple else dataclasses.replace(other, **fields)
    return changed


class Decided(NamedTuple):
    """An answer, the record after it, and whether the answer holds even if that is not stored."""

    outcome: Outcome
    new: Record | None
    optional: bool = False


def decide(
    record: Record | None, command: Command, now: float, horizon: float | None = None
) -> Decided:
    """What the rules decide."""
    outcome, change, optional = rules.decide(record, command, now, horizon)
    if change is None:
        return Decided(outcome, record, optional)
    if not isinstance(change, Change):
        return Decided(outcome, None, optional)
    new = change.to_new(KEY, now) if record is None else change.to(record, now)
    return Decided(outcome, new, optional)


SAME = "same"
"""Nothing is written."""
GONE = None
"""The record is removed."""

NEW = Record(
    key=KEY,
    state=State.PROCESSING,
    attempts=1,
    fence=1,
    first_seen=12.0,
    last_seen=12.0,
    lease_until=17.0,
    metadata={"tenant": "b"},
    fingerprint="one",
    version=9 << 24,
)
"""A record that begins at 12."""


def then(state: State | None = None, **changes: Any) -> dict[str, Any]:
    """The fields that change; last_seen and version always do, unless it is said otherwise."""
    return changes if state is None else {"state": state, **changes}


DRAWN = (9 << 24) + 5
"""With the birth that an asker drew: every grant can be told from every other."""
AGAIN = then(State.PROCESSING, attempts=3, fence=4, lease_until=17.0, version=DRAWN)
"""Granted once more, at 12."""
SEND = then(fence=4, duplicates=1, version=DRAWN)
"""Granted for sending: no attempt, and no lease; one more delivery that does not run."""
SPENT = {"tenant": "a", "error": "gave up after 2 attempts"}
DIED = {"tenant": "a", "error": "its worker died 2 times"}
DIED1 = {"tenant": "a", "error": "its worker died once"}
REBORN = (((BIRTH >> 24) + 1) << 24) + 5
"""A release begins a new birth: the claim that is given back fits nothing any more."""
TAKEN_BACK = then(State.FAILED, attempts=1, lease_until=None, version=REBORN)
"""As FORMER, but with the fence of the claim that was given back."""
RESET_ANEW = (((BIRTH >> 24) + 183_251_937_967) << 24) + 5
"""And so does a reset, another one."""
NOTE = {"by": "ann", "at": "1970-01-01T00:00:12+00:00", "why": "paid by hand"}
FRESH = then(State.FAILED, attempts=0, metadata={"tenant": "a", "reset": NOTE}, version=RESET_ANEW)
"""An operator lets it run again, and says so; whoever was at work on it is not any more."""
FOUND = then(State.COMPLETED, lease_until=None, version=RESET_ANEW)
"""A probe says so: the worker that may live on has no claim any more."""
TOLD_SO = then(
    State.COMPLETED,
    lease_until=None,
    metadata={"tenant": "a", "happened": NOTE},
    version=RESET_ANEW,
)
"""An operator says that its effect has happened, and whoever was at work on it is not any more."""
IN_DOUBT_NOW = then(
    State.PROCESSING,
    lease_until=9.0,
    metadata={"tenant": "a", "worker_dead": {**NOTE, "at": "1970-01-01T00:00:09+00:00"}},
    version=RESET_ANEW,
)
"""An operator says that its worker is dead, which has lost its claim."""
DISCARDED = then(
    State.FAILED,
    exhausted=True,
    metadata={"tenant": "a", "error": "discarded by ann", "discarded": NOTE},
    version=RESET_ANEW,
)
"""An operator lets it fail permanently."""
NO = {"tenant": "a", "error": "no"}
UNKNOWN = {**NO, "effect_unknown": 3}
OVER = {"tenant": "a", "error": "in doubt: a claim ran out"}
PROCESSING = State.PROCESSING
SENT = State.COMPLETED

Row = tuple[Standing, Command, float, type[Outcome], Any]

# fmt: off
CELLS: list[Row] = [
    # stored    asked     at    answered   then stored
    (ABSENT,    ASK,      12,   Granted,   NEW),
    (HELD,      ASK,      9.9,  Busy,      SAME),
    (IN_DOUBT,  ASK,      12,   Granted,   AGAIN),
    (HANDLED,   ASK,      9.9,  Handled,   SEND),
    (FAILED,    ASK,      12,   Granted,   AGAIN),
    (EXHAUSTED, ASK,      12,   Exhausted, SAME),
    (COMPLETED, ASK,      12,   Duplicate, then(duplicates=1)),

    (ABSENT,    CONFIRM,  12,   Fenced,    SAME),
    (HELD,      CONFIRM,  9,    Written,   SAME),
    (IN_DOUBT,  CONFIRM,  12,   Written,   SAME),
    (HANDLED,   CONFIRM,  12,   Fenced,    SAME),
    (FAILED,    CONFIRM,  12,   Fenced,    SAME),
    (EXHAUSTED, CONFIRM,  12,   Fenced,    SAME),
    (COMPLETED, CONFIRM,  12,   Fenced,    SAME),

    (ABSENT,    MARK,     12,   Fenced,    SAME),
    (HELD,      MARK,     9,    Written,   then(State.HANDLED, lease_until=None, result="first")),
    (IN_DOUBT,  MARK,     12,   Written,   then(State.HANDLED, lease_until=None, result="first")),
    (HANDLED,   MARK,     12,   Written,   SAME),
    (FAILED,    MARK,     12,   Fenced,    SAME),
    (EXHAUSTED, MARK,     12,   Fenced,    SAME),
    (COMPLETED, MARK,     12,   Written,   SAME),

    (ABSENT,    COMPLETE, 12,   Fenced,    SAME),
    (HELD,      COMPLETE, 9,    Written,   then(SENT, lease_until=None, result="new")),
    (IN_DOUBT,  COMPLETE, 12,   Written,   then(SENT, lease_until=None, result="new")),
    (HANDLED,   COMPLETE, 12,   Written,   then(SENT, result="new")),
    (FAILED,    COMPLETE, 12,   Fenced,    SAME),
    (EXHAUSTED, COMPLETE, 12,   Fenced,    SAME),
    (COMPLETED, COMPLETE, 12,   Written,   SAME),

    (ABSENT,    FAIL,     12,   Fenced,    SAME),
    (HELD,      FAIL,     9,    Written,   then(State.FAILED, lease_until=None, metadata=NO)),
    (IN_DOUBT,  FAIL,     12,   Written,   then(State.FAILED, lease_until=None, metadata=NO)),
    (HANDLED,   FAIL,     12,   Fenced,    SAME),
    (FAILED,    FAIL,     12,   Written,   SAME),
    (EXHAUSTED, FAIL,     12,   Written,   SAME),
    (COMPLETED, FAIL,     12,   Fenced,    SAME),

    (ABSENT,    DOUBT,    12,   Fenced,    SAME),
    (HELD,      DOUBT,    9,    Written,   then(PROCESSING, lease_until=9.0, metadata=UNKNOWN)),
    (IN_DOUBT,  DOUBT,    12,   Written,   then(PROCESSING, lease_until=12.0, metadata=UNKNOWN)),
    (HANDLED,   DOUBT,    12,   Fenced,    SAME),
    (FAILED,    DOUBT,    12,   Fenced,    SAME),
    (EXHAUSTED, DOUBT,    12,   Fenced,    SAME),
    (COMPLETED, DOUBT,    12,   Fenced,    SAME),

    (ABSENT,    RELEASE,  12,   Fenced,    SAME),
    (HELD,      RELEASE,  9,    Written,   TAKEN_BACK),
    (IN_DOUBT,  RELEASE,  12,   Written,   TAKEN_BACK),
    (HANDLED,   RELEASE,  12,   Written,   SAME),
    (FAILED,    RELEASE,  12,   Fenced,    SAME),
    (EXHAUSTED, RELEASE,  12,   Fenced,    SAME),
    (COMPLETED, RELEASE,  12,   Fenced,    SAME),

    (ABSENT,    EXTEND,   12,   Fenced,    SAME),
    (HELD,      EXTEND,   9,    Written,   then(lease_until=29.0)),
    (IN_DOUBT,  EXTEND,   12,   Written,   then(lease_until=32.0)),
    (HANDLED,   EXTEND,   12,   Written,   SAME),
    (FAILED,    EXTEND,   12,   Fenced,    SAME),
    (EXHAUSTED, EXTEND,   12,   Fenced,    SAME),
    (COMPLETED, EXTEND,   12,   Fenced,    SAME),

    (ABSENT,    FINISH,   12,   Refused,   SAME),
    (HELD,      FINISH,   9,    Refused,   SAME),
    (IN_DOUBT,  FINISH,   12,   Refused,   SAME),
    (HANDLED,   FINISH,   12,   Written,   then(SENT)),
    (FAILED,    FINISH,   12,   Refused,   SAME),
    (EXHAUSTED, FINISH,   12,   Refused,   SAME),
    (COMPLETED, FINISH,   12,   Written,   SAME),

    (ABSENT,    COUNT,    12,   Refused,   SAME),
    (HELD,      COUNT,    9,    Written,   then(attempts=3)),
    (IN_DOUBT,  COUNT,    12,   Written,   then(attempts=3)),
    (HANDLED,   COUNT,    12,   Written,   then(attempts=3)),
    (FAILED,    COUNT,    12,   Written,   then(attempts=3)),
    (EXHAUSTED, COUNT,    12,   Written,   then(attempts=3)),
    (COMPLETED, COUNT,    12,   Written,   then(attempts=3)),

    (ABSENT,    RESET,    12,   Refused,   SAME),
    (HELD,      RESET,    9,    Refused,   SAME),
    (IN_DOUBT,  RESET,    12,   Written,   {**FRESH, "lease_until": None}),
    (HANDLED,   RESET,    12,   Refused,   SAME),
    (FAILED,    RESET,    12,   Written,   FRESH),
    (EXHAUSTED, RESET,    12,   Written,   {**FRESH, "exhausted": False}),
    (COMPLETED, RESET,    12,   Refused,   SAME),

    (ABSENT,    HAPPENED, 12,   Refused,   SAME),
    (HELD,      HAPPENED, 9,    Refused,   SAME),
    (IN_DOUBT,  HAPPENED, 12,   Written,   TOLD_SO),
    (HANDLED,   HAPPENED, 12,   Refused,   SAME),
    (FAILED,    HAPPENED, 12,   Refused,   SAME),
    (EXHAUSTED, HAPPENED, 12,   Refused,   SAME),
    (COMPLETED, HAPPENED, 12,   Refused,   SAME),

    (ABSENT,    DEAD,     12,   Refused,   SAME),
    (HELD,      DEAD,     9,    Written,   IN_DOUBT_NOW),
    (IN_DOUBT,  DEAD,     12,   Written,   SAME),
    (HANDLED,   DEAD,     12,   Refused,   SAME),
    (FAILED,    DEAD,     12,   Refused,   SAME),
    (EXHAUSTED, DEAD,     12,   Refused,   SAME),
    (COMPLETED, DEAD,     12,   Refused,   SAME),

    (ABSENT,    DISCARD,  12,   Written,   SAME),
    (HELD,      DISCARD,  9,    Refused,   SAME),
    (IN_DOUBT,  DISCARD,  12,   Refused,   SAME),
    (HANDLED,   DISCARD,  12,   Refused,   SAME),
    (FAILED,    DISCARD,  12,   Written,   DISCARDED),
    (EXHAUSTED, DISCARD,  12,   Refused,   SAME),
    (COMPLETED, DISCARD,  12,   Refused,   SAME),

    (ABSENT,    FORGET,   12,   Written,   GONE),
    (HELD,      FORGET,   9,    Refused,   SAME),
    (IN_DOUBT,  FORGET,   12,   Written,   GONE),
    (HANDLED,   FORGET,   12,   Written,   GONE),
    (FAILED,    FORGET,   12,   Written,   GONE),
    (EXHAUSTED, FORGET,   12,   Written,   GONE),
    (COMPLETED, FORGET,   12,   Written,   GONE),
]


def under(finding: Finding | None = None, **policy: Any) -> Acquire:
    """The same question under another policy."""
    return replace(ASK, policy=Policy(**policy), finding=finding)


def probed(finding: Finding | None) -> Acquire:
    """The same question where a probe is the policy, and has found this out."""
    return under(finding, on_in_doubt=lambda message: "unknown")


def about(finding: Finding, fence: int) -> Acquire:
    """The same where the probe was asked about the claim with that fence."""
    return replace(probed(finding), found_at=fence)


OTHER = replace(ASK, fingerprint="two")
UNCHECKED = replace(under(on_mismatch="ignore"), fingerprint="two")
BARE = replace(ASK, fingerprint=None)
DAILY = under(count_duplicates="daily")
ENDLESS = replace(ASK, lease_s=None)

FIRST = CLAIM._replace(former=None)
TAKEOVER = CLAIM._replace(former=BASE._replace(attempts=1, fence=2))
DOUBTFUL = then(attempts=1, lease_until=9.0, version=REBORN)
SET_ASIDE = then(State.FAILED, exhausted=True, lease_until=None)
"""For people."""
GIVEN_UP = {**SET_ASIDE, "version": DRAWN}
"""The same by an asker, who may ask again and is told the same."""

POLICIES: list[Row] = [
    # stored    asked                              at   answered   then stored
    # The end of a lease belongs to the next.
    (HELD,      ASK,                               9.999999, Busy, SAME),
    (IN_DOUBT,  ASK,                               10,  Granted,   {**AGAIN, "lease_until": 15.0}),
    # What failed.
    (FAILED,    under(on_failed="retry"),          12,  Granted,   AGAIN),
    (FAILED,    under(on_failed="skip"),           12,  Duplicate, SAME),
    (FAILED,    under(on_failed="dead_letter"),    12,  Exhausted, GIVEN_UP),
    (EXHAUSTED, under(on_failed="skip"),           12,  Exhausted, SAME),
    # What is in doubt.
    (IN_DOUBT,  under(on_in_doubt="retry"),        12,  Granted,   AGAIN),
    (IN_DOUBT,  under(on_in_doubt="hold"),         12,  InDoubt,   SAME),
    (IN_DOUBT,  under(on_in_doubt="dead_letter"),  12,  Exhausted, {**GIVEN_UP, "metadata": OVER}),
    (IN_DOUBT,  probed("happened"),                12,  Duplicate, FOUND),
    (IN_DOUBT,  probed("not_happened"),            12,  Granted,   AGAIN),
    (IN_DOUBT,  probed("unknown"),                 12,  InDoubt,   SAME),
    (IN_DOUBT,  probed(None),                      12,  InDoubt,   SAME),
    (IN_DOUBT,  about("happened", 3),              12,  Duplicate, FOUND),
    (IN_DOUBT,  about("happened", 2),              12,  InDoubt,   SAME),
    (IN_DOUBT,  about("not_happened", 2),          12,  InDoubt,   SAME),
    (HELD,      probed("happened"),                9,   Busy,      SAME),
    (FAILED,    probed("happened"),                12,  Granted,   AGAIN),
    (HANDLED,   under(on_in_doubt="hold"),         12,  Handled,   SEND),
    # Tries: attempts are counted when granted, so what kills its worker is limited too.
    (FAILED,    under(tries=3),                    12,  Granted,   AGAIN),
    (FAILED,    under(tries=2),                    12,  Exhausted, {**GIVEN_UP, "metadata": SPENT}),
    (IN_DOUBT,  under(tries=2),                    12,  Exhausted, {**GIVEN_UP, "metadata": DIED}),
    (HANDLED,   under(tries=1),                    12,  Handled,   SEND),
    (COMPLETED, under(tries=1),                    12,  Duplicate, then(duplicates=1)),
    # Duplicates that most of all cost no write.
    (COMPLETED, ASK,                               4,   Duplicate, then(duplicates=1)),
    (COMPLETED, DAILY,                             4,   Duplicate, SAME),
    (COMPLETED, DAILY,                             86_404, Duplicate, SAME),
    (COMPLETED, DAILY,                             86_405, Duplicate, then(duplicates=1)),
    (COMPLETED, under(count_duplicates="daily", retention="60s"), 7, Duplicate, then(duplicates=1)),
    (HANDLED,   DAILY,                             12,  Handled,   SEND),
    # The same id with another payload.
    (HELD,      OTHER,                             9,   Mismatch,  SAME),
    (IN_DOUBT,  OTHER,                             12,  Mismatch,  SAME),
    (HANDLED,   OTHER,                             12,  Mismatch,  SAME),
    (FAILED,    OTHER,                             12,  Mismatch,  SAME),
    (EXHAUSTED, OTHER,                             12,  Mismatch,  SAME),
    (COMPLETED, OTHER,                             12,  Mismatch,  SAME),
    (COMPLETED, UNCHECKED,                         12,  Duplicate, then(duplicates=1)),
    (FAILED,    UNCHECKED,                         12,  Granted,   AGAIN),
    (COMPLETED, BARE,                              12,  Duplicate, then(duplicates=1)),
    # A claim that never runs out.
    (ABSENT,    ENDLESS,                           12,  Granted,   NEW._replace(lease_until=None)),
    (FAILED,    ENDLESS,                           12,  Granted,   {**AGAIN, "lease_until": None}),
    (HELD,      Extend(CLAIM, None),               9,   Written,   then(lease_until=None)),
    (HANDLED,   ENDLESS,                           12,  Handled,   SEND),
    # What the handler returned stays, unless there is something to take its place.
    (HELD,      Complete(CLAIM),                   9,   Written,   then(SENT, lease_until=None)),
    (HANDLED,   Complete(CLAIM),                   12,  Written,   then(SENT)),
    # Failed for good, at once.
    (HELD,      FINAL,                             9,   Written,   {**SET_ASIDE, "metadata": NO}),
    (EXHAUSTED, FAIL,                              12,  Written,   SAME),
    # A first claim that is released was never there.
    (HELD,      Release(FIRST),                    9,   Written,   GONE),
    (IN_DOUBT,  Release(FIRST),                    12,  Written,   GONE),
    # What was in doubt before the claim is in doubt again, from now on.
    (HELD,      Release(TAKEOVER),                 9,   Written,   DOUBTFUL),
]

OWN = replace(ASK, token=BIRTH >> 24, metadata={"tenant": "a"})
"""The asking from which the record as it is stored stems: its answer was lost."""

EARLIER = CLAIM._replace(version=(6 << 24) + 4)
"""The claim whose release began the record's birth."""


def own(**policy: Any) -> Acquire:
    """The same asking under another policy."""
    return replace(OWN, policy=Policy(**policy))


REPETITIONS: list[Row] = [
    # stored    asked                              at   answered   then stored
    # An asker is granted what it was granted, with its lease from now on.
    (HELD,      OWN,                               9,   Granted,   then(lease_until=14.0)),
    (IN_DOUBT,  OWN,                               12,  Granted,   then(lease_until=17.0)),
    (HELD,      replace(OWN, lease_s=None),        9,   Granted,   then(lease_until=None)),
    (IN_DOUBT,  own(on_in_doubt="hold"),           12,  Granted,   then(lease_until=17.0)),
    (IN_DOUBT,  own(tries=1),                      12,  Granted,   then(lease_until=17.0)),
    # It sends under the claim that it has, and is no further delivery.
    (HANDLED,   OWN,                               12,  Handled,   SAME),
    (COMPLETED, OWN,                               12,  Duplicate, SAME),
    # It is told again that it has set the message aside.
    (EXHAUSTED, OWN,                               12,  Exhausted, SAME),
    # Where its claim has failed since, it asks as anybody would.
    (FAILED,    OWN,                               12,  Granted,   {**AGAIN, "version": BIRTH + 5}),
    # What was given back is given back, and what is gone is not held.
    (FAILED,    Release(EARLIER),                  12,  Written,   SAME),
    (IN_DOUBT,  Release(EARLIER),                  12,  Written,   SAME),
    (EXHAUSTED, Release(EARLIER),                  12,  Written,   SAME),
    (ABSENT,    Release(FIRST),                    12,  Written,   GONE),
    (ABSENT,    RELEASE,                           12,  Fenced,    SAME),
]

WINDOW, AGAIN_HERE, ALONE = (
    replace(ASK, company=each) for each in (Company.WINDOW, Company.AGAIN, Company.ALONE)
)
MARKED = then(**{**AGAIN, "metadata": {"tenant": "a", "claimed_alone": 4}})
"""Granted alone: its death will cost an attempt."""



def in_window(ask: Acquire) -> Acquire:
    """The same, asked together with others."""
    return replace(ask, company=Company.WINDOW)


def alone(ask: Acquire) -> Acquire:
    """The same, while nothing else is at risk."""
    return replace(ask, company=Company.ALONE)


HOLD, ASIDE = under(on_in_doubt="hold"), under(on_in_doubt="dead_letter")
ONCE_LEFT = {**MARKED, "attempts": 2}
NEW_MARKED = NEW._replace(metadata={"tenant": "b", "claimed_alone": 1})

COMPANIES: list[Row] = [
    # stored    asked                              at   answered   then stored
    # New, or failed: one that was delivered before may have killed a worker without a trace.
    (ABSENT,    WINDOW,                            12,  Granted,   NEW),
    (ABSENT,    AGAIN_HERE,                        12,  Suspect,   GONE),
    (ABSENT,    ALONE,                             12,  Granted,   NEW_MARKED),
    (FAILED,    WINDOW,                            12,  Granted,   AGAIN),
    (FAILED,    AGAIN_HERE,                        12,  Suspect,   SAME),
    (FAILED,    ALONE,                             12,  Granted,   MARKED),
    # A claim that ran out may have killed its worker. In company that costs no attempt.
    (IN_DOUBT,  WINDOW,                            12,  Suspect,   SAME),
    (IN_DOUBT,  AGAIN_HERE,                        12,  Suspect,   SAME),
    (IN_DOUBT,  ALONE,                             12,  Granted,   ONCE_LEFT),
    (IN_DOUBT,  alone(under(tries=2)),             12,  Granted,   ONCE_LEFT),
    (IN_DOUBT,  alone(under(tries=1)),             12,  Exhausted, {**GIVEN_UP, "metadata": DIED1}),
    (IN_DOUBT,  in_window(probed(None)),           12,  Suspect,   SAME),
    (IN_DOUBT,  alone(probed(None)),               12,  InDoubt,   SAME),
    (IN_DOUBT,  alone(probed("not_happened")),     12,  Granted,   ONCE_LEFT),
    (IN_DOUBT,  alone(probed("happened")),         12,  Duplicate, FOUND),
    (IN_DOUBT,  in_window(HOLD),                   12,  InDoubt,   SAME),
    (IN_DOUBT,  alone(HOLD),                       12,  InDoubt,   SAME),
    (IN_DOUBT,  in_window(ASIDE),                  12,  Exhausted, {**GIVEN_UP, "metadata": OVER}),
    # All else is answered in any company.
    *((HELD, command, 9, Busy, SAME) for command in (WINDOW, AGAIN_HERE, ALONE)),
    *((HANDLED, command, 12, Handled, SEND) for command in (WINDOW, AGAIN_HERE, ALONE)),
    *((EXHAUSTED, command, 12, Exhausted, SAME) for command in (WINDOW, AGAIN_HERE, ALONE)),
    *((COMPLETED, c, 12, Duplicate, then(duplicates=1)) for c in (WINDOW, AGAIN_HERE, ALONE)),
]
# fmt: on
ROWS = CELLS + POLICIES + REPETITIONS + COMPANIES


def _name(row: Row) -> str:
    stored, command, at, answered, _ = row
    return f"{stored.name}-{type(command).__name__}-{at}-{answered.__name__}"


def _expected(stored: Record | None, at: float, change: Any) -> Record | None:
    if change == SAME or change is GONE or isinstance(change, Record):
        return stored if change == SAME else change
    assert stored is not None
    return stored._replace(**{"last_seen": at, "version": stored.version + 1, **change})


@pytest.mark.parametrize("row", ROWS, ids=map(_name, ROWS))
def test_row(row: Row) -> None:
    """What is answered, and every field of what is stored then, stands in the row."""
    stand, command, at, answered, change = row
    stored = STORED[stand]
    assert standing(stored, at) is stand
    decision = decide(stored, command, at)
    assert type(decision.outcome) is answered
    assert decision.new == _expected(stored, at, change)


@pytest.mark.parametrize("row", ROWS, ids=map(_name, ROWS))
def test_answer_carries_what_is_stored(row: Row) -> None:
    """An answer carries the record as it is then stored, or the claim on it."""
    stand, command, at, *_ = row
    stored = STORED[stand]
    outcome, new, optional = decide(stored, command, at)
    if isinstance(outcome, Granted | Handled):
        assert isinstance(command, Acquire)
        assert new is not None
        assert outcome.claim._replace(former=None) == claim_of(new)
        if command.token != BIRTH >> 24:
            assert outcome.claim.former == stored
    elif isinstance(outcome, Duplicate) and optional:
        assert outcome.record == stored
    elif isinstance(outcome, Written):
        assert outcome.version == (new and new.version)
        assert isinstance(command, commands.Held) or outcome.record == new
    else:
        assert not isinstance(outcome, TooOld)
        assert outcome.record == new
    is_counted = isinstance(outcome, Duplicate) and new != stored
    assert optional is (stand is COMPLETED and is_counted)


# fmt: off
DEATHS: list[tuple[dict[str, Any], Policy, type[Outcome], int, str | None]] = [
    # metadata             policy           answered   attempts  error
    # The newest claim was made alone: its death costs an attempt, as no other does.
    ({"claimed_alone": 3}, Policy(tries=3), Granted,   3,        None),
    ({"claimed_alone": 3}, Policy(tries=2), Exhausted, 2,        "its worker died 2 times"),
    # An earlier one was.
    ({"claimed_alone": 2}, Policy(tries=3), Granted,   2,        None),
    ({"claimed_alone": 2}, Policy(tries=2), Granted,   2,        None),
    # It has also failed: not all of its attempts ended with a death.
    ({"claimed_alone": 3, "error": "no"}, Policy(tries=2), Exhausted, 2,
     "gave up after 2 attempts: nobody knows how the last one ended"),
    # What a service that shares the table keeps there.
    ({"claimed_alone": "yes"}, Policy(tries=2), Granted,   2,        None),
]
# fmt: on


@pytest.mark.parametrize(("metadata", "policy", "answered", "attempts", "error"), DEATHS)
def test_a_death_costs_an_attempt_of_what_was_claimed_alone(
    metadata: dict[str, Any],
    policy: Policy,
    answered: type[Outcome],
    attempts: int,
    error: str | None,
) -> None:
    """No other: nobody knows of a window's handlers which one has killed the worker."""
    stored = BASE._replace(metadata=metadata)
    outcome, new, _ = decide(stored, replace(ALONE, policy=policy), 12)
    assert type(outcome) is answered
    assert new is not None
    assert new.attempts == attempts
    if error is None:
        assert new.metadata == {**metadata, "claimed_alone": 4}
    else:
        assert new.error == error


def test_a_claim_alone_that_is_given_back_leaves_no_mark() -> None:
    """The worker did not die: the next claim is counted as this one would have been."""
    granted = decide(BASE, ALONE, 12)
    assert isinstance(granted.outcome, Granted)
    released = decide(granted.new, Release(granted.outcome.claim), 13).new
    assert released is not None
    assert (released.attempts, released.metadata) == (2, {"tenant": "a"})
    again = decide(released, replace(ALONE, token=10), 14).new
    assert again is not None
    assert again.attempts == 2


def test_a_claim_alone_that_is_given_back_forgets_no_death() -> None:
    """What the worker before has died of, alone, costs an attempt all the same."""
    dead = BASE._replace(metadata={"claimed_alone": 3, "claimed_ahead": 3})
    ask = alone(under(on_in_doubt="hold", tries=3))
    granted = decide(dead, ask, 12)
    assert isinstance(granted.outcome, Granted)
    released = decide(granted.new, Release(granted.outcome.claim), 13).new
    assert released is not None
    assert (released.attempts, released.fence) == (2, 4)
    again = decide(released, replace(ask, token=20), 14).new
    assert again is not None
    assert (again.state, again.attempts) == (State.PROCESSING, 3)


NO_RETRY = (HOLD, ASIDE, probed(None))


@pytest.mark.parametrize("ask", NO_RETRY)
def test_a_claim_ahead_of_its_transaction_leaves_no_doubt(ask: Acquire) -> None:
    """The death of its worker has undone what the handler did: it runs again, whatever the policy
    does with what is in doubt; and ends when its tries are spent.
    """
    ahead = replace(alone(ask), is_ahead=True)
    stored = decide(None, ahead, 1).new
    assert stored is not None
    asked = replace(in_window(ask), token=10)
    assert isinstance(decide(stored, asked, 12).outcome, Suspect)
    second = decide(stored, replace(ahead, token=20), 12).new
    assert second is not None
    assert (second.state, second.attempts) == (State.PROCESSING, 2)
    twice = Policy(on_in_doubt=ask.policy.on_in_doubt, tries=2)
    last = decide(second, replace(ahead, policy=twice, token=30), 30).new
    assert last is not None
    assert (last.exhausted, last.error) == (True, "its worker died 2 times")


@pytest.mark.parametrize("ask", NO_RETRY)
def test_an_effect_that_may_be_committed_is_in_doubt(ask: Acquire) -> None:
    """Whoever holds a claim ahead of its transaction, and does not know how that has ended, asks
    again without one; and a later claim says nothing of an earlier one.
    """
    ahead = replace(alone(ask), is_ahead=True)
    stored = decide(None, ahead, 1).new
    unsure = decide(stored, alone(ask), 2).new
    plain = decide(stored, replace(alone(probed("not_happened")), token=10), 12).new
    for record in (unsure, plain and plain._replace(metadata={"claimed_ahead": 1})):
        assert record is not None
        outcome = decide(record, replace(alone(ask), token=20), 30).outcome
        assert isinstance(outcome, InDoubt | Exhausted)


TOLD: list[tuple[Command, type[Outcome], State]] = [
    (DOUBT, Written, PROCESSING),  # Its answer was lost.
    (EXTEND, Fenced, PROCESSING),  # A heartbeat that comes late.
    # No worker has died of it: it costs its attempt, and is no suspect.
    (in_window(ASK), Granted, PROCESSING),
    (alone(under(tries=2)), Exhausted, State.FAILED),
    (in_window(probed("happened")), Duplicate, SENT),
    (in_window(probed("not_happened")), Granted, PROCESSING),
    (replace(HOLD, token=BIRTH >> 24), InDoubt, PROCESSING),  # By a process that continues.
]


@pytest.mark.parametrize(("command", "answered", "state"), TOLD)
@pytest.mark.parametrize("ahead", [{}, {"claimed_ahead": 3}])
def test_an_error_that_leaves_a_doubt(
    command: Command, answered: type[Outcome], state: State, ahead: dict[str, int]
) -> None:
    """It is in doubt, also where its transaction was rolled back, or a later claim given back."""
    told = decide(BASE._replace(metadata=ahead), DOUBT, 9).new
    outcome, new, _ = decide(told, command, 12)
    assert (type(outcome), new and new.state) == (answered, state)
    if isinstance(outcome, Granted):
        assert outcome.claim.attempts == 3
        released = decide(new, Release(outcome.claim), 13).new
        assert isinstance(decide(released, replace(HOLD, token=20), 14).outcome, InDoubt)


def test_every_cell_has_a_row() -> None:
    """The rows above cover every cell of the table, each once."""
    cells = [(type(command), stand) for stand, command, *_ in CELLS]
    assert len(cells) == len(set(cells))
    assert set(cells) == {(command, stand) for command in TABLE for stand in Standing}
    held = (Confirm, MarkHandled, Complete, Fail, Doubt, Release, Extend)
    others = (Finish, CountDelivery, Reset, Happened, EndClaim, Discard, Forget)
    assert set(cells) == set(product((Acquire, *held, *others), Standing))
    assert {stand for stand, command, *_ in REPETITIONS if command is OWN} == set(Standing) - {
        ABSENT
    }
    assert len(REPEATED) == len(Standing)


# fmt: off
BEFORE: list[tuple[Policy, int, State]] = [
    # policy                          attempts  what a release leaves
    (Policy(),                        3,        State.PROCESSING),
    (Policy(on_failed="skip"),        3,        State.PROCESSING),
    (Policy(on_in_doubt="hold"),      3,        State.FAILED),
    (Policy(on_in_doubt="dead_letter"), 3,      State.FAILED),
    (probed(None).policy,             3,        State.PROCESSING),
    # It was reset, and only then has no attempt before this one.
    (Policy(),                        1,        State.FAILED),
]
# fmt: on


@pytest.mark.parametrize(("policy", "attempts", "left"), BEFORE)
def test_release_of_what_was_granted_again(policy: Policy, attempts: int, left: State) -> None:
    """Whoever releases a claim that was granted before its reply was lost leaves what this policy
    has granted: what had failed where a doubt is not granted, else what is in doubt.
    """
    stored = BASE._replace(attempts=attempts)
    again = decide(stored, replace(OWN, policy=policy), 12)
    assert isinstance(again.outcome, Granted)
    released = decide(again.new, Release(again.outcome.claim), 13).new
    assert released is not None
    assert (released.state, released.attempts, released.fence) == (left, attempts - 1, 3)
    assert not released.exhausted
    asked = decide(released, replace(ASK, policy=policy, finding="not_happened"), 13)
    assert isinstance(asked.outcome, Granted)


def test_release_of_a_first_claim_granted_again() -> None:
    """A first claim whose reply was lost leaves nothing when it is released."""
    first = decide(None, ASK, 12).new
    again = decide(first, ASK, 13)
    assert isinstance(again.outcome, Granted)
    assert again.outcome.claim.former is None
    assert decide(again.new, Release(again.outcome.claim), 14) == (Written(None), None, False)


def test_exhausted_by_policy_is_told_again() -> None:
    """Whoever has set a message aside is told so again, as the first; others, as later ones."""
    aside = decide(STORED[FAILED], under(tries=2), 12)
    assert isinstance(aside.outcome, Exhausted)
    assert aside.new is not None
    for command, is_first in ((under(tries=2), True), (replace(ASK, token=10), False)):
        assert decide(aside.new, command, 13) == (
            Exhausted(aside.new, is_first),
            aside.new,
            False,
        )


def test_versions_are_used_once() -> None:
    """A token that comes back after its claim was given back makes no version a second time: who
    wrote under the first claim cannot write over what was granted since.
    """
    granted = decide(STORED[FAILED], ASK, 12)
    assert isinstance(granted.outcome, Granted)
    assert granted.new is not None
    released = decide(granted.new, Release(granted.outcome.claim), 13)
    again = decide(released.new, ASK, 14)
    assert isinstance(again.outcome, Granted)
    assert again.new is not None
    assert again.new.fence == granted.new.fence + 1
    assert again.new.version != granted.new.version


OLDER = CLAIM._replace(fence=2)
NEWER = CLAIM._replace(fence=4)
EARLIER_BIRTH = CLAIM._replace(version=(5 << 24) + 4)
LATER_BIRTH = CLAIM._replace(version=(8 << 24) + 4)

HELD_COMMANDS = (CONFIRM, MARK, COMPLETE, FAIL, FINAL, RELEASE, EXTEND)


@pytest.mark.parametrize("claim", [OLDER, NEWER, EARLIER_BIRTH, LATER_BIRTH])
@pytest.mark.parametrize("command", HELD_COMMANDS, ids=lambda command: type(command).__name__)
@pytest.mark.parametrize("stand", Standing)
def test_only_the_newest_claim_may_write(
    stand: Standing,
    command: Confirm | MarkHandled | Complete | Fail | Release | Extend,
    claim: Claim,
) -> None:
    """Another fence, or the same fence of another birth, is Fenced and writes nothing."""
    stored = STORED[stand]
    decision = decide(stored, replace(command, claim=claim), 9)
    assert decision == (Fenced(stored), stored, False)


@pytest.mark.parametrize("command", HELD_COMMANDS, ids=lambda command: type(command).__name__)
def test_what_was_given_back_is_spent(
    command: Confirm | MarkHandled | Complete | Fail | Release | Extend,
) -> None:
    """A claim that was given back is Fenced, whatever it asks for, but to be given back once more;
    and so is one with the same birth and another fence.
    """
    older = EARLIER._replace(fence=2)
    for stand, claim in ((FAILED, EARLIER), (ABSENT, FIRST), (FAILED, older)):
        if command is RELEASE and claim is not older:
            continue
        stored = STORED[stand]
        decision = decide(stored, replace(command, claim=claim), 12)
        assert decision == (Fenced(stored), stored, False)


def test_version_of_a_claim_may_lag() -> None:
    """The holder of the newest claim may write though the record was written since."""
    extended = BASE._replace(version=BASE.version + 100, lease_until=99.0)
    assert isinstance(decide(extended, COMPLETE, 12).outcome, Written)


@pytest.mark.parametrize("at", [0.0, 1e12])
def test_no_lease_never_runs_out(at: float) -> None:
    """A claim without a lease lives at any time, and tells no time to come back."""
    endless = BASE._replace(lease_until=None)
    assert decide(endless, ASK, at).outcome == Busy(endless, None)


@pytest.mark.parametrize("command", [RESET, HAPPENED, FORGET])
def test_operators_end_what_has_no_end(command: Reset | Happened | Forget) -> None:
    """A claim without a lease is for operators to judge; one whose lease lives is not."""
    endless = BASE._replace(lease_until=None)
    assert isinstance(decide(endless, command, 12).outcome, Written)
    assert isinstance(decide(BASE, command, 9).outcome, Refused)


@pytest.mark.parametrize("command", [RESET, HAPPENED])
def test_operators_decide_what_they_have_seen(command: Reset | Happened) -> None:
    """Who has looked at a claim decides nothing of a later one."""
    assert isinstance(decide(BASE, replace(command, fence=BASE.fence), 12).outcome, Written)
    earlier = decide(BASE, replace(command, fence=BASE.fence - 1), 12)
    assert earlier == (Refused(BASE), BASE, False)
    assert isinstance(decide(BASE, replace(DEAD, version=BASE.version - 1), 9).outcome, Refused)


def test_what_happened_is_said_again() -> None:
    """Who has said that it happened, and did not hear the answer, may say so again; another is
    refused. The former holder, who was frozen, has nothing more to say.
    """
    stored = decide(STORED[IN_DOUBT], HAPPENED, 12).new
    assert stored is not None
    again = decide(stored, HAPPENED, 13)
    assert again == (Written(stored.version, is_repeated=True, record=stored), stored, False)
    assert isinstance(decide(stored, replace(HAPPENED, by="bob"), 13).outcome, Refused)
    assert isinstance(decide(stored, COMPLETE, 13).outcome, Fenced)
    assert isinstance(decide(stored, ASK, 13).outcome, Duplicate)


def test_what_waits_is_reset() -> None:
    """What is due later is due now, and only whoever takes it then is granted it; without its
    message in the ledger it waits for its sender, until it runs.
    """
    waits = BASE._replace(state=State.FAILED, lease_until=99.0)
    assert decide(None, RESET_KEPT, 12).outcome == Written(None)
    due = decide(waits, RESET_KEPT, 12).new
    assert due is not None
    assert (due.lease_until, due.attempts, due.waits_for_sender) == (12.0, 0, False)
    assert isinstance(decide(due, ASK, 12).outcome, Waiting)
    granted = decide(due, replace(ASK, is_taken=True), 12).outcome
    assert isinstance(granted, Granted)
    assert granted.claim.attempts == 1
    sent_for = decide(waits, RESET, 12).new
    assert sent_for is not None
    assert sent_for.waits_for_sender
    run = decide(sent_for, ASK, 13).new
    assert run is not None
    assert not run.waits_for_sender


def test_what_waits_is_discarded() -> None:
    """What was discarded does not run; who did not hear the answer may say it again."""
    waits = BASE._replace(state=State.FAILED, lease_until=99.0)
    discarded = decide(waits, DISCARD, 12).new
    assert discarded is not None
    assert discarded.lease_until is None
    assert isinstance(decide(discarded, replace(ASK, is_taken=True), 13).outcome, Exhausted)
    assert decide(discarded, DISCARD, 13).outcome == Written(
        discarded.version, is_repeated=True, record=discarded
    )
    assert isinstance(decide(discarded, replace(DISCARD, by="bob"), 13).outcome, Refused)


def test_of_two_that_send_the_newest_may_complete() -> None:
    """Whoever asks for what is handled may send at once; the former sender's claim is spent."""
    first = decide(STORED[HANDLED], ASK, 12)
    assert isinstance(first.outcome, Handled)
    second = decide(first.new, replace(ASK, token=10), 12)
    assert isinstance(second.outcome, Handled)
    assert isinstance(decide(second.new, Complete(first.outcome.claim), 12).outcome, Fenced)
    assert isinstance(decide(second.new, Complete(second.outcome.claim), 12).outcome, Written)


def test_finished_while_somebody_sends() -> None:
    """A sender whose message was finished by another hears that it is completed."""
    sender = decide(STORED[HANDLED], ASK, 12)
    assert isinstance(sender.outcome, Handled)
    finished = decide(sender.new, FINISH, 12).new
    assert finished is not None
    assert decide(finished, Complete(sender.outcome.claim, "late"), 12) == (
        Written(finished.version, is_repeated=True, record=finished),
        finished,
        False,
    )


def test_first_fingerprint_is_kept() -> None:
    """A record without a fingerprint takes the first that comes with a grant, and keeps it."""
    bare = BASE._replace(state=State.FAILED, fingerprint=None, lease_until=None)
    first = decide(bare, ASK, 12).new
    assert first is not None
    assert first.fingerprint == "one"
    assert isinstance(decide(first, OTHER, 12).outcome, Mismatch)


@pytest.mark.parametrize("on_failed", ["retry", "skip", "dead_letter"])
def test_what_was_reset_runs(on_failed: OnFailed) -> None:
    """A reset allows a record to run again under any policy, once: the next failure counts."""
    reset = decide(STORED[EXHAUSTED], RESET, 12).new
    again = decide(reset, under(on_failed=on_failed), 12)
    assert isinstance(again.outcome, Granted)
    assert again.outcome.claim.attempts == 1


def test_births_differ() -> None:
    """A record that begins again under its key is told apart by its asker's token."""
    first, second = (decide(None, replace(ASK, token=own), 12).new for own in (0, 2**39 - 1))
    assert first is not None
    assert second is not None
    assert first.birth != second.birth
    assert second.version < 2**63


def test_nothing_given_is_changed() -> None:
    """The rules change nothing that they are given: the former metadata stays as it was."""
    stored = STORED[HELD]
    assert stored is not None
    decide(stored, FAIL, 9)
    assert stored.metadata == {"tenant": "a"}


DUE = BASE._replace(state=State.FAILED)
"""It has failed, and waits in the ledger until 10."""
TAKEN = replace(ASK, is_taken=True)
WAITS = [
    # asked                                     at    answered
    (ASK, 9.0, Waiting),
    (ASK, 12.0, Waiting),
    (TAKEN, 10.0, Granted),
    # Taken once more while it ran, and it has failed since.
    (TAKEN, 9.9, Waiting),
    (replace(TAKEN, fingerprint="other"), 12.0, Mismatch),
]


@pytest.mark.parametrize(("ask", "at", "answered"), WAITS)
def test_waits(ask: Acquire, at: float, answered: type[Outcome]) -> None:
    """What waits in the ledger runs when it is due, for who has taken it there, and for nobody
    else.
    """
    decision = decide(DUE, ask, at)
    assert type(decision.outcome) is answered
    if answered is Waiting:
        seen = DUE._replace(version=DUE.version + 1, last_seen=at)
        assert decision == (Waiting(DUE, 10.0), seen, False)


def test_taken_while_it_runs() -> None:
    """What waited in the ledger and is at work is left there; any other copy may be discarded."""
    held, discards = STORED[HELD], under(on_busy="discard")
    assert held is not None
    assert decide(held, discards, 9).outcome == Duplicate(held)
    assert decide(held, replace(discards, is_taken=True), 9).outcome == Busy(held, 10.0)


DATED = replace(ASK, sent_at=5.0)
"""Asks for a message that was sent at 5."""
TOO_OLD = [
    # stored    asked                                                  horizon  answered
    (None, DATED, 5.1, TooOld),
    (None, DATED, 5.0, Granted),
    (None, DATED, None, Granted),
    (None, ASK, 5.1, Granted),
    (None, replace(DATED, sent_at=-1.0), None, Granted),
    (None, replace(DATED, policy=Policy(on_too_old="run")), 5.1, Granted),
    (HELD, DATED, 5.1, Busy),
    (IN_DOUBT, DATED, 5.1, Granted),
    (HANDLED, DATED, 5.1, Handled),
    (FAILED, DATED, 5.1, Granted),
    (EXHAUSTED, DATED, 5.1, Exhausted),
    (COMPLETED, DATED, 5.1, Duplicate),
]


@pytest.mark.parametrize(("stored", "ask", "horizon", "answered"), TOO_OLD)
def test_too_old(
    stored: Standing | None, ask: Acquire, horizon: float | None, answered: type[Outcome]
) -> None:
    """What was sent before the horizon is too old, where there is no record; and never else."""
    record = None if stored is None else STORED[stored]
    decision = decide(record, ask, 9 if stored is HELD else 12, horizon)
    assert type(decision.outcome) is answered
    if answered is TooOld:
        assert decision == (TooOld(5.1, ask.key), None, False)


def test_retention_makes_nothing_too_old() -> None:
    """How long records are kept is the matter of whoever purges."""
    ask = replace(DATED, policy=Policy(retention="1s"))
    assert isinstance(decide(None, ask, 1e9, None).outcome, Granted)


@pytest.mark.parametrize(
    ("command", "depends"),
    [
        (DATED, True),
        (ASK, False),
        (replace(DATED, policy=Policy(on_too_old="run")), False),
        (FAIL, False),
    ],
)
def test_depends_on_horizon(command: Command, depends: bool) -> None:
    """Only what could be too old is asked with a horizon."""
    assert depends_on_horizon(command) is depends
