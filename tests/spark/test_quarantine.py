"""The quarantine's files, without Spark: those of every attempt at a batch, and of its last."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from oncely.spark.format import TaskReport, commit_batch
from oncely.spark.sink.counts import Counts
from oncely.spark.sink.quarantine import Quarantine
from oncely.spark.sink.sink_options import SinkOptions, read_options


def options(folder: Path) -> SinkOptions:
    return read_options(
        {
            "consumer": "tests",
            "ledger": "sqlite:////unused.db",
            "handler": "unused:unused",
            "quarantine": str(folder),
        }
    )


def attempt(folder: Path, batch: int, partition: int, *reasons: str) -> TaskReport:
    """What a task reports that has set rows aside for these reasons."""
    quarantine = Quarantine(str(folder), f"query-{batch}", partition)
    for reason in reasons:
        quarantine.add_entry({"reason": reason, "id": "a", "row": "{}"})
    return TaskReport(Counts(), f"query-{batch}", f"query-{batch - 1}", quarantine.close())


def reasons(folder: Path) -> list[str]:
    return sorted(pq.read_table(folder).column("reason").to_pylist())


def test_a_batch_that_is_run_again(tmp_path: Path) -> None:
    """What earlier attempts at it set aside is replaced; what other batches did stays."""
    commit_batch(options(tmp_path), [attempt(tmp_path, 0, 0, "other"), attempt(tmp_path, 0, 1)])
    for n in range(4):
        attempt(tmp_path, 1, n, f"early {n}")
    unfinished = Quarantine(str(tmp_path), "query-1", 7)
    for _ in range(1_000):
        unfinished.add_entry({"reason": "unfinished", "id": "a", "row": "{}"})
    assert reasons(tmp_path) == ["early 0", "early 1", "early 2", "early 3", "other"]
    again = [attempt(tmp_path, 1, 0), attempt(tmp_path, 1, 1, "last", "last")]
    commit_batch(options(tmp_path), again)
    assert reasons(tmp_path) == ["last", "last", "other"]
    # Spark may not have heard of that commit, and run the batch once more.
    commit_batch(options(tmp_path), [attempt(tmp_path, 1, 0, "once more")])
    assert reasons(tmp_path) == ["once more", "other"]
    unfinished.discard()


def test_what_is_left_beside(tmp_path: Path) -> None:
    """Nothing of a batch that comes no more, and nothing where no row was set aside."""
    for n in range(5):
        commit_batch(options(tmp_path), [attempt(tmp_path, n, 0, str(n))])
    hidden = [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]
    assert hidden == [".query-4"]
    commit_batch(options(tmp_path), [attempt(tmp_path, 5, 0)])
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    assert reasons(tmp_path) == list("01234")


def test_a_task_that_comes_too_late(tmp_path: Path) -> None:
    """An attempt that was frozen until later batches were committed adds nothing."""
    late = Quarantine(str(tmp_path), "query-1", 0)
    for _ in range(1_000):
        late.add_entry({"reason": "late", "id": "a", "row": "{}"})
    commit_batch(options(tmp_path), [attempt(tmp_path, 1, 0, "in time")])
    commit_batch(options(tmp_path), [attempt(tmp_path, 2, 0)])
    with pytest.raises(OSError, match="query-1"):
        late.close()
    late.discard()
    assert reasons(tmp_path) == ["in time"]
