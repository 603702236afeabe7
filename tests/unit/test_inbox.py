"""Inside the caller's transaction: a claim is written as what it is, and so is its completion."""

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry
from tests.records import granted

from oncely.core.commands import Busy, Duplicate
from oncely.core.errors import EndedError, FencedError, MessageError
from oncely.core.message import Message
from oncely.core.record import Key, Record, State
from oncely.core.waiting import WaitingMessage
from oncely.engine.calls import Calls
from oncely.ledger import Ledger
from oncely.metrics import Metrics
from oncely.stores.memory_store import MemoryStore
from oncely.stores.memory_tables import MemoryTables
from oncely.stores.store import Joined
from oncely.testing import ManualClock

KEYS = [Key("billing", str(n)) for n in range(3)]
ONE, TWO, THREE = KEYS

COMMITS = "commits unless there is an error"
COMMITS_ALL_THE_SAME = "commits after an error, too"


class JoinedTables:
    """A transaction in memory as somebody else's, with savepoints. `asked` names what was asked
    of it, in order.
    """

    def __init__(self, tables: MemoryTables, asked: list[str]) -> None:
        self._tables = tables
        self._asked = asked
        self._savepoints: list[int] = []
        self.is_over = False

    def __getattr__(self, name: str) -> Any:
        self._asked.append(name)
        return getattr(self._tables, name)

    def look(self, keys: Collection[Key]) -> Mapping[Key, Record]:
        return self._tables.load(keys).records

    def savepoint(self) -> None:
        """The owner begins a savepoint."""
        self._savepoints.append(len(self._tables._undo))

    def undo(self) -> None:
        """The owner takes back what was written after the newest savepoint."""
        place = self._savepoints.pop()
        while len(self._tables._undo) > place:
            self._tables._undo.pop()()


class JoinableStore(MemoryStore):
    """A store in memory whose transactions can be joined. A connection is a word: what its owner
    does in the end.
    """

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock)
        self.asked: list[str] = []
        self.joined: JoinedTables

    @contextmanager
    def within(self, connection: Any) -> Iterator[Joined]:
        self.joined = JoinedTables(self._tables, self.asked)
        with self._lock:
            try:
                yield cast(Joined, self.joined)
                if self.joined.is_over:
                    raise EndedError("the transaction was ended")
            except BaseException:
                if connection != COMMITS_ALL_THE_SAME:
                    self._tables.roll_back()
                raise
            finally:
                self._tables.commit()


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


# ---- What it costs ------------------------------------------------------------------------------


def test_a_message_costs_two_writes(ledger: Ledger, store: JoinableStore) -> None:
    """A first claim is one write, and its completion another: before it, nothing says so."""
    with ledger.transaction(COMMITS) as inbox:
        claim = granted(inbox.claim(ONE))
        assert store.asked == ["insert"]
        assert state(inbox) is State.PROCESSING
        store.asked.clear()
        inbox.complete(claim)
        assert store.asked == ["swap"]
    assert state(ledger) is State.COMPLETED
    assert isinstance(ledger.claim(ONE), Duplicate)


def test_many_cost_two_writes(ledger: Ledger, store: JoinableStore) -> None:
    """So do many that are claimed, and completed, together."""
    with ledger.transaction(COMMITS) as inbox:
        inbox.complete_many([granted(outcome) for outcome in inbox.claim_many(KEYS)])
    assert store.asked == ["insert", "swap"]
    assert ledger.counts() == {("billing", State.COMPLETED): 3}


def test_only_what_is_completed_is(ledger: Ledger) -> None:
    """Of many, those that are not completed are stored as claims."""
    with ledger.transaction(COMMITS) as inbox:
        first, *_ = [granted(outcome) for outcome in inbox.claim_many(KEYS)]
        inbox.complete(first)
    assert [state(ledger, key) for key in KEYS] == [
        State.COMPLETED,
        State.PROCESSING,
        State.PROCESSING,
    ]


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


def test_ended_inside(ledger: Ledger, store: JoinableStore) -> None:
    """A transaction that was ended inside the block is an error of its own when it is left, and
    no other error is replaced by it.
    """

    def work(error: Exception | None) -> None:
        with ledger.transaction(COMMITS) as inbox:
            inbox.complete(granted(inbox.claim(ONE)))
            store.joined.is_over = True
            if error is not None:
                raise error

    with pytest.raises(EndedError):
        work(None)
    with pytest.raises(ValueError, match="mine"):
        work(ValueError("mine"))
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
        inbox.handled(claim, "kept", [WaitingMessage("a", "mails", Message("a"), ONE)])
        inbox.mailbox.finish([ONE])
        assert len(inbox.mailbox.deferred(ONE)) == 1
    record = ledger.find(ONE)
    assert record is not None
    assert (record.state, record.result, ledger.steps(ONE)) == (
        State.HANDLED,
        "kept",
        {"charge": 7},
    )
    ledger.mailbox.sent(ledger.mailbox.take(10, "30s"))
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


# ---- Sending -----------------------------------------------------------------------------------


class AsyncLink:
    """A connection of asyncio's, as far as a ledger makes use of it."""

    async def run_sync(self, function: Callable[[Any], Any]) -> Any:
        return function(COMMITS)


@pytest.mark.parametrize("destination", ["", "exchange:", "exchange:shop", "events:", "n" * 256])
def test_no_destination(ledger: Ledger, destination: str) -> None:
    """What is not a destination is told where it is written, and not by the relay."""

    async def send() -> None:
        async with ledger.transaction(AsyncLink()) as inbox:
            await inbox.send(destination, "body")

    said = r"^destination: .*; write "
    with ledger.transaction(COMMITS) as inbox, pytest.raises(MessageError, match=said):
        inbox.send(destination, "body")
    with pytest.raises(MessageError, match=said):
        asyncio.run(send())
    assert not ledger.mailbox.backlog().waiting
