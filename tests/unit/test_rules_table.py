"""The rules as a table: what is stored, what is asked, what is answered, what is stored then."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from oncely.core.commands import (
    Ask,
    Busy,
    Command,
    Complete,
    Confirm,
    CountDelivery,
    Duplicate,
    Exhausted,
    Extend,
    Fail,
    Fenced,
    Finish,
    Forget,
    Granted,
    Handled,
    InDoubt,
    MarkHandled,
    Mismatch,
    Outcome,
    Refused,
    Release,
    Reset,
    Written,
)
from oncely.core.policy import Finding, OnFailed, Policy
from oncely.core.record import Claim, Key, Record, State
from oncely.core.rules import TABLE, Standing, decide, is_too_old, standing

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
CLAIM = Claim(BASE._replace(lease_until=5.0), lease_s=5.0, former=FORMER)

ASK = Ask(KEY, Policy(), lease_s=5.0, draw=9, fingerprint="one", metadata={"tenant": "b"})
CONFIRM = Confirm(CLAIM)
MARK = MarkHandled(CLAIM, "first")
COMPLETE = Complete(CLAIM, "new")
FAIL = Fail(CLAIM, "no")
FINAL = Fail(CLAIM, "no", final=True)
RELEASE = Release(CLAIM)
EXTEND = Extend(CLAIM, 20.0)
FINISH = Finish()
COUNT = CountDelivery()
RESET = Reset("ann", "paid by hand")
FORGET = Forget()

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


DRAWN = 9 << 24
"""The birth that an asker drew: every grant can be told from every other."""
AGAIN = then(State.PROCESSING, attempts=3, fence=4, lease_until=17.0, version=DRAWN)
"""Granted once more, at 12."""
SEND = then(fence=4, version=DRAWN)
"""Granted for sending: no attempt, and no lease."""
SPENT = {"tenant": "a", "error": "gave up after 2 attempts"}
REBORN = ((BIRTH >> 24) + 1) << 24
"""A release begins a new birth: the claim that is given back fits nothing any more."""
TAKEN_BACK = then(State.FAILED, attempts=1, last_seen=5.0, lease_until=None, version=REBORN)
"""As FORMER, but with the fence of the claim that was given back."""
NOTE = {"by": "ann", "at": "1970-01-01T00:00:12+00:00", "why": "paid by hand"}
FRESH = then(State.FAILED, attempts=0, metadata={"tenant": "a", "reset": NOTE})
"""An operator lets it run again, and says so."""
NO = {"tenant": "a", "error": "no"}
DOUBT = {"tenant": "a", "error": "in doubt: a claim ran out"}
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

    (ABSENT,    FORGET,   12,   Written,   GONE),
    (HELD,      FORGET,   9,    Refused,   SAME),
    (IN_DOUBT,  FORGET,   12,   Written,   GONE),
    (HANDLED,   FORGET,   12,   Written,   GONE),
    (FAILED,    FORGET,   12,   Written,   GONE),
    (EXHAUSTED, FORGET,   12,   Written,   GONE),
    (COMPLETED, FORGET,   12,   Written,   GONE),
]


def under(finding: Finding | None = None, **policy: Any) -> Ask:
    """The same question under another policy."""
    return replace(ASK, policy=Policy(**policy), finding=finding)


def probed(finding: Finding | None) -> Ask:
    """The same question where a probe is the policy, and has found this out."""
    return under(finding, on_in_doubt=lambda message: "unknown")


def about(finding: Finding, fence: int) -> Ask:
    """The same where the probe was asked about the claim with that fence."""
    return replace(probed(finding), found_at=fence)


OTHER = replace(ASK, fingerprint="two")
UNCHECKED = replace(under(on_mismatch="ignore"), fingerprint="two")
BARE = replace(ASK, fingerprint=None)
ENDLESS = replace(ASK, lease_s=None)

FIRST = CLAIM._replace(former=None)
TAKEOVER = CLAIM._replace(former=BASE._replace(attempts=1, fence=2))
DOUBTFUL = then(attempts=1, last_seen=5.0, lease_until=9.0, version=REBORN)
GIVEN_UP = then(State.FAILED, exhausted=True, lease_until=None)
"""Set aside for people."""

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
    (IN_DOUBT,  under(on_in_doubt="dead_letter"),  12,  Exhausted, {**GIVEN_UP, "metadata": DOUBT}),
    (IN_DOUBT,  probed("happened"),                12,  Duplicate, then(SENT, lease_until=None)),
    (IN_DOUBT,  probed("not_happened"),            12,  Granted,   AGAIN),
    (IN_DOUBT,  probed("unknown"),                 12,  InDoubt,   SAME),
    (IN_DOUBT,  probed(None),                      12,  InDoubt,   SAME),
    (IN_DOUBT,  about("happened", 3),              12,  Duplicate, then(SENT, lease_until=None)),
    (IN_DOUBT,  about("happened", 2),              12,  InDoubt,   SAME),
    (IN_DOUBT,  about("not_happened", 2),          12,  InDoubt,   SAME),
    (HELD,      probed("happened"),                9,   Busy,      SAME),
    (FAILED,    probed("happened"),                12,  Granted,   AGAIN),
    (HANDLED,   under(on_in_doubt="hold"),         12,  Handled,   SEND),
    # Tries: attempts are counted when granted, so what kills its worker is limited too.
    (FAILED,    under(tries=3),                    12,  Granted,   AGAIN),
    (FAILED,    under(tries=2),                    12,  Exhausted, {**GIVEN_UP, "metadata": SPENT}),
    (IN_DOUBT,  under(tries=2),                    12,  Exhausted, {**GIVEN_UP, "metadata": SPENT}),
    (HANDLED,   under(tries=1),                    12,  Handled,   SEND),
    (COMPLETED, under(tries=1),                    12,  Duplicate, then(duplicates=1)),
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
    (HELD,      FINAL,                             9,   Written,   {**GIVEN_UP, "metadata": NO}),
    (EXHAUSTED, FAIL,                              12,  Written,   SAME),
    # A first claim that is released was never there.
    (HELD,      Release(FIRST),                    9,   Written,   GONE),
    (IN_DOUBT,  Release(FIRST),                    12,  Written,   GONE),
    # What was in doubt before the claim is in doubt again, from now on.
    (HELD,      Release(TAKEOVER),                 9,   Written,   DOUBTFUL),
]
# fmt: on


def _name(row: Row) -> str:
    stored, command, at, answered, _ = row
    return f"{stored.name}-{type(command).__name__}-{at}-{answered.__name__}"


def _expected(stored: Record | None, at: float, change: Any) -> Record | None:
    if change == SAME or change is GONE or isinstance(change, Record):
        return stored if change == SAME else change
    assert stored is not None
    return stored._replace(**{"last_seen": at, "version": stored.version + 1, **change})


@pytest.mark.parametrize("row", CELLS + POLICIES, ids=map(_name, CELLS + POLICIES))
def test_row(row: Row) -> None:
    """What is answered, and every field of what is stored then, stands in the row."""
    stand, command, at, answered, change = row
    stored = STORED[stand]
    assert standing(stored, at) is stand
    decision = decide(stored, command, at)
    assert type(decision.outcome) is answered
    assert decision.new == _expected(stored, at, change)


@pytest.mark.parametrize("row", CELLS + POLICIES, ids=map(_name, CELLS + POLICIES))
def test_answer_carries_what_is_stored(row: Row) -> None:
    """An answer carries the record as it is then stored, or the claim on it."""
    stand, command, at, *_ = row
    stored = STORED[stand]
    outcome, new, optional = decide(stored, command, at)
    if isinstance(outcome, Granted | Handled):
        assert isinstance(command, Ask)
        assert new is not None
        assert outcome.claim == Claim(new, command.lease_s, former=stored)
    elif isinstance(outcome, Duplicate) and optional:
        assert outcome.record == stored
    else:
        assert outcome.record == new
    assert optional is (stand is COMPLETED and isinstance(outcome, Duplicate))


def test_busy_tells_when_to_come_back() -> None:
    """Who finds a message busy is told when its lease runs out."""
    outcome = decide(STORED[HELD], ASK, 9).outcome
    assert isinstance(outcome, Busy)
    assert outcome.retry_at == 10.0


def test_every_cell_has_a_row() -> None:
    """The rows above cover every cell of the table, each once."""
    cells = [(type(command), stand) for stand, command, *_ in CELLS]
    assert len(cells) == len(set(cells))
    assert set(cells) == {(command, stand) for command in TABLE for stand in Standing}
    held = (Confirm, MarkHandled, Complete, Fail, Release, Extend)
    others = (Finish, CountDelivery, Reset, Forget)
    assert set(cells) == set(product((Ask, *held, *others), Standing))


OLDER = CLAIM._replace(record=CLAIM.record._replace(fence=2))
NEWER = CLAIM._replace(record=CLAIM.record._replace(fence=4))
EARLIER_BIRTH = CLAIM._replace(record=CLAIM.record._replace(version=(6 << 24) + 4))
LATER_BIRTH = CLAIM._replace(record=CLAIM.record._replace(version=(8 << 24) + 4))

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


def test_version_of_a_claim_may_lag() -> None:
    """The holder of the newest claim may write though the record was written since."""
    extended = BASE._replace(version=BASE.version + 100, lease_until=99.0)
    assert isinstance(decide(extended, COMPLETE, 12).outcome, Written)


@pytest.mark.parametrize("at", [0.0, 1e12])
def test_no_lease_never_runs_out(at: float) -> None:
    """A claim without a lease lives at any time, and tells no time to come back."""
    endless = BASE._replace(lease_until=None)
    assert decide(endless, ASK, at).outcome == Busy(endless, None)


@pytest.mark.parametrize("command", [RESET, FORGET])
def test_operators_end_what_has_no_end(command: Reset | Forget) -> None:
    """A claim without a lease is for operators to judge; one whose lease lives is not."""
    endless = BASE._replace(lease_until=None)
    assert isinstance(decide(endless, command, 12).outcome, Written)
    assert isinstance(decide(BASE, command, 9).outcome, Refused)


def test_of_two_that_send_the_newest_may_complete() -> None:
    """Whoever asks for what is handled may send at once; the former sender's claim is spent."""
    first = decide(STORED[HANDLED], ASK, 12)
    assert isinstance(first.outcome, Handled)
    second = decide(first.new, replace(ASK, draw=10), 12)
    assert isinstance(second.outcome, Handled)
    assert isinstance(decide(second.new, Complete(first.outcome.claim), 12).outcome, Fenced)
    assert isinstance(decide(second.new, Complete(second.outcome.claim), 12).outcome, Written)


def test_finished_while_somebody_sends() -> None:
    """A sender whose message was finished by another hears that it is completed."""
    sender = decide(STORED[HANDLED], ASK, 12)
    assert isinstance(sender.outcome, Handled)
    finished = decide(sender.new, FINISH, 12).new
    assert decide(finished, Complete(sender.outcome.claim, "late"), 12) == (
        Written(finished),
        finished,
        False,
    )


def test_first_fingerprint_is_kept() -> None:
    """A record without a fingerprint takes the first that comes with a grant, and keeps it."""
    bare = BASE._replace(state=State.FAILED, fingerprint=None)
    first = decide(bare, ASK, 12).new
    assert first is not None
    assert first.fingerprint == "one"
    assert isinstance(decide(first, OTHER, 12).outcome, Mismatch)


def test_first_metadata_is_kept() -> None:
    """Metadata of a record that exists stays as it began, whatever later claims bring."""
    new = decide(STORED[FAILED], ASK, 12).new
    assert new is not None
    assert new.metadata == {"tenant": "a"}


@pytest.mark.parametrize("on_failed", ["retry", "skip", "dead_letter"])
def test_what_was_reset_runs(on_failed: OnFailed) -> None:
    """A reset allows a record to run again under any policy, once: the next failure counts."""
    reset = decide(STORED[EXHAUSTED], RESET, 12).new
    again = decide(reset, under(on_failed=on_failed), 12)
    assert isinstance(again.outcome, Granted)
    assert again.outcome.claim.attempts == 1


def test_births_differ() -> None:
    """A record that begins again under its key is told apart by the number that was drawn."""
    first, second = (decide(None, replace(ASK, draw=draw), 12).new for draw in (0, 2**39 - 1))
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


RETENTION_S = 30 * 86_400.0


@pytest.mark.parametrize(
    ("sent_at", "too_old"),
    [(None, False), (0.0, False), (-0.001, True), (RETENTION_S, False), (RETENTION_S + 9, False)],
)
def test_too_old(sent_at: float | None, too_old: bool) -> None:
    """A message sent longer ago than records are kept is too old; one without a time never is."""
    assert is_too_old(Policy(), sent_at, RETENTION_S) is too_old
    assert not is_too_old(Policy(on_too_old="run"), sent_at, RETENTION_S)


def test_too_old_follows_the_retention() -> None:
    """What is too old depends on how long this consumer's records are kept."""
    assert is_too_old(Policy(retention="1h"), 0.0, 3_601.0)
    assert not is_too_old(Policy(retention="2h"), 0.0, 3_601.0)
