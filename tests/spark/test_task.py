"""One task by itself, without Spark: what a chunk does when something goes wrong in its midst."""

import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.spark.tasks import run_task

from oncely import Key, Ledger, Message, State, StoreUnavailable
from oncely.core.waiting import WaitingMessage
from oncely.spark.sink.counts import Counts
from oncely.stores.memory_store import MemoryStore
from oncely.testing import MeddlingStore, granted

Run = Callable[..., Counts]


@pytest.fixture
def store() -> MeddlingStore:
    """A store that a test can make fail."""
    return MeddlingStore(MemoryStore())


@pytest.fixture
def run(store: MeddlingStore, tmp_path: Path) -> Run:
    """Run a task over ids, in Arrow batches of `batch` rows; return what it counted."""

    def run_on(
        handler: Callable[[Message], Any], *ids: str, batch: int = 1_000, **options: str
    ) -> Counts:
        return run_task(Ledger(store), handler, tmp_path, ids, batch, **options)

    return run_on


def test_copies_in_other_chunks_wait_as_well(run: Run) -> None:
    """A copy that comes while its first waits for another try does not spend that try."""
    tried: list[float] = []

    def fail(message: Message) -> None:
        tried.append(time.monotonic())
        raise ValueError("not yet")

    counts = run(fail, "a", "a", "a", batch=1, tries="3", backoff="300ms")
    assert counts.failed == 3
    assert len(tried) == 3
    assert all(later - sooner >= 0.3 for sooner, later in pairwise(tried))


def test_a_store_that_stumbles_loses_no_effect(run: Run, store: MeddlingStore) -> None:
    """Where storing what was done fails, it is said again while the leases last."""
    done: list[str] = []

    def stumble() -> None:
        raise StoreUnavailable("for a moment")

    def work(message: Message) -> None:
        store.once(stumble)  # At the next write, which is where this effect is to be stored.
        done.append(message.id)
        time.sleep(0.3)

    assert run(work, "a", "b", "c", "d", "e", "f").handled == 6
    assert sorted(done) == ["a", "b", "c", "d", "e", "f"]
    assert Ledger(store).counts() == {("tests", State.COMPLETED): 6}


def test_results_are_kept_as_they_were(run: Run, store: MeddlingStore) -> None:
    """What a handler returns and later changes is kept as it was returned."""
    shared: dict[str, Any] = {}

    def work(message: Message) -> dict[str, Any]:
        shared["id"] = message.id
        return shared

    assert run(work, "a", "b", results="keep").handled == 2
    record = Ledger(store).find(Key("tests", "a"))
    assert record is not None
    assert record.result == {"id": "a"}


def test_what_was_handled_before_is_completed(run: Run, store: MeddlingStore) -> None:
    """A record that lacks only its last mark gets it, keeps its result, and its handler does not
    run; where something waits to be sent, that mark is left to who sends it.
    """
    ledger = Ledger(store)
    keys = [Key("tests", id_) for id_ in ("a", "b")]
    first, second = (granted(outcome) for outcome in ledger.claim_many(keys))
    ledger.handled(first, "kept")
    ledger.handled(second, None, [WaitingMessage("1", "mails", Message("1"), second.key)])
    ran: list[str] = []
    counts = run(lambda message: ran.append(message.id), "a", "b", "c")
    assert (counts.handled, counts.duplicates_ledger, ran) == (1, 2, ["c"])
    assert ledger.counts() == {("tests", State.COMPLETED): 2, ("tests", State.HANDLED): 1}
    record = ledger.find(keys[0])
    assert record is not None
    assert record.result == "kept"
    ledger.mailbox.sent(ledger.mailbox.take(1, "1s"))
    assert ledger.counts() == {("tests", State.COMPLETED): 3}
