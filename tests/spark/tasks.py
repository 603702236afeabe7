"""Tasks by themselves, without Spark; also in a child that dies where it is told to."""

import gc
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
from sqlalchemy import text
from tests.conditions import wait_until
from tests.kills import killed_at

from oncely import Key, Ledger, Message
from oncely._util.crash_points import reached
from oncely.core.waiting import retries_of
from oncely.lifecycle.transacting import TransactionSource
from oncely.spark.modes.chunks import ChunkTask
from oncely.spark.modes.leased import LeasedTask
from oncely.spark.modes.transactional import TransactionalTask
from oncely.spark.sink.channel import TaskChannel
from oncely.spark.sink.counts import Counts
from oncely.spark.sink.message_rows import numbered
from oncely.spark.sink.quarantine import Quarantine
from oncely.spark.sink.sink_options import read_options

CONSUMER = "tests"

Rows = Sequence[str | dict[str, Any]]


def task_of(
    ledger: Ledger,
    handler: Callable[..., Any],
    folder: Path,
    channel: TaskChannel | None = None,
    begins: TransactionSource | None = None,
    /,
    **options: str,
) -> ChunkTask:
    """A task on `ledger`; a transactional one where there is what `begins` its sessions."""
    unused = {"ledger": "sqlite:///unused", "handler": "unused:unused"}
    read = read_options({"consumer": CONSUMER} | unused | options)
    aside = Quarantine(str(folder / "quarantine"), "0").add
    channel = channel or TaskChannel(None, "")
    if begins is None:
        return LeasedTask(ledger, read, handler, aside, channel)
    return TransactionalTask(ledger, read, handler, aside, channel, begins)


def batches_of(rows: Rows, batch: int = 1_000) -> list[tuple[Sequence[int], pa.RecordBatch]]:
    """Ids, or whole rows, as Spark hands them over."""
    whole = [{"id": row} if isinstance(row, str) else row for row in rows]
    return list(numbered(pa.Table.from_pylist(whole).to_batches(max_chunksize=batch)))


def run_task(
    ledger: Ledger,
    handler: Callable[..., Any],
    folder: Path,
    rows: Rows,
    batch: int = 1_000,
    begins: TransactionSource | None = None,
    /,
    *,
    drains: bool = False,
    **options: str,
) -> Counts:
    """Run a task over rows, where it `drains` until nothing waits; return what it counted."""
    options = {"since": str(ledger.now())} | options
    counts = Counts()

    def run_one(rows: Rows) -> None:
        nonlocal counts
        task = task_of(ledger, handler, folder, None, begins, **options)
        task.run(batches_of(rows, batch))
        assert task.counts.received == task.counts.settled
        counts += task.counts

    def is_drained() -> bool:
        free_in_s = ledger.mailbox.free_in_s(retries_of(CONSUMER))
        if free_in_s == 0:
            run_one([])
        return free_in_s is None

    run_one(rows)
    if drains:
        wait_until(is_drained, "messages wait for ever")
    return counts


def at_once(tasks: Sequence[Any], *batches: Any) -> None:
    """Run tasks at the same time, each over batches of its own."""
    with ThreadPoolExecutor(len(tasks)) as pool:
        runs = [pool.submit(task.run, each) for task, each in zip(tasks, batches, strict=True)]
    for run in runs:
        run.result()


def book(message: Message, session: Any) -> None:
    """An effect inside the transaction, and one message to be sent."""
    session.execute(text("INSERT INTO effects (name) VALUES (:name)"), {"name": message.id})
    message.send("receipts", {"for": message.id})
    reached("in_handler")


def append(message: Message) -> None:
    with (_folder() / "effects").open("a") as file:
        file.write(f"{message.id}\n")
    reached("in_handler")


def probe(message: Message) -> str:
    """Whether `append` has happened."""
    done = (_folder() / "effects").read_text().split()
    return "happened" if message.id in done else "not_happened"


_folders: list[Path] = []


def use(folder: Path) -> None:
    _folders[:] = [folder]


def _folder() -> Path:
    return _folders[0]


def key_of(id_: str) -> Key:
    return Key(CONSUMER, id_)


def is_killed_at(point: str, nth: int, work: Callable[[], object]) -> bool:
    """Whether a child that does `work` is killed when it reaches `point` the `nth` time."""

    def alone() -> None:
        # What is the parent's is not to be touched, not even to be collected.
        gc.disable()
        work()

    return killed_at(point, alone, nth)
