"""One task by itself, without Spark: what a chunk does when something goes wrong in its midst."""

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.meddling import MeddlingStore
from tests.records import granted
from tests.spark.tasks import key_of, run_task, task_of

from oncely import Key, Ledger, Message, State, StoreUnavailable
from oncely.core.waiting import WaitingMessage
from oncely.spark.sink.counts import Counts
from oncely.spark.sink.message_rows import numbered
from oncely.stores.memory_store import MemoryStore

Run = Callable[..., Counts]


@pytest.fixture
def store() -> MeddlingStore:
    """A store that a test can make fail."""
    return MeddlingStore(MemoryStore())


@pytest.fixture
def run(store: MeddlingStore, tmp_path: Path) -> Run:
    """Run a task over ids, in Arrow batches of `batch` rows; return what it counted."""

    def run_on(
        handler: Callable[[Message], Any], *ids: str, batch: int = 1_000, **options: Any
    ) -> Counts:
        return run_task(Ledger(store), handler, tmp_path, ids, batch, **options)

    return run_on


def test_copies_in_other_chunks_wait_as_well(run: Run) -> None:
    """A copy of what waits for another try spends none, and counts as a copy."""
    tried: list[str] = []

    def fail(message: Message) -> None:
        tried.append(message.id)
        raise ValueError("not yet")

    counts = run(fail, "a", "a", "a", batch=1, tries="3", backoff="1h")
    assert (counts.failed, counts.duplicates_input, counts.waiting) == (0, 2, 1)
    assert tried == ["a"]


def test_a_store_that_stumbles_loses_no_effect(run: Run, store: MeddlingStore) -> None:
    """Where storing what was done fails, it is said again while the leases last."""
    done: list[str] = []

    def stumble() -> None:
        raise StoreUnavailable("for a moment")

    def work(message: Message) -> None:
        store.once(stumble)  # At the next write, which is where this effect is to be stored.
        done.append(message.id)

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
    assert {record.result["id"] for record in Ledger(store).scan()} == {"a", "b"}


def test_what_was_handled_before_is_completed(run: Run, store: MeddlingStore) -> None:
    """Its handler does not run; where something waits to be sent, its sender completes."""
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


def test_duplicates_are_taken_down_once_a_day(store: MeddlingStore, tmp_path: Path) -> None:
    """A replay writes nothing, unless it is told to."""
    ledger, ids = Ledger(store), [f"m{n}" for n in range(300)]

    def run(counted: str = "daily") -> Counts:
        return run_task(ledger, lambda _: None, tmp_path, ids, count_duplicates=counted)

    assert run().handled == 300
    before = [ledger.find(key_of(id_)) for id_ in ids]
    assert run().duplicates_ledger == 300
    assert [ledger.find(key_of(id_)) for id_ in ids] == before
    assert run("each").duplicates_ledger == 300
    records = [ledger.find(key_of(id_)) for id_ in ids]
    assert {record.duplicates for record in records if record} == {1}


# ---- Rows of Arrow -----------------------------------------------------------------------------


@pytest.mark.parametrize("zone", ["UTC", "Europe/Berlin", "UTC+3", "GMT+03:00", "+03:00", "-0130"])
def test_a_time_in_any_zone(store: MeddlingStore, tmp_path: Path, zone: str) -> None:
    """The session's zone comes with each time; the moment is the same in each."""
    moment = datetime(2024, 2, 29, 23, 59, 59, 123456, tzinfo=UTC)
    times = pa.array([moment, None], pa.timestamp("us", "UTC")).cast(pa.timestamp("us", zone))
    batch = pa.RecordBatch.from_pydict({"id": ["a", "b"], "time": times})
    handled: dict[str, datetime | None] = {}
    task = task_of(
        Ledger(store), lambda message: handled.update({message.id: message.time}), tmp_path
    )
    task.run(numbered([batch]))
    assert (task.counts.handled, task.counts.quarantined) == (2, {})
    assert handled == {"a": moment, "b": None}
