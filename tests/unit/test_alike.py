"""Batches decided at once give what batches decided one by one give: every outcome, every row."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule
from tests.records import granted

from oncely.core.commands import (
    Command,
    Complete,
    Extend,
    Fail,
    Granted,
    Handled,
    MarkHandled,
    Outcome,
    Release,
)
from oncely.core.policy import Policy
from oncely.core.record import Claim, Key
from oncely.ledger import settle
from oncely.ledger.arguments import to_claim
from oncely.ledger.ledger import Ledger
from oncely.ledger.settle import Settler
from oncely.stores.memory_store import MemoryStore
from oncely.testing import ManualClock

IDS = [f"m{n}" for n in range(8)]
EQUAL = [1, True, 1.0]
"""Equal in Python, and told apart by JSON."""
POLICIES = [
    Policy(tries=2),
    Policy(tries=3, on_failed="skip", on_in_doubt="hold", on_too_old="run"),
    Policy(on_failed="dead_letter", on_in_doubt="dead_letter", on_mismatch="ignore"),
    Policy(count_duplicates="each", on_busy="discard", lease="none"),
]
COMMANDS = [
    Complete,
    MarkHandled,
    Release,
    lambda claim: Complete(claim, {"n": 1}),
    lambda claim: Fail(claim, "no route"),
    lambda claim: Fail(claim, "never", final=True),
    lambda claim: Fail(claim, "later", retry_s=5.0),
    lambda claim: Extend(claim, 20.0),
]


class _BothWays(RuleBasedStateMachine):
    """Two ledgers get the same batches; one of them decides each request by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.stores = [MemoryStore(self.clock), MemoryStore(self.clock)]
        self.settlers = [Settler(store) for store in self.stores]
        self.claims: list[tuple[Claim, Claim]] = []
        self.token = 1

    @rule(
        consumer=st.sampled_from(["billing", "mailing"]),
        ids=st.lists(st.sampled_from(IDS), min_size=1, max_size=6),
        policy=st.sampled_from(POLICIES),
        marks=st.lists(st.sampled_from([None, "a", "b"]), min_size=6, max_size=6),
        metadata=st.sampled_from(
            [None, {"n": 1}, [{"n": n} for n in range(6)], [{"n": n} for n in EQUAL * 2]]
        ),
        sent=st.sampled_from([None, [1.0] * 6, [None, 1.0, 1e12] * 2]),
        other=st.none() | st.integers(0, 5),
        has_tokens=st.booleans(),
    )
    def claim(
        self,
        consumer: str,
        ids: Sequence[str],
        policy: Policy,
        marks: Sequence[str | None],
        metadata: Any,
        sent: Sequence[float | None] | None,
        other: int | None,
        has_tokens: bool,
    ) -> None:
        """Claim these, one of them of another consumer."""
        keys = [Key("third" if n == other else consumer, id_) for n, id_ in enumerate(ids)]
        count = len(keys)
        given = metadata[:count] if isinstance(metadata, list) else metadata
        asked = to_claim(
            *(keys, None, policy, marks[:count], given, None, None),
            [self.token + 2 * n for n in range(count)] if has_tokens else self.token,
            sent_at=None if sent is None else sent[:count],
        )
        self.token += 1_000
        outcomes = self._settled([asked, asked])
        held = (Granted, Handled)
        for one, other_one in zip(*outcomes, strict=True):
            if isinstance(one, held) and isinstance(other_one, held):
                self.claims.append((one.claim, other_one.claim))

    @rule(command=st.sampled_from(COMMANDS), indexes=st.sets(st.integers(0, 20), max_size=6))
    def write(self, command: Any, indexes: set[int]) -> None:
        """Let the holders of some claims say what became of them."""
        chosen = [pair for n, pair in enumerate(self.claims[-20:]) if n in indexes]
        self._settled([[command(pair[n]) for pair in chosen] for n in (0, 1)])

    @rule(command=st.sampled_from(COMMANDS), count=st.integers(2, 6))
    def write_newest(self, command: Any, count: int) -> None:
        """The same for those that were granted last, most likely together."""
        chosen = self.claims[-count:]
        self._settled([[command(pair[n]) for pair in chosen] for n in (0, 1)])

    @rule(seconds=st.sampled_from([1.0, 40.0, 400.0]))
    def wait(self, seconds: float) -> None:
        """Time passes."""
        self.clock.advance(seconds)

    @rule()
    def forget(self) -> None:
        """A purge raises a horizon."""
        for store in self.stores:
            store.forget_until({"billing": self.clock()})

    def _settled(self, both: Sequence[Sequence[Command]]) -> Sequence[Sequence[Outcome]]:
        at_once = self.settlers[0].settle(both[0])
        with one_by_one():
            by_itself = self.settlers[1].settle(both[1])
        assert repr([*at_once]) == repr([*by_itself])
        assert repr(all_records(self.stores[0])) == repr(all_records(self.stores[1]))
        return at_once, by_itself


@contextmanager
def one_by_one() -> Iterator[None]:
    """No two commands are one case."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(settle, "terms_of", lambda command, _: command and object())
        yield


def all_records(store: MemoryStore) -> Any:
    """All that a store has."""
    keys = [Key(name, id_) for name in ("billing", "mailing", "third") for id_ in IDS]
    return store.load(keys)


@pytest.mark.parametrize("results", [None, EQUAL])
def test_values_that_are_equal_in_python_alone_are_kept_apart(results: Any) -> None:
    """Records of a batch have their own values where only JSON tells these apart."""
    store = MemoryStore()
    ledger = Ledger(store)
    keys = [Key("billing", id_) for id_ in IDS[:3]]
    metadata = [{"paid": value} for value in EQUAL]
    outcomes = ledger.claim_many(keys, metadata=metadata)
    claims = [granted(outcome) for outcome in outcomes]
    assert repr([claim.metadata for claim in claims]) == repr(metadata)
    ledger.complete_many(claims, results)
    loaded = store.load(keys).records
    records = [loaded[key] for key in keys]
    assert repr([record.metadata for record in records]) == repr(metadata)
    assert repr([record.result for record in records]) == repr(results or [None] * 3)


TestBothWays = _BothWays.TestCase
TestBothWays.settings = settings(
    max_examples=150,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
