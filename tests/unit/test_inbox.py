"""Inside the caller's transaction: what is written ahead costs nothing, and changes nothing."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from oncely.claiming.calls import Calls
from oncely.claiming.inbox import Inbox
from oncely.core.commands import Busy, Duplicate
from oncely.core.deferred import DeferredMessage
from oncely.core.errors import EndedError, FencedError, OncelyError, StoreUnavailable
from oncely.core.message import Message
from oncely.core.policy import Policy
from oncely.core.record import Claim, Key, Record, State
from oncely.ledger import Ledger
from oncely.metrics import Metrics
from oncely.stores.base import Joined, Query
from oncely.stores.memory import MemoryStore
from oncely.stores.memory_tables import Tables
from oncely.testing import ManualClock, granted

Watcher = Callable[[], None]

KEYS = [Key("billing", str(n)) for n in range(3)]
ONE, TWO, THREE = KEYS

COMMITS = "commits unless there is an error"
COMMITS_ALL_THE_SAME = "commits after an error, too"


class JoinedTables:
    """A transaction in memory as somebody else's, with savepoints. `asked` names what was asked
    of it, in order.
    """

    def __init__(self, tables: Tables, asked: list[str], *, is_guarded: bool) -> None:
        self._tables = tables
        self._asked = asked
        self.is_guarded = is_guarded
        self._watchers: tuple[Watcher, Watcher] = (lambda: None, lambda: None)
        self._savepoints: list[int] = []
        self.is_over = False

    def __getattr__(self, name: str) -> Any:
        self._asked.append(name)
        return getattr(self._tables, name)

    def check(self) -> None:
        if self.is_over:
            raise EndedError("the transaction was ended")

    def watch(self, on_savepoint: Watcher, on_undo: Watcher) -> None:
        self._watchers = on_savepoint, on_undo

    def savepoint(self) -> None:
        """The owner begins a savepoint."""
        self._watchers[0]()
        self._savepoints.append(len(self._tables._undo))

    def undo(self) -> None:
        """The owner takes back what was written after the newest savepoint, if there is one."""
        if self._savepoints:
            self._watchers[1]()
            place = self._savepoints.pop()
            while len(self._tables._undo) > place:
                self._tables._undo.pop()()


class JoinableStore(MemoryStore):
    """A store in memory whose transactions can be joined. A connection is a word: what its owner
    does in the end.
    """

    def __init__(self, clock: ManualClock, *, is_guarded: bool = True) -> None:
        super().__init__(clock)
        self.asked: list[str] = []
        self.is_guarded = is_guarded
        self.is_open = False
        self.joined: JoinedTables

    @contextmanager
    def within(self, connection: Any) -> Iterator[Joined]:
        self.joined = JoinedTables(self._tables, self.asked, is_guarded=self.is_guarded)
        with self._lock:
            self.is_open = True
            try:
                yield cast(Joined, self.joined)
                self.joined.check()
            except BaseException:
                if connection != COMMITS_ALL_THE_SAME:
                    self._tables.roll_back()
                raise
            finally:
                self._tables.commit()
                self.is_open = False


@pytest.fixture
def store(clock: ManualClock) -> JoinableStore:
    """A store in memory whose transactions can be joined."""
    return JoinableStore(clock)


@pytest.fixture
def ledger(store: JoinableStore) -> Ledger:
    """The ledger over `store`."""
    return Ledger(store)


def state(calls: Calls, key: Key = ONE) -> State:
    record = calls.find(key)
    assert record is not None
    return record.state


# ---- What it spares ----------------------------------------------------------------------------


def test_a_message_costs_one_write(ledger: Ledger, store: JoinableStore) -> None:
    """A first claim that is completed in the same transaction is a single write."""
    with ledger.transaction(COMMITS) as inbox:
        inbox.complete(granted(inbox.claim(ONE)))
    assert store.asked == ["insert"]
    assert state(ledger) is State.COMPLETED
    assert isinstance(ledger.claim(ONE), Duplicate)


def test_many_cost_one_write(ledger: Ledger, store: JoinableStore) -> None:
    """So are many that are claimed together."""
    with ledger.transaction(COMMITS) as inbox:
        inbox.complete_many([granted(outcome) for outcome in inbox.claim_many(KEYS)])
    assert store.asked == ["insert"]
    assert ledger.counts() == {("billing", State.COMPLETED): 3}


def test_only_what_is_left_costs_more(ledger: Ledger, store: JoinableStore) -> None:
    """Of many, those that are not completed take one more write between them."""
    with ledger.transaction(COMMITS) as inbox:
        first, *_ = [granted(outcome) for outcome in inbox.claim_many(KEYS)]
        inbox.complete(first)
    assert store.asked == ["insert", "swap"]
    assert [state(ledger, key) for key in KEYS] == [
        State.COMPLETED,
        State.PROCESSING,
        State.PROCESSING,
    ]


def test_not_where_a_commit_cannot_be_refused(clock: ManualClock) -> None:
    """Where the caller could commit in the midst of it, nothing is written ahead."""
    store = JoinableStore(clock, is_guarded=False)
    with Ledger(store).transaction(COMMITS) as inbox:
        inbox.complete(granted(inbox.claim(ONE)))
    assert store.asked == ["insert", "swap"]


# ---- How a transaction ends --------------------------------------------------------------------


def test_rolled_back(ledger: Ledger) -> None:
    """Where the caller's work fails nothing is stored, and the error is raised as it was."""
    error = ValueError("no")

    def work() -> None:
        with ledger.transaction(COMMITS) as inbox:
            inbox.complete(granted(inbox.claim(ONE)))
            raise error

    with pytest.raises(ValueError, match="no") as caught:
        work()
    assert caught.value is error
    assert ledger.find(ONE) is None


def test_left_with_an_error(ledger: Ledger) -> None:
    """After an error what was not completed is not left as completed: the caller may commit."""

    def work() -> None:
        with ledger.transaction(COMMITS_ALL_THE_SAME) as inbox:
            inbox.claim(ONE)
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        work()
    assert state(ledger) is State.PROCESSING


def test_store_away_in_the_end(
    ledger: Ledger, store: JoinableStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the last write fails that is raised, and the transaction is let go; after an error
    of the caller's that one is raised.
    """

    def away(*_: object) -> set[Key]:
        raise StoreUnavailable("away")

    def work(error: Exception | None) -> None:
        with ledger.transaction(COMMITS) as inbox:
            inbox.claim(ONE)
            if error is not None:
                raise error

    monkeypatch.setattr(Tables, "swap", away)
    with pytest.raises(StoreUnavailable):
        work(None)
    assert not store.is_open
    with pytest.raises(ValueError, match="mine"):
        work(ValueError("mine"))
    assert not store.is_open


@pytest.mark.parametrize("when", ["after all", "before the completion"])
def test_ended_inside(ledger: Ledger, store: JoinableStore, when: str) -> None:
    """A transaction that was ended inside the block is an error of its own when it is left, and
    when something is completed for which nothing is to be written.
    """
    completed = []

    def work() -> None:
        with ledger.transaction(COMMITS) as inbox:
            claim = granted(inbox.claim(ONE))
            store.joined.is_over = when == "before the completion"
            inbox.complete(claim)
            completed.append(claim)
            store.joined.is_over = True

    with pytest.raises(EndedError):
        work()
    assert len(completed) == (when == "after all")
    assert ledger.find(ONE) is None


def test_metrics_of_a_transaction(store: JoinableStore) -> None:
    """Duplicates that are turned away inside a transaction are counted as any."""
    registry = CollectorRegistry()
    ledger = Ledger(store, Metrics(registry))
    ledger.complete(granted(ledger.claim(ONE)))
    with ledger.transaction(COMMITS) as inbox:
        assert isinstance(inbox.claim(ONE), Duplicate)
    labels = {"provider": "billing"}
    assert registry.get_sample_value("duplicate_messages_blocked_total", labels) == 1


# ---- What it must not change -------------------------------------------------------------------


def test_second_claim_is_busy(ledger: Ledger) -> None:
    """A message that is claimed again in the same transaction is busy, and not a duplicate."""
    with ledger.transaction(COMMITS) as inbox:
        claim = granted(inbox.claim(ONE))
        assert isinstance(inbox.claim(ONE), Busy)
        assert state(inbox) is State.PROCESSING
        inbox.complete(claim, "done")
    record = ledger.find(ONE)
    assert record is not None
    assert (record.state, record.result, record.duplicates) == (State.COMPLETED, "done", 0)


def test_deferred_in_a_transaction(ledger: Ledger) -> None:
    """What is deferred is stored with the transaction; steps are kept, and found again in it."""
    with ledger.transaction(COMMITS) as inbox:
        claim = granted(inbox.claim(ONE))
        inbox.keep_step(claim, "charge", 7)
        assert inbox.steps(ONE) == {"charge": 7}
        inbox.handled(claim, "kept", [DeferredMessage("a", "mails", Message("a"), ONE)])
        inbox.finish([ONE])
        assert len(inbox.deferred(ONE)) == 1
    record = ledger.find(ONE)
    assert record is not None
    assert (record.state, record.result, ledger.steps(ONE)) == (
        State.HANDLED,
        "kept",
        {"charge": 7},
    )
    ledger.sent(ledger.take_deferred(10, "30s"))
    assert state(ledger) is State.COMPLETED


def test_step_of_what_is_completed(ledger: Ledger) -> None:
    """After it is completed a message keeps no step, though nothing was written since the claim."""
    with ledger.transaction(COMMITS) as inbox:
        claim = granted(inbox.claim(ONE))
        inbox.complete(claim)
        with pytest.raises(FencedError):
            inbox.keep_step(claim, "charge", 7)
    assert ledger.steps(ONE) == {}


def test_claim_that_is_undone(ledger: Ledger, store: JoinableStore) -> None:
    """A claim that a savepoint takes back can be completed no more; those from before it stay,
    whether or not they are completed.
    """
    with ledger.transaction(COMMITS) as inbox:
        before, *_ = [granted(outcome) for outcome in inbox.claim_many([ONE, TWO])]
        store.joined.savepoint()
        undone = granted(inbox.claim(THREE))
        store.joined.undo()
        with pytest.raises(FencedError):
            inbox.complete(undone)
        inbox.complete(before)
    assert (state(ledger, ONE), state(ledger, TWO)) == (State.COMPLETED, State.PROCESSING)
    assert ledger.find(THREE) is None


class Act(NamedTuple):
    """One call, for a message or for a claim that was granted before."""

    name: str
    key: Key
    pick: int
    """Which of the claims, counted from the newest."""
    text: str | None


def _claim(calls: Calls, act: Act, claims: list[Claim]) -> Any:
    outcome = calls.claim(act.key, "60s", Policy(tries=3), fingerprint=act.text)
    claim = getattr(outcome, "claim", None)
    if claim is not None:
        claims.append(claim)
    return outcome


def _claim_all(calls: Calls, act: Act, claims: list[Claim]) -> Any:
    outcomes = calls.claim_many([*KEYS, act.key], "60s")
    claims += [outcome.claim for outcome in outcomes if hasattr(outcome, "claim")]
    return outcomes


def _with_a_claim(call: Callable[[Calls, Claim, str | None], Any]) -> Callable[..., Any]:
    def run(calls: Calls, act: Act, claims: list[Claim]) -> Any:
        return call(calls, claims[-1 - act.pick % len(claims)], act.text) if claims else None

    return run


def _message(claim: Claim, text: str | None) -> list[DeferredMessage]:
    return [DeferredMessage(text, "mails", Message(text), claim.key)] if text else []


ACTS: Mapping[str, Callable[[Calls, Act, list[Claim]], Any]] = {
    "claim": _claim,
    "claim_all": _claim_all,
    "handled": _with_a_claim(lambda c, claim, text: c.handled_many([claim], [text])),
    "defer": _with_a_claim(
        lambda c, claim, text: c.handled_many([claim], deferred=[_message(claim, text)])
    ),
    "complete": _with_a_claim(lambda c, claim, text: c.complete_many([claim], [text])),
    "complete_all": lambda c, _, claims: c.complete_many(claims),
    "fail": _with_a_claim(lambda c, claim, text: c.fail_many([claim], ["no"], text == "one")),
    "release": _with_a_claim(lambda c, claim, _: c.release_many([claim])),
    "extend": _with_a_claim(lambda c, claim, _: c.extend_many([claim], "90s")),
    "keep_step": _with_a_claim(lambda c, claim, text: c.keep_step(claim, "step", text)),
    "find": lambda c, act, _: c.find(act.key),
    "deferred": lambda c, act, _: c.deferred(act.key),
    "finish": lambda c, act, _: c.finish([act.key]),
    "count_delivery": lambda c, act, _: c.count_delivery(act.key),
    "send": lambda c, _, __: c.sent(c.take_deferred(1, "1s")),
    "savepoint": lambda c, _, __: c._inside.savepoint(),  # type: ignore[attr-defined]
    "undo": lambda c, _, __: c._inside.undo(),  # type: ignore[attr-defined]
}
NAMES = [*ACTS, *["claim", "complete"] * 3, *["savepoint", "undo"] * 2]
acts = st.builds(
    Act,
    st.sampled_from(NAMES),
    st.sampled_from(KEYS),
    st.sampled_from([0, 0, 0, 1, 2]),
    st.sampled_from([None, None, "one", "two"]),
)
transactions = st.lists(st.lists(acts, max_size=12), max_size=4)


def _run(transactions: Sequence[Sequence[Act]], *, is_guarded: bool) -> Any:
    """What every call was answered, and what is stored in the end."""
    store = JoinableStore(ManualClock(), is_guarded=is_guarded)
    ledger = Ledger(store)
    claims: list[Claim] = []
    answers = []
    for each in transactions:
        with ledger.transaction(COMMITS) as inbox:
            answers += [_plain(_answer(inbox, act, claims)) for act in each]
    found = [_plain(record) for record in sorted(store.scan(Query()))]
    kept = [(ledger.steps(key), [m.id for m in ledger.deferred(key)]) for key in KEYS]
    return answers, found, kept


def _answer(inbox: Inbox, act: Act, claims: list[Claim]) -> Any:
    try:
        return ACTS[act.name](inbox, act, claims)
    except OncelyError as error:
        return error


def _plain(answer: Any) -> Any:
    """The same without what is drawn by chance, and without times."""
    match answer:
        case Record():
            return answer._replace(version=0, first_seen=0.0, last_seen=0.0, lease_until=None)
        case Claim(record, lease_s, former):
            return _plain(record), lease_s, _plain(former)
        case Exception():
            return repr(answer)
        case list():
            return [_plain(each) for each in answer]
        case _ if hasattr(answer, "claim"):
            return type(answer), _plain(answer.claim)
        case _ if hasattr(answer, "record"):
            return type(answer), _plain(answer.record)
        case _:
            return answer


@settings(max_examples=500, deadline=None)
@given(transactions=transactions)
def test_as_if_nothing_was_written_ahead(transactions: list[list[Act]]) -> None:
    """Whatever is asked in a transaction, and in those after it, is answered and stored as if
    every call had been written when it was made.
    """
    assert _run(transactions, is_guarded=True) == _run(transactions, is_guarded=False)
