"""One task by itself, without Spark: how it counts copies, in its chunks and in a replay."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.meddling import MeddlingStore
from tests.spark.tasks import key_of, run_task

from oncely import Ledger, Message
from oncely.spark.sink.counts import Counts
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
