"""The rules under any order of events: workers that race, stall and come back, and operators.

A worker's step is two: it reads and decides, and any time later it writes if nothing has changed.
What must hold is told by a model that knows none of the rules' code: who got the newest grant of
each record, and what that holder has done with it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from oncely.core.commands import (
    Ask,
    Busy,
    Cancel,
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
    Happened,
    Held,
    InDoubt,
    MarkHandled,
    Mismatch,
    Outcome,
    Refused,
    Release,
    Reset,
    RunNow,
    Written,
)
from oncely.core.policy import Policy
from oncely.core.record import Claim, Key, Record, State
from oncely.core.rules import PURGEABLE, Decision, decide

KEYS = [Key("billing", "1"), Key("mailing", "1")]
LEASE_S = 10.0

POLICIES = [
    Policy(tries=2),
    Policy(tries=3),
    Policy(tries=2, on_failed="skip", on_in_doubt="hold"),
    Policy(tries=3, on_failed="dead_letter", on_in_doubt="dead_letter"),
    Policy(tries=4, on_in_doubt=lambda message: "unknown", on_mismatch="ignore"),
]


NOBODY = -1


@dataclass
class Model:
    """What is true of one key, as somebody would note it who watches and knows the five rules."""

    exists: bool = False
    state: State = State.PROCESSING
    holder: int = NOBODY
    """The number of the newest grant; grants are numbered over all time."""
    asker: int = NOBODY
    """The token of whoever was granted that, or has set the message aside."""
    fence: int = 0
    attempts: int = 0
    released: int = NOBODY
    """The number of the grant that was given back, where that was the last."""
    ends: float | None = 0.0
    exhausted: bool = False
    fingerprint: str | None = None
    result: Any = None
    duplicates: int = 0
    is_cancelled: bool = False
    """Whether an operator has cancelled it once, since it began."""
    is_said: bool = False
    """Whether it is completed because somebody has said that it happened."""
    writes: int = 0
    """Every change of the record; a write decided before the last of them must not succeed."""

    def lives(self, now: float) -> bool:
        """Whether somebody holds it."""
        held = self.exists and self.state is State.PROCESSING
        return held and (self.ends is None or now < self.ends)

    def restored(self, before: "Model", now: float) -> None:
        """As it was before the newest grant, but that grant's fence is spent for good."""
        self.exists, self.state, self.attempts = before.exists, before.state, before.attempts
        self.exhausted, self.fingerprint = before.exhausted, before.fingerprint
        self.ends, self.released = now, self.holder
        self.holder, self.asker = NOBODY, NOBODY

    def is_asked_again(self, ask: Ask) -> bool:
        """Whether what is stored comes from that very asking, which did not hear of it."""
        return self.exists and self.asker == ask.token


class Grant(NamedTuple):
    """A claim that somebody got, its number, and the model as it was before."""

    claim: Claim
    number: int
    before: Model


class Step(NamedTuple):
    """What somebody has decided, from what they read, and not yet written."""

    key: Key
    command: Command
    grant: Grant | None
    believed: Record | None
    decision: Decision
    expected: type[Outcome]
    decided_at: float
    writes: int


@dataclass
class World:
    """The records, the clock, and the claims that were ever granted."""

    now: float = 100.0
    draws: int = 0
    granted: int = 0
    """How many grants there were, those included of which nobody has heard."""
    records: dict[Key, Record] = field(default_factory=dict)
    models: dict[Key, Model] = field(default_factory=lambda: {key: Model() for key in KEYS})
    grants: list[Grant] = field(default_factory=list)
    completed: dict[Key, Record] = field(default_factory=dict)
    """Each completed record as it was when it was completed."""
    versions: set[tuple[Key, int]] = field(default_factory=set)
    """All that were ever stored: whoever has read what was stored before must be able to tell."""
    unheard: dict[int, Ask] = field(default_factory=dict)
    """What was asked, by its token, by whom no answer has reached."""


# ---- What has to be answered -------------------------------------------------------------------


def expected_of_asking(model: Model, ask: Ask, now: float) -> type[Outcome]:
    """What rules 1, 2 and 5 and the policy leave as the only answer."""
    policy = ask.policy
    if not model.exists:
        return Granted
    if policy.on_mismatch != "ignore" and {ask.fingerprint, model.fingerprint} == {"one", "two"}:
        return Mismatch
    if model.state is State.COMPLETED:
        return Duplicate
    if model.is_asked_again(ask) and model.state is State.PROCESSING:
        return Granted
    if model.lives(now):
        return Busy
    if model.state is State.HANDLED:
        return Handled
    return Exhausted if model.exhausted else expected_of_trying(model, ask)


def expected_of_trying(model: Model, ask: Ask) -> type[Outcome]:
    """What the policy leaves for what has failed, or is in doubt."""
    policy = ask.policy
    spent = Exhausted if policy.is_spent(model.attempts) else Granted
    if model.state is State.FAILED and not model.attempts:
        return spent
    if model.state is State.FAILED:
        return {"retry": spent, "skip": Duplicate, "dead_letter": Exhausted}[policy.on_failed]
    if callable(policy.on_in_doubt):
        findings = {"happened": Duplicate, "not_happened": spent}
        return findings.get(str(ask.finding), InDoubt)
    return {"retry": spent, "hold": InDoubt, "dead_letter": Exhausted}[policy.on_in_doubt]


_MAY_WRITE: dict[State, tuple[type[Command], ...]] = {
    State.PROCESSING: (Confirm, MarkHandled, Complete, Fail, Release, Extend),
    State.HANDLED: (MarkHandled, Complete, Release, Extend),
    State.COMPLETED: (MarkHandled, Complete),
    State.FAILED: (Fail,),
}


def expected_of_holding(model: Model, command: Held, grant: Grant) -> type[Outcome]:
    """Rule 3: only the newest grant may write, and only what does not undo an end."""
    if is_given_back(model, command, grant):
        return Written
    if not model.exists or grant.number != model.holder:
        return Fenced
    return Written if isinstance(command, _MAY_WRITE[model.state]) else Fenced


def is_given_back(model: Model, command: Command, grant: Grant | None) -> bool:
    """Whether a claim is released already, or gone: to release it again is not an error."""
    if grant is None or not isinstance(command, Release):
        return False
    return grant.number == model.released if model.exists else not grant.before.exists


Unclaimed = Finish | CountDelivery | Reset | Happened | RunNow | Cancel | Forget
"""What anybody may ask: relays, the hand-written repository's face, operators."""


def expected_without_a_claim(model: Model, command: Unclaimed, now: float) -> type[Outcome]:
    """Only what is handled is finished, and whatever is there is counted. Operators never touch a
    live claim, nor reset what has been handled; and only what is in doubt may have happened.
    """
    match command:
        case Finish():
            allowed = model.exists and model.state in (State.HANDLED, State.COMPLETED)
        case CountDelivery():
            allowed = model.exists
        case Forget():
            allowed = not model.lives(now) or model.ends is None
        case Reset():
            over = model.exists and (not model.lives(now) or model.ends is None)
            allowed = over and model.state in (State.PROCESSING, State.FAILED)
        case Happened():
            over = model.exists and (not model.lives(now) or model.ends is None)
            is_said = model.state is State.COMPLETED and model.is_said
            allowed = over and (model.state is State.PROCESSING or is_said)
        case RunNow():
            waits = model.state is State.FAILED and not model.exhausted
            allowed = not model.exists or waits
        case Cancel():
            waits = model.state is State.FAILED and (not model.exhausted or model.is_cancelled)
            allowed = not model.exists or waits
    return Written if allowed else Refused


def writes_nothing(
    model: Model, command: Command, grant: Grant | None, expected: type[Outcome]
) -> bool:
    """Who is refused changes nothing; and what is handled is never undone, and has no lease."""
    if expected in (Fenced, Refused, Busy, InDoubt, Mismatch) or isinstance(command, Confirm):
        return True
    if is_given_back(model, command, grant):
        return True
    is_over = model.state in (State.HANDLED, State.COMPLETED)
    if isinstance(command, Ask) and model.is_asked_again(command):
        return is_over or model.exhausted
    return is_over and isinstance(command, MarkHandled | Release | Extend)


# ---- What has to be stored ---------------------------------------------------------------------


def note_asking(model: Model, ask: Ask, outcome: Outcome, now: float) -> None:
    """A grant makes a holder; an end by policy makes none. What is granted again counts from now
    on, and is what it was.
    """
    if model.is_asked_again(ask) and model.state is State.PROCESSING:
        model.ends = None if ask.lease_s is None else now + ask.lease_s
        return
    match outcome:
        case Granted() | Handled():
            begins = not model.exists
            model.fence = 1 if begins else model.fence + 1
            if isinstance(outcome, Granted):
                model.attempts = 1 if begins else model.attempts + 1
                model.state, model.exhausted = State.PROCESSING, False
                model.fingerprint = (None if begins else model.fingerprint) or ask.fingerprint
                model.ends = None if ask.lease_s is None else now + ask.lease_s
            else:
                model.duplicates += 1
            if begins:
                model.result, model.duplicates, model.is_said = None, 0, False
                model.is_cancelled = False
            model.exists, model.asker, model.released = True, ask.token, NOBODY
        case Duplicate() if model.state is State.COMPLETED:
            model.duplicates += 1
        case Duplicate():
            model.state = State.COMPLETED
        case Exhausted():
            model.state, model.exhausted = State.FAILED, True
            model.holder, model.asker, model.released = NOBODY, ask.token, NOBODY


def note_holding(model: Model, command: Held, grant: Grant, now: float) -> None:
    """What the holder of the newest grant did."""
    match command:
        case MarkHandled(_, result):
            model.state, model.result = State.HANDLED, result
        case Complete(_, result):
            model.state = State.COMPLETED
            model.result = model.result if result is None else result
        case Fail(_, _, final):
            model.state, model.exhausted = State.FAILED, final
        case Release():
            model.restored(grant.before, now)
        case Extend(_, lease_s):
            model.ends = None if lease_s is None else now + lease_s


def note_without_a_claim(model: Model, command: Unclaimed) -> None:
    """What somebody did who holds no claim; the newest holder stays the newest, unless an operator
    has decided.
    """
    match command:
        case Finish():
            model.state = State.COMPLETED
        case CountDelivery():
            model.attempts += 1
        case Forget():
            model.exists = False
        case Reset():
            model.state, model.exhausted, model.attempts = State.FAILED, False, 0
            model.holder, model.asker = NOBODY, NOBODY
        case Happened():
            model.state, model.is_said = State.COMPLETED, True
            model.holder, model.asker = NOBODY, NOBODY
        case Cancel():
            model.exhausted = model.is_cancelled = True
            model.holder, model.asker = NOBODY, NOBODY


def before_again(model: Model, policy: Policy) -> Model:
    """What is restored by the release of a claim that is granted again: in doubt, where the policy
    grants a doubt, unless it never ran before.
    """
    before = copy_of(model)
    before.exists, before.attempts = model.fence > 1, model.attempts - 1
    if not before.attempts or policy.on_in_doubt in ("hold", "dead_letter"):
        before.state = State.FAILED
    return before


def copy_of(model: Model) -> Model:
    """The model as it is now."""
    return Model(**vars(model))


# ---- The machine -------------------------------------------------------------------------------

keys = st.sampled_from(KEYS)
policies = st.sampled_from(POLICIES)
findings = st.sampled_from(["happened", "not_happened", "unknown", None])
fingerprints = st.sampled_from(["one", "one", "one", "two", None])
leases = st.sampled_from([LEASE_S, LEASE_S, LEASE_S, None])
results = st.sampled_from([None, "first", "second"])
# Counted from the newest grant: old ones are used at any time, but the newest the most.
picks = st.sampled_from([0, 0, 0, 0, 1, 1, 2, 3, 5, 8])
HELD_COMMANDS: list[Callable[[Claim, Any, float | None], Held]] = [
    lambda claim, result, _: MarkHandled(claim, result),
    lambda claim, result, _: Complete(claim, result),
    lambda claim, result, _: Fail(claim, "no", final=result == "second"),
    lambda claim, _, __: Release(claim),
    lambda claim, _, lease_s: Extend(claim, lease_s),
    lambda claim, _, __: Confirm(claim),
]
commands = st.sampled_from(HELD_COMMANDS)
unclaimed = st.sampled_from(
    [Finish(), CountDelivery(), Reset(), Happened(), RunNow(), Cancel(), Forget()]
)


class RulesMachine(RuleBasedStateMachine):
    """Several workers, each with every claim that it ever got, and steps left unfinished."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.unfinished: list[Step] = []

    # ---- Steps -----------------------------------------------------------------------------

    @rule(key=keys, policy=policies, lease=leases, finding=findings, fingerprint=fingerprints)
    def ask(self, key: Key, **given: Any) -> None:
        """A worker asks for a claim, and does not stop in between."""
        self.write(self.decide_asking(key, **given))

    @rule(key=keys, policy=policies, lease=leases, finding=findings, fingerprint=fingerprints)
    def ask_slowly(self, key: Key, **given: Any) -> None:
        """A worker asks for a claim, and stalls before writing."""
        self.unfinished.append(self.decide_asking(key, **given))

    @rule(key=keys, policy=policies, lease=leases, finding=findings, fingerprint=fingerprints)
    def ask_and_hear_nothing(self, key: Key, **given: Any) -> None:
        """A worker asks for a claim, and its connection breaks: it may be stored."""
        step = self.decide_asking(key, **given)
        assert isinstance(step.command, Ask)
        self.world.unheard[step.command.token] = step.command
        self.write(step)

    @precondition(lambda self: self.world.unheard)
    @rule(pick=picks, hears=st.booleans())
    def ask_again(self, pick: int, hears: bool) -> None:
        """Whoever heard nothing asks the same, and may hear nothing again.

        What it was granted is its own still, unless it was taken over.
        """
        asks = list(self.world.unheard.values())
        self.world.draws += 10
        ask = replace(asks[-1 - pick % len(asks)], count_from=self.world.draws)
        step = self.decide_ask(ask)
        is_again = self.world.models[ask.key].is_asked_again(ask)
        is_answered = step.decision.new is step.believed
        if hears:
            del self.world.unheard[ask.token]
        if (self.write(step) or is_answered) and is_again and step.expected in (Granted, Handled):
            assert isinstance(step.decision.outcome, Granted | Handled)
            assert step.decision.outcome.claim.fence == self.world.models[ask.key].fence

    @rule(key=keys, policy=policies, racers=st.integers(2, 5))
    def race(self, key: Key, policy: Policy, racers: int) -> None:
        """Rule 1: of workers that ask at the same moment at most one is granted.

        Those who lose read again, and all find it busy; what is handled they may send, one after
        the other.
        """
        given: dict[str, Any] = {
            "policy": policy,
            "lease": LEASE_S,
            "finding": None,
            "fingerprint": None,
        }
        steps = [self.decide_asking(key, **given) for _ in range(racers)]
        won = [self.write(step) for step in steps if step.expected in (Granted, Handled)]
        assert won in ([], [True] + [False] * (racers - 1))
        if won:
            again = self.decide_asking(key, **given)
            assert again.expected is (Busy if steps[0].expected is Granted else Handled)
            self.write(again)

    @rule(key=keys, policy=policies, dies=st.booleans())
    def attempt(self, key: Key, policy: Policy, dies: bool) -> None:
        """Rule 5: a message that fails, or kills its worker, spends one of its tries."""
        step = self.decide_asking(key, policy, LEASE_S, finding=None, fingerprint=None)
        if self.write(step) and step.expected is Granted:
            if dies:
                self.world.now += LEASE_S
            else:
                self.write(self.decide_holding(0, HELD_COMMANDS[2], None, None))

    @precondition(lambda self: self.world.grants)
    @rule(pick=picks, command=commands, result=results, lease=leases)
    def hold(self, pick: int, command: Any, result: Any, lease: float | None) -> None:
        """Somebody uses a claim that they got at any time, newest or not."""
        self.write(self.decide_holding(pick, command, result, lease))

    @precondition(lambda self: self.world.grants)
    @rule(pick=picks, command=commands, result=results, lease=leases)
    def hold_slowly(self, pick: int, command: Any, result: Any, lease: float | None) -> None:
        """The same, and they stall before writing."""
        self.unfinished.append(self.decide_holding(pick, command, result, lease))

    @precondition(lambda self: self.world.grants)
    @rule(pick=picks, first=results, second=results)
    def complete_twice(self, pick: int, first: Any, second: Any) -> None:
        """Rule 3: when a complete was written, the same again succeeds and writes nothing."""
        step = self.decide_holding(pick, lambda c, _, __: Complete(c, first), None, None)
        self.write(step)
        if step.expected is Written:
            again = self.decide_holding(pick, lambda c, _, __: Complete(c, second), None, None)
            assert again.expected is Written
            assert again.decision.new is self.world.records[step.key]

    @precondition(lambda self: self.world.grants)
    @rule(pick=picks, first=results, last=results, how=st.sampled_from(["sender", "relay"]))
    def handle_and_send(self, pick: int, first: Any, last: Any, how: str) -> None:
        """What is handled is completed by who sent the last of it, and keeps what was returned."""
        step = self.decide_holding(pick, lambda c, _, __: MarkHandled(c, first), None, None)
        if not self.write(step):
            return
        kept = first
        if how == "relay":
            self.command_without_a_claim(step.key, Finish(), slowly=False)
        else:
            self.write(self.decide_holding(pick, lambda c, _, __: Complete(c, last), None, None))
            kept = last or first
        record = self.world.records[step.key]
        assert (record.state, record.result) == (State.COMPLETED, kept)

    @rule(key=keys, command=unclaimed, slowly=st.booleans())
    def command_without_a_claim(self, key: Key, command: Unclaimed, slowly: bool) -> None:
        """Somebody without a claim finishes, counts, resets or forgets a record, or says that its
        effect has happened.
        """
        expected = expected_without_a_claim(self.world.models[key], command, self.world.now)
        step = self.decide(key, command, None, expected)
        if slowly:
            self.unfinished.append(step)
        else:
            self.write(step)

    @precondition(lambda self: self.unfinished)
    @rule(pick=picks)
    def go_on(self, pick: int) -> None:
        """Somebody who stalled goes on."""
        self.write(self.unfinished.pop(pick % len(self.unfinished)))

    @rule(seconds=st.sampled_from([1.0, 9.0, 10.0, 30.0]))
    def wait(self, seconds: float) -> None:
        """Time passes, and leases run out."""
        self.world.now += seconds

    @rule(key=keys)
    def purge(self, key: Key) -> None:
        """A cleaner removes what is old enough."""
        record = self.world.records.get(key)
        if record is not None and record.state in PURGEABLE:
            self.store(key, None)
            self.world.models[key].exists = False

    # ---- How a step is decided and written -------------------------------------------------

    def decide_asking(self, key: Key, policy: Policy, lease: float | None, **given: Any) -> Step:
        # Apart: a release gives a claim the birth after its own, which no later claim may draw.
        self.world.draws += 10
        return self.decide_ask(Ask(key, policy, lease, self.world.draws, **given))

    def decide_ask(self, ask: Ask) -> Step:
        expected = expected_of_asking(self.world.models[ask.key], ask, self.world.now)
        return self.decide(ask.key, ask, None, expected)

    def decide_holding(self, pick: int, command: Any, result: Any, lease: float | None) -> Step:
        grant = self.world.grants[-1 - pick % len(self.world.grants)]
        asked = command(grant.claim, result, lease)
        key = grant.claim.key
        expected = expected_of_holding(self.world.models[key], asked, grant)
        return self.decide(key, asked, grant, expected)

    def decide(
        self, key: Key, command: Command, grant: Grant | None, expected: type[Outcome]
    ) -> Step:
        """Read and decide. The answer is the expected one, whether or not it gets written."""
        believed, now = self.world.records.get(key), self.world.now
        decision = decide(believed, command, now)
        assert type(decision.outcome) is expected
        if writes_nothing(self.world.models[key], command, grant, expected):
            assert decision.new is believed
        writes = self.world.models[key].writes
        return Step(key, command, grant, believed, decision, expected, now, writes)

    def write(self, step: Step) -> bool:
        """Write what was decided, if the version is still the same; whether it was."""
        new = step.decision.new
        if new is step.believed:
            return False
        stored = self.world.records.get(step.key)
        if (stored and stored.version) != (step.believed and step.believed.version):
            return False
        # The version says that nothing was written since; it must be true. (An absent record has
        # none: it may have come and gone.)
        assert step.believed is None or self.world.models[step.key].writes == step.writes
        self.store(step.key, new)
        self.note(step)
        return True

    def store(self, key: Key, new: Record | None) -> None:
        self.world.models[key].writes += 1
        if new is None:
            del self.world.records[key]
            self.world.completed.pop(key, None)
        else:
            assert (key, new.version) not in self.world.versions
            self.world.versions.add((key, new.version))
            self.world.records[key] = new

    def note(self, step: Step) -> None:
        model, outcome = self.world.models[step.key], step.decision.outcome
        before = copy_of(model)
        is_again = isinstance(step.command, Ask) and model.is_asked_again(step.command)
        is_unheard = isinstance(step.command, Ask) and step.command.token in self.world.unheard
        match step.command:
            case Ask() as ask:
                note_asking(model, ask, outcome, step.decided_at)
            case Held():
                assert step.grant is not None
                note_holding(model, step.command, step.grant, step.decided_at)
            case command:
                note_without_a_claim(model, command)
        if isinstance(outcome, Granted | Handled):
            if is_again and before.state is State.PROCESSING:
                assert isinstance(step.command, Ask)
                before = before_again(model, step.command.policy)
            else:
                self.world.granted += 1
                model.holder = self.world.granted
            if not is_unheard:
                self.world.grants.append(Grant(outcome.claim, model.holder, before))
        if model.exists and model.state is State.COMPLETED:
            self.world.completed.setdefault(step.key, self.world.records[step.key])

    # ---- What holds at any time ------------------------------------------------------------

    @invariant()
    def records_are_as_noted(self) -> None:
        """Rules 3, 4 and 5: state, fence and attempts are what the grants and holders made."""
        for key, model in self.world.models.items():
            record = self.world.records.get(key)
            assert (record is not None) == model.exists
            if record is not None:
                assert (record.state, record.fence) == (model.state, model.fence)
                assert (record.attempts, record.exhausted) == (model.attempts, model.exhausted)
                assert (record.result, record.duplicates) == (model.result, model.duplicates)
                assert record.fingerprint == model.fingerprint

    @invariant()
    def leases_are_as_noted(self) -> None:
        """A record is held exactly as long as its newest holder may think so; none but those in
        processing is held.
        """
        for key, model in self.world.models.items():
            if model.exists:
                ends = model.ends if model.state is State.PROCESSING else None
                assert self.world.records[key].lease_until == ends

    @invariant()
    def completed_records_stay(self) -> None:
        """Rule 2: a completed record never changes, but for its deliveries being counted."""
        for key, completed in self.world.completed.items():
            record = self.world.records[key]
            assert record.duplicates >= completed.duplicates
            assert record.attempts >= completed.attempts
            assert record == completed._replace(
                duplicates=record.duplicates,
                attempts=record.attempts,
                last_seen=record.last_seen,
                version=record.version,
            )

    @invariant()
    def claims_are_told_apart(self) -> None:
        """Rule 4: no two grants of one key have the same fence and the same birth, but those that
        are one, granted again.
        """
        numbers: dict[tuple[Key, int, int], int] = {}
        for claim, number, _ in self.world.grants:
            name = (claim.key, claim.record.birth, claim.fence)
            assert numbers.setdefault(name, number) == number


RulesMachine.TestCase.settings = settings(
    max_examples=300,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestRules = RulesMachine.TestCase
