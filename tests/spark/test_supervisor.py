"""A task in a handler's process, without Spark: what its supervisor does when something breaks."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import RecordBatch
from tests.records import granted
from tests.spark.conftest import HERE, Effects

from oncely import Ledger
from oncely.core.errors import OncelyError
from oncely.core.record import Key
from oncely.spark.handler_process.supervisor import TaskSupervisor
from oncely.spark.sink.counts import Counts
from oncely.spark.sink.quarantine import Quarantine
from oncely.spark.sink.sink_options import SinkOptions, read_options

_MANY = 40
BAD = '{"bad": true}'


@pytest.fixture
def options(tmp_path: Path, ledger: Ledger, ledger_url: str) -> Mapping[str, str]:
    return {
        "consumer": "tests",
        "ledger": ledger_url,
        "handler_path": str(HERE),
        "quarantine": str(tmp_path / "quarantine"),
    }


def batches(effects: Effects, *rows: tuple[str | None, str]) -> list[RecordBatch]:
    """Rows as Spark hands them over, two in each batch."""
    given = [{"id": id_, "body": body, "source": str(effects.path)} for id_, body in rows]
    made: list[RecordBatch] = pa.Table.from_pylist(given).to_batches(max_chunksize=2)
    return made


def run(options: SinkOptions, rows: Iterable[RecordBatch]) -> Counts:
    quarantine = Quarantine(options.quarantine, "batch")
    counts = TaskSupervisor(options, quarantine, "batch-0").run(iter(rows))
    quarantine.close()
    return counts


def test_a_process_that_cannot_begin(options: Mapping[str, str], tmp_path: Path) -> None:
    """Where it dies before any handler runs, that is told, and not tried for ever."""
    (tmp_path / "deadly.py").write_text("import os\nos._exit(7)\n")
    given = {**options, "handler": "deadly:work", "handler_path": str(tmp_path)}
    rows = batches(Effects(tmp_path / "log"), ("a", "{}"))
    with pytest.raises(OncelyError, match="exited with 7, 3 times"):
        run(read_options(given), rows)


def test_neighbours_of_one_that_kills(options: Mapping[str, str], effects: Effects) -> None:
    """Those that were at work beside it are run again, and lose no try."""
    given = {**options, "handler": "handlers:kill_at_bad_slowly", "tries": "1", "concurrency": "8"}
    rows = [(f"m{n:02}", BAD if n % 20 == 5 else "{}") for n in range(60)]
    made = pa.Table.from_pylist(
        [{"id": id_, "body": body, "source": str(effects.path)} for id_, body in rows]
    ).to_batches()
    counts = run(read_options(given), made)
    assert (counts.handled, counts.failed) == (57, 3)


def test_what_was_taken_and_not_begun(
    options: Mapping[str, str], ledger: Ledger, effects: Effects
) -> None:
    """A process that dies over one of the messages that were due leaves the others to the next."""
    given = {**options, "handler": "handlers:fail_or_kill", "backoff": "0s", "lease": "5m"}
    held = read_options({**given, "tries": "2", "on_in_doubt": "hold"})
    rows = batches(effects, *((id_, BAD if id_ == "b" else "{}") for id_ in "abcdef"))
    counts = run(held, rows)
    assert (counts.received, counts.handled, counts.in_doubt) == (6, 5, 1)
    assert effects.per_message() == dict.fromkeys("abcdef", 1)


def test_rows_that_wait_hold_nothing_else(
    options: Mapping[str, str], ledger: Ledger, effects: Effects
) -> None:
    """Of a batch whose other rows are settled only what another worker holds is kept."""
    held = [Key("tests", f"{n}-0") for n in range(_MANY)]
    claims = [granted(outcome) for outcome in ledger.claim_many(held, lease="5m")]
    before, most = pa.total_allocated_bytes(), 0

    def rows() -> Iterator[RecordBatch]:
        nonlocal most
        for n in range(_MANY):
            same = {"body": "x" * 10_000, "source": str(effects.path)}
            given = [{"id": f"{n}-{row}", **same} for row in range(100)]
            yield pa.RecordBatch.from_pylist(given)
            most = max(most, pa.total_allocated_bytes() - before)
        for claim in claims:
            ledger.complete(claim)

    counts = run(read_options({**options, "handler": "handlers:work"}), rows())
    assert counts.handled == 99 * _MANY
    assert counts.duplicates_input + counts.duplicates_ledger == _MANY
    assert most < 10_000_000
