"""A stream of files that mode `rows` writes into a table, killed for every third batch.

`python -m tests.spark.lake_kills KIND FOLDER BATCHES LOST [REMOTE]`

The stream runs on a Spark Connect server, where a program of its own handles its batches, each of
one file. Killed is that program, at a named point or at some moment; the Python workers of tasks;
or, unless another's is given, the whole server, which is Spark's driver. LOST times the checkpoint
is lost, when a kill has left a batch: the stream reads all again, in batches of other sizes.
"""

import json
import os
import random
import shutil
import signal
import sqlite3
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from itertools import pairwise
from pathlib import Path
from threading import Timer
from typing import TYPE_CHECKING, Any, Literal

from pyspark.sql.connect.session import SparkSession
from tests.spark.programs import ConnectServer

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

ROWS = 10
"""New ones in each file, beside a copy of an earlier row and a row that does not fit."""
CONSUMER = "lake"
_POINTS = (
    *("batch_claimed", "batch_staged", "members_claimed", "before_batch_handler"),
    *("after_batch_handler", "batch_handled", "members_completed"),
)
_TABLES = {"delta": "delta:{}/orders", "iceberg": "iceberg:shop.shop.orders"}
_RUN_OUT = (
    "UPDATE processed_messages SET lease_until = first_processed_at"
    " WHERE provider = ? AND status = 'processing'"
)


def batch_function(kind: str, folder: Path) -> Callable[["DataFrame", int], None]:
    """What the program on the server does with a batch; it does what is planned for it, too."""
    options: dict[str, Any] = {
        "mode": "rows",
        "table": _TABLES[kind].format(folder),
        "ledger": f"sqlite:///{folder}/ledger.db",
        "quarantine": f"{folder}/quarantine",
        "lease": "60s",
        "partitions": 2,
    }

    def children(pid: int) -> list[int]:
        lists = Path(f"/proc/{pid}/task").glob("*/children")
        return [int(child) for each in lists for child in each.read_text().split()]

    def kill(whom: str) -> None:
        daemons = {*children(os.getppid())} - {os.getpid()}
        workers = [worker for daemon in daemons for worker in children(daemon)]
        for pid in workers if whom == "worker" else [os.getpid()]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def take(messages: "DataFrame", number: int) -> None:
        # Before pyiceberg is imported, which reads them.
        os.environ["PYICEBERG_CATALOG__SHOP__URI"] = f"sqlite:///{folder}/catalog.db"
        os.environ["PYICEBERG_CATALOG__SHOP__WAREHOUSE"] = f"file://{folder}"
        from oncely._util.crash_points import kill_at
        from oncely.spark import foreach_batch

        with suppress(FileNotFoundError):
            how, point = (folder / "plan").read_text().split()
            (folder / "plan").unlink()
            if how == "point":
                kill_at(point)
            else:
                Timer(random.uniform(0, 2), kill, [how]).start()

        def keep(report: Any, _: int) -> None:
            with (folder / "reports").open("a") as file:
                file.write(json.dumps(report.as_dict()) + "\n")

        foreach_batch(consumer=CONSUMER, on_report=keep, **options)(messages, number)

    return take


class Stream:
    """The stream, its files and its kills."""

    def __init__(self, kind: str, folder: Path, remote: str | None) -> None:
        self.kind, self.folder, self._remote = kind, folder, remote
        self.server = ConnectServer(folder)
        self.kills: Counter[str] = Counter()
        self.lost = 0
        self._spark: Any = None
        self._query: Any = None
        (folder / "input").mkdir()
        (folder / "reports").touch()

    def reports(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "reports").read_text().splitlines()]

    def write(self, number: int) -> None:
        copy = random.randrange((number + 1) * ROWS)
        ids = [*range(number * ROWS, (number + 1) * ROWS), copy, f"x{number}"]
        lines = [json.dumps({"id": str(id_), "Day": "monday"}) + "\n" for id_ in ids]
        (self.folder / f"{number}.made").write_text("".join(lines))
        (self.folder / f"{number}.made").rename(self.folder / "input" / f"{number}.json")

    def follow(
        self, files: int, holds: Callable[[], bool] = lambda: False
    ) -> Literal["holds", "ended", "died"]:
        """Let the stream run, with so many files in a batch, until that holds or it ends."""
        if self._query is None:
            if self._spark is None:
                self._spark = SparkSession.builder.remote(self._remote or self.server.start())
                self._spark = self._spark.create()
            read = self._spark.readStream.schema("id string, Day string")
            rows = read.option("maxFilesPerTrigger", files).json(str(self.folder / "input"))
            sink = rows.writeStream.foreachBatch(batch_function(self.kind, self.folder))
            sink = sink.option("checkpointLocation", str(self.folder / "checkpoint"))
            self._query = sink.trigger(availableNow=True).start()
        while not holds():
            if not self._query.isActive:
                self.error, self._query = self._query.exception(), None
                return "ended" if self.error is None else "died"
            time.sleep(0.05)
        return "holds"

    def drain(self, files: int) -> None:
        """Let it come to its end, without a kill."""
        if self.follow(files) == "died":
            raise self.error

    def kill(self, files: int, how: str) -> None:
        if how == "driver":
            began = len(self.reports())
            self.follow(files, lambda: len(self.reports()) > began)
            time.sleep(random.uniform(0, 1))
            self.server.kill()
            self._query = self._spark = None
            ended = "died"
        else:
            plan = self.folder / "plan"
            plan.write_text(f"{how} {random.choice(_POINTS)}")
            ended = self.follow(files, lambda: how == "worker" and not plan.exists())
            plan.unlink(missing_ok=True)
        self.kills[how] += ended != "ended"
        if ended == "died":
            # The leases of the killed program end sooner than they would.
            with closing(sqlite3.connect(self.folder / "ledger.db", timeout=60)) as ledger, ledger:
                ledger.execute(_RUN_OUT, [f"{CONSUMER}/batches"])
        handled = sum(report["handled"] for report in self.reports()) // ROWS
        told = f"{self.kind}: {handled} batches, killed: {dict(self.kills)}, {self.lost} lost"
        sys.stdout.write(f"{told} checkpoints, {time.monotonic() - _BEGAN:.0f} s\n")
        sys.stdout.flush()

    def lose_checkpoint(self) -> None:
        """Lose it, and read all again, many files in a batch."""
        shutil.rmtree(self.folder / "checkpoint")
        self.lost += 1
        self.drain(100)


_BEGAN = time.monotonic()


def main(kind: str, folder: Path, batches: int, lost: int, remote: str | None = None) -> None:
    stream = Stream(kind, folder, remote)
    hows = ["point", "worker", "point", "moment"] * batches
    if remote is None:
        hows[2::25] = ["driver"] * len(hows[2::25])
    for first, last in pairwise([batches * n // (lost + 1) for n in range(lost + 2)]):
        for number in range(first, last):
            stream.write(number)
        began = len(stream.reports())
        for due in range(1, last - first, 3):
            stream.follow(1, lambda: len(stream.reports()) - began >= due - 1)  # noqa: B023
            is_last = due + 3 >= last - first
            # A worker's death leaves no batch to whom the checkpoint is lost.
            stream.kill(1, "point" if is_last else hows.pop(0))
        if last < batches:
            stream.lose_checkpoint()
    stream.drain(1)
    before = len(stream.reports())
    stream.lose_checkpoint()
    told = {"kills": stream.kills, "reports": stream.reports(), "last": before}
    (folder / "told.json").write_text(json.dumps(told))
    stream.server.kill()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), *sys.argv[5:])
