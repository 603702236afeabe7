"""A stream of files that mode `rows` writes into a table, with a kill for every third batch.

The stream runs on a Spark Connect server, where a program of its own handles its batches, each of
one file. Killed is that program, at a named point or at some moment; the Python workers of tasks;
and in a campaign the whole server, which is Spark's driver. The checkpoint is lost, too, when a
kill has left a batch: the stream then reads all again, in batches of other sizes.
"""

import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from itertools import cycle
from pathlib import Path
from threading import Timer
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql.connect.session import SparkSession
from tests.lake.tables import KEYS, Orders
from tests.spark.programs import ConnectServer, environment

from oncely import State, open_ledger

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

BATCHES = int(os.environ.get("ONCELY_TEST_LAKE_KILLS", "0"))
ROWS = 10
"""New ones in each file, beside a copy of an earlier row and a row that does not fit."""
CONSUMER = "lake"
_POINTS = (
    *("batch_claimed", "batch_staged", "members_claimed", "before_batch_handler"),
    *("after_batch_handler", "batch_handled", "members_completed"),
)
_DONE = f"SELECT sum(provider = '{CONSUMER}'), sum(status <> 'sent') FROM processed_messages"
_RUN_OUT = (
    "UPDATE processed_messages SET lease_until = first_processed_at"
    f" WHERE provider = '{CONSUMER}/batches' AND status = 'processing'"
)


def batch_function(folder: Path, table: str) -> Callable[["DataFrame", int], None]:
    """What the program on the server does with a batch. It kills what is planned."""

    def note(file: str, text: str) -> None:
        with (folder / file).open("a") as opened:
            opened.write(f"{text}\n")

    def children(pid: int) -> list[int]:
        lists = Path(f"/proc/{pid}/task").glob("*/children")
        return [int(child) for each in lists for child in each.read_text().split()]

    def kill(how: str, java: int) -> None:
        daemons = {*children(java)} - {os.getpid()}
        workers = [worker for daemon in daemons for worker in children(daemon)]
        note("kills", how)
        for pid in workers if how == "worker" else [os.getpid()]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def take(messages: "DataFrame", number: int) -> None:
        # Before pyiceberg is imported, which reads them.
        os.environ["PYICEBERG_CATALOG__SHOP__URI"] = f"sqlite:///{folder}/catalog.db"
        os.environ["PYICEBERG_CATALOG__SHOP__WAREHOUSE"] = f"file://{folder}"
        from oncely._util.crash_points import arm
        from oncely.spark import foreach_batch

        with suppress(FileNotFoundError):
            # Now: whose child this is when Java is dead, is not to be looked for children.
            how, java = (folder / "plan").read_text(), os.getppid()
            (folder / "plan").unlink()
            if how == "point":
                arm(random.choice(_POINTS), lambda: kill(how, java))
            else:
                Timer(random.uniform(0, 2), kill, [how, java]).start()
        foreach_batch(
            consumer=CONSUMER,
            mode="rows",
            table=table,
            ledger=f"sqlite:///{folder}/ledger.db",
            quarantine=f"{folder}/quarantine",
            lease="60s",
            partitions=2,
            on_report=lambda report, _: note("reports", json.dumps(report.as_dict())),
        )(messages, number)

    return take


class Stream:
    """The stream, which is started again as often as it dies."""

    def __init__(self, orders: Orders, folder: Path, remote: str | None) -> None:
        self.table, self.folder, self.remote = orders.location, folder, remote
        self.server = ConnectServer(folder)
        self._spark: Any = None
        self.query: Any = None
        self.kills = folder / "kills"
        """What was killed or lost, a word in a line."""
        self._known = 0
        """How many lines it had when the stream died."""

    def start(self) -> None:
        if self._spark is None:
            url = self.remote or self.server.start()
            self._spark = SparkSession.builder.remote(url).create()
        read = self._spark.readStream.schema("id string, Day string")
        rows = read.option("maxFilesPerTrigger", 100).json(str(self.folder / "input"))
        sink = rows.writeStream.foreachBatch(batch_function(self.folder, self.table))
        self.query = sink.option("checkpointLocation", str(self.folder / "checkpoint")).start()

    def until(self, holds: Callable[[], bool], *, loses: bool = False) -> None:
        """Let the stream run until that holds; `loses`: its checkpoint, when it dies."""
        while not holds():
            if self.query is None:
                self.start()
            elif not self.query.isActive:
                if self.kills.stat().st_size == self._known:
                    raise self.query.exception()
                if loses:
                    shutil.rmtree(self.folder / "checkpoint")
                self.died(*["checkpoint"] * loses)
            time.sleep(0.05)

    def died(self, *because: str) -> None:
        """Note what was lost, and end the leases of the program sooner than they would."""
        self.query = None
        with self.kills.open("a") as file:
            file.writelines(f"{word}\n" for word in because)
        self._known = self.kills.stat().st_size
        self.sql(_RUN_OUT)

    def kill_driver(self) -> None:
        time.sleep(random.uniform(0, 2))
        self.server.kill()
        self._spark = None
        self.died("driver")

    def sql(self, statement: str) -> Any:
        with closing(sqlite3.connect(self.folder / "ledger.db", timeout=60)) as ledger, ledger:
            return ledger.execute(statement).fetchone()

    def put(self, number: int) -> None:
        """The file of a batch."""
        copy = random.randrange((number + 1) * ROWS)
        ids = [*range(number * ROWS, (number + 1) * ROWS), copy, f"x{number}"]
        lines = [json.dumps({"id": str(id_), "Day": "monday"}) + "\n" for id_ in ids]
        (self.folder / "made").write_text("".join(lines))
        (self.folder / "made").rename(self.folder / "input" / f"{number}.json")


def main(kind: str, folder: Path, batches: int, lost: int, remote: str | None = None) -> None:
    stream = Stream(Orders(kind, folder), folder, remote)
    loses = {batches * n // (lost + 1) // 3 * 3 for n in range(1, lost + 1)}
    hows, began = cycle(["point", "worker", "point", "moment"]), time.monotonic()
    for number in range(batches):
        if number % 3 == 0:
            (folder / "plan").write_text("point" if number in loses else next(hows))
        stream.put(number)
        if not remote and number % 75 == 4:
            stream.kill_driver()
        done = (number + 1) * ROWS
        stream.until(lambda: stream.sql(_DONE) == (done, 0), loses=number in loses)  # noqa: B023
        kills = dict(Counter(stream.kills.read_text().split()))
        told = f"{kind}: {number + 1} batches, killed or lost: {kills}"
        print(f"{told}, {time.monotonic() - began:.0f} s", flush=True)  # noqa: T201
    with suppress(PySparkException):
        stream.query.processAllAvailable()
    stream.query.stop()
    stream.server.kill()
    # At its exit, the client would try for minutes to reach the server.
    os._exit(0)


@pytest.mark.in_turn("Spark is killed")
@pytest.mark.parametrize("kind", KEYS)
def test_killed_streams(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Each row is in the table once, and none is missing; ledger, table and reports agree."""
    orders = Orders(kind, tmp_path).create()
    ledger = open_ledger(f"sqlite:///{tmp_path}/ledger.db")
    ledger.migrate()
    (tmp_path / "input").mkdir()
    for name in ("kills", "reports"):
        (tmp_path / name).touch()
    server = () if BATCHES else (request.getfixturevalue("remote"),)
    told = [kind, str(tmp_path), str(BATCHES or 3), str(BATCHES // 50 or 1), *server]
    command = [sys.executable, "-m", "tests.spark.test_lake_killed", *told]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[2], env=environment())
    rows = (BATCHES or 3) * ROWS
    assert Counter(orders.ids()) == dict.fromkeys(range(rows), 1)
    assert ledger.counts()[(CONSUMER, State.COMPLETED)] == rows
    assert {state for _, state in ledger.counts()} == {State.COMPLETED}
    kills = Counter((tmp_path / "kills").read_text().split())
    assert kills["checkpoint"] >= (BATCHES // 50 or 1)
    assert not BATCHES or kills.keys() >= {"point", "worker", "moment", "driver"}
    reports = [json.loads(line) for line in (tmp_path / "reports").read_text().splitlines()]
    for report in reports:
        counted = (*report["duplicates"].values(), *report["quarantined"].values())
        assert report["received"] == report["handled"] + sum(counted)
    # A program that is killed at some moment may have settled a batch, and not have told it.
    untold = rows - sum(report["handled"] for report in reports)
    assert 0 <= untold <= ROWS * (kills["moment"] + kills["driver"])


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), *sys.argv[5:])
