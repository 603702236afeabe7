"""Window: over any source and sink, such as the rows of a partition."""

import threading
from collections.abc import Callable, Sequence
from contextlib import closing

import pytest
from tests.conditions import LIMIT_S, wait_until
from tests.records import record_of

from oncely.consumer.executor import ThreadExecutor
from oncely.consumer.order import Order
from oncely.consumer.window import Window
from oncely.core.commands import Company, Granted
from oncely.core.policy import Policy
from oncely.core.record import Key, State
from oncely.core.turn import Turn, TurnState
from oncely.core.verdicts import Counted, Ending
from oncely.ledger.ledger import Ledger
from oncely.lifecycle.lifecycle import Lifecycle


class Rows:
    """A source of rows: `more` says which come after those that were taken."""

    def __init__(self, more: Callable[[Sequence[Turn]], Sequence[str]]) -> None:
        self._more = more
        self._taken: list[Turn] = []

    def take(self, room: int, free: int, wait_s: float) -> Sequence[Turn]:
        turns = [Turn(id_) for id_ in self._more(self._taken)]
        for turn in turns:
            turn.key, turn.company = Key("billing", turn.message_id or ""), Company.WINDOW
        self._taken += turns
        return turns

    def renew(self, turn: Turn) -> None:
        turn.begins_anew()

    def is_empty(self) -> bool:
        return not self._more(self._taken)


class Outcomes:
    """A sink that keeps what it is told."""

    def __init__(self) -> None:
        self.counted: list[tuple[str | None, Counted]] = []
        self.acknowledged: list[str | None] = []
        self.given_back: set[str | None] = set()

    def count(self, turn: Turn, ending: Ending) -> None:
        self.counted.append((turn.message_id, ending.counted))

    def acknowledge(self, turns: Sequence[Turn]) -> Sequence[Turn]:
        self.acknowledged += [turn.message_id for turn in turns]
        return ()

    def give_back(self, turns: Sequence[Turn]) -> None:
        self.given_back |= {turn.message_id for turn in turns}


Handle = Callable[[str], None]
Run = Callable[[Rows, Handle, int], None]


@pytest.fixture
def sink() -> Outcomes:
    return Outcomes()


@pytest.fixture
def run(live: Ledger, sink: Outcomes) -> Run:
    """Runs a window over these rows, with that many threads, until it is drained."""

    def run_all(rows: Rows, handle: Handle, threads: int) -> None:
        def run(turn: Turn) -> None:
            turn.started()
            turn.runs()
            turn.called()
            handle(turn.message_id or "")
            turn.returned(None)

        policy = Policy()
        window = Window[Turn](
            rows,
            sink,
            Order(is_ordered=False),
            ThreadExecutor(run, threads, 100),
            Lifecycle.under(live, "billing", policy),
            policy,
            threading.Event(),
        )
        with closing(window):
            while window.go_on() or not window.is_drained():
                pass

    return run_all


def states(ledger: Ledger) -> dict[str, State]:
    """Of all records."""
    return {record.key.message_id: record.state for record in ledger.scan()}


def test_rows_of_a_partition(run: Run, live: Ledger, sink: Outcomes) -> None:
    """Each is handled once, a copy is a duplicate, and it is drained when all are acknowledged."""
    handled: list[str] = []
    run(Rows(lambda taken: [] if taken else ["a", "b", "a"]), handled.append, 2)
    assert sorted(handled) == ["a", "b"]
    assert sorted(sink.acknowledged, key=str) == ["a", "a", "b"]
    assert ("a", Counted.DUPLICATE) in sink.counted
    assert states(live) == dict.fromkeys("ab", State.COMPLETED)


def test_ended_before_an_error(run: Run, live: Ledger, sink: Outcomes) -> None:
    """What has ended when an error ends the window is stored; all else is given back."""
    go, c_runs, over = threading.Event(), threading.Event(), threading.Event()

    def handle(id_: str) -> None:
        if id_ == "a":
            assert go.wait(LIMIT_S)
            return
        if id_ == "c":
            c_runs.set()
        over.wait(LIMIT_S)

    def more(taken: Sequence[Turn]) -> Sequence[str]:
        if len(taken) < 3:
            return ["c"] if taken else ["a", "b"]
        if taken[2].state is TurnState.NEW:
            return []
        go.set()
        # In the thread in which "a" has run.
        assert c_runs.wait(LIMIT_S)
        raise ValueError("no more rows")

    with pytest.raises(ValueError, match="no more rows"):
        run(Rows(more), handle, 2)
    assert states(live) == {"a": State.COMPLETED}
    assert (sink.acknowledged, sink.given_back) == (["a"], {"b", "c"})
    over.set()


def test_a_suspect_runs_alone(run: Run, live: Ledger) -> None:
    """A message whose claim ran out runs while nothing else does, and is claimed for that."""
    taken_over = live.claim(Key("billing", "x"), lease="1ms")
    assert isinstance(taken_over, Granted)
    until = record_of(live, Key("billing", "x")).lease_until or 0.0
    wait_until(lambda: live.now() > until)
    lock, running, beside = threading.Lock(), set[str](), dict[str, set[str]]()
    x_runs, is_alone = threading.Event(), list[bool]()

    def handle(id_: str) -> None:
        with lock:
            running.add(id_)
            beside[id_] = {*running}
        if id_ == "a":
            # Where it runs beside this one it begins before that has ended.
            x_runs.wait(0.2)
        if id_ == "x":
            x_runs.set()
            record = record_of(live, Key("billing", "x"))
            is_alone.append((record.metadata or {}).get("claimed_alone") == record.fence)
        with lock:
            beside[id_] |= running
            running.remove(id_)

    ids = [*"abxcdefgh"]
    run(Rows(lambda taken: ids[len(taken) : len(taken) + 3]), handle, 3)
    assert states(live) == dict.fromkeys(ids, State.COMPLETED)
    assert (beside["x"], is_alone) == ({"x"}, [True])
    assert record_of(live, Key("billing", "x")).attempts == 1
