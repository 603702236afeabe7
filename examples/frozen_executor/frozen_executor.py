"""A frozen executor: Spark runs its task again, while the first run is still at work.

Messages are sent from two executors. In the midst of it the JVM of one of them is frozen; its
Python process knows nothing of that, and goes on. Spark gives the executor up and runs its task
again elsewhere. First without oncely, then with it: `python frozen_executor.py LEDGER`, the URL of
one that a cluster can share, such as postgresql://user@host/db. The folder `out` holds what was
sent.
"""

import os
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from pyspark.sql import SparkSession

import oncely
from oncely.spark.session import open_session

HERE = Path(__file__).resolve().parent
OUT = HERE / "out"
MESSAGES = 40
TAKES_S = 0.2
WAIT_S = 600.0
SETTINGS = {
    "spark.master": "local-cluster[2,1,1024]",
    "spark.executor.memory": "512m",
    # Who does not answer for so long is given up; by default that takes two minutes.
    "spark.executor.heartbeatInterval": "500ms",
    "spark.storage.blockManagerHeartbeatTimeoutMs": "5s",
    "spark.network.timeoutInterval": "500ms",
}


def send(id_: str, log: str) -> None:
    """The effect: one line, written with one call, and by which process."""
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(file, f"{id_} {os.getpid()}\n".encode())
    finally:
        os.close(file)
    time.sleep(TAKES_S)


def handle(message: oncely.Message) -> None:
    """The same as a handler; the message's source says where the log is."""
    send(message.id, message.source)


def without_oncely(spark: SparkSession, ids: list[str], log: Path) -> None:
    """Send from the executors, as many programs do."""

    def send_all(partition: Iterable[str]) -> None:
        for id_ in partition:
            send(id_, str(log))

    spark.sparkContext.parallelize(ids, 2).foreachPartition(send_all)


def with_oncely(ledger: str, spark: SparkSession, ids: list[str], log: Path) -> None:
    """Send from the executors, through the sink."""
    rows = [(id_, str(log)) for id_ in ids]
    # Two partitions, and no shuffle, of which the frozen executor would have a part.
    messages = spark.createDataFrame(
        spark.sparkContext.parallelize(rows, 2), "id string, source string"
    )
    options = {
        "consumer": f"frozen-executor-{os.getpid()}",
        "ledger": ledger,
        "handler": "frozen_executor:handle",
        "handler_path": str(HERE),
        "quarantine": str(OUT / "quarantine"),
    }
    messages.write.format("oncely").options(**options).mode("append").save()


def sent(log: Path) -> list[tuple[str, int]]:
    """What was sent so far: the message, and by which process."""
    lines = log.read_text().splitlines() if log.exists() else []
    return [(id_, int(pid)) for id_, pid in map(str.split, lines)]


def freeze_in_the_midst_of(work: Callable[[], None], log: Path) -> None:
    """Do the work; freeze one executor's JVM once it has begun, until the work is done."""
    with ThreadPoolExecutor(1) as background:
        working = background.submit(work)
        deadline = time.monotonic() + WAIT_S
        while not sent(log) and not working.done() and time.monotonic() < deadline:
            time.sleep(0.01)
        if not sent(log):
            working.result()
            raise TimeoutError(f"nothing was sent within {WAIT_S:.0f} seconds")
        # The Python process is forked from one that the executor started.
        executor = parent_of(parent_of(sent(log)[-1][1]))
        os.kill(executor, signal.SIGSTOP)
        try:
            working.result()
        finally:
            # It may have been killed meanwhile, as it was given up.
            if Path(f"/proc/{executor}").exists():
                os.kill(executor, signal.SIGCONT)


def parent_of(pid: int) -> int:
    """The process that started another."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def main(ledger: str, count: int = MESSAGES) -> None:
    """Both ways, one after the other, and what came of it."""
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir()
    ids = [f"message-{number:02}" for number in range(count)]
    spark = open_session("frozen-executor", SETTINGS)
    print(f"{'':16}{'messages':>10}{'sent':>10}{'sent twice':>14}")
    for name, way in (
        ("without oncely", without_oncely),
        ("with oncely", partial(with_oncely, ledger)),
    ):
        log = OUT / f"{name.replace(' ', '-')}.log"
        freeze_in_the_midst_of(partial(way, spark, ids, log), log)
        times = Counter(id_ for id_, _ in sent(log))
        twice = sum(n > 1 for n in times.values())
        print(f"{name:16}{len(times):>10}{times.total():>10}{twice:>14}", flush=True)
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
