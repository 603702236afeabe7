"""The sink beside its alternatives: bare loops, no ledger, Parquet, dropDuplicates.

All variants run in one session, in turn, several rounds; the medians and their ratios count.
Run with `make bench-pipeline`, on PostgreSQL with `make bench-leased`; see `--help`.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
from rich.console import Console
from rich.table import Table
from tests import servers

from bare_loops import WAIT_S, register
from oncely.spark.session import open_session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

HERE = Path(__file__).parent
BODY_BYTES = 200
DUPLICATES = 0.1
PARTITIONS = 4
WAITING = 400
AIM, REPLAY_AIM = 0.60, 1.5
SINK = "oncely sink"
REPLAY = "oncely sink, the same messages again"
BARE = "same sink, two bare statements for a ledger"

Variant = Callable[["DataFrame", str], None]
"""Writes the messages; what belongs to this one write begins with the name it is given."""
Places = Callable[[str], str]
"""The URL of a new database for a name."""


def generate(spark: "SparkSession", rows: int, folder: Path) -> "DataFrame":
    """Messages with random ids, a tenth of them copies, as Parquet."""
    draw = random.Random(7)
    unique = int(rows * (1 - DUPLICATES))
    ids = [str(uuid.UUID(int=draw.getrandbits(128), version=4)) for _ in range(unique)]
    ids += draw.choices(ids, k=rows - unique)
    draw.shuffle(ids)
    body = json.dumps({"text": "x" * (BODY_BYTES - 12)})
    frame = spark.createDataFrame([(id_, body) for id_ in ids], "id string, body string")
    frame.write.parquet(str(folder))
    return spark.read.parquet(str(folder))


def spread(messages: "DataFrame") -> "DataFrame":
    """Repartition as the pipeline does before its sink."""
    return messages.repartition(PARTITIONS, "id")


def sink(places: Places) -> tuple[Variant, Variant]:
    """oncely, with a handler that does nothing; and the same messages again, all duplicates."""
    options = {
        "consumer": "bench",
        "handler": "bare_loops:handle",
        "handler_path": str(HERE),
    }

    def replay(messages: "DataFrame", _: str) -> None:
        spread(messages).write.format("oncely").options(**options).mode("append").save()

    def write(messages: "DataFrame", out: str) -> None:
        options.update(ledger=places(out), quarantine=f"{out}-quarantine")
        replay(messages, out)

    return write, replay


def bare(name: str, places: Places) -> Variant:
    """One of the sinks of bare_loops.py."""

    def write(messages: "DataFrame", out: str) -> None:
        database = places(out).removeprefix("sqlite:///")
        spread(messages).write.format(name).option("database", database).mode("append").save()

    return write


def parquet(messages: "DataFrame", out: str) -> None:
    """Only write Parquet."""
    spread(messages).write.parquet(out)


def drop_duplicates(messages: "DataFrame", out: str) -> None:
    """Spark's own way against duplicates within one batch."""
    messages.dropDuplicates(["id"]).write.parquet(out)


def variants(places: Places) -> dict[str, Variant]:
    """Every variant, with ledgers and bare tables in these places."""
    first, replay = sink(places)
    return {
        SINK: first,
        REPLAY: replay,
        BARE: bare("bare_ledger", places),
        "Arrow loop, bare statements": bare("bare_loop", places),
        "same sink, no ledger": bare("no_ledger", places),
        "dropDuplicates + Parquet": drop_duplicates,
        "Parquet": parquet,
    }


def in_files(out: str) -> str:
    """A SQLite file beside the other files of the write."""
    return f"sqlite:///{out}.db"


def on_server(server: str) -> Places:
    """Databases on a PostgreSQL."""

    def create(out: str) -> str:
        name = Path(out).name
        with psycopg.connect(server, autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{name}"'.encode())
            # Or this write would wait for the flush of the last one.
            connection.execute("CHECKPOINT")
        return server.rpartition("/")[0] + f"/{name}"

    return create


def measure(
    compared: dict[str, Variant], messages: "DataFrame", asked: argparse.Namespace, folder: Path
) -> dict[str, list[float]]:
    """Messages a second of every variant in every round, after one round that does not count."""
    rates: dict[str, list[float]] = {name: [] for name in compared}
    for number in range(asked.rounds + 1):
        for place, (name, variant) in enumerate(compared.items()):
            began = time.perf_counter()
            variant(messages, f"{folder}/write-{number}-{place}")
            rate = asked.rows / (time.perf_counter() - began)
            print(f"round {number}  {name:38} {rate:10,.0f}/s", file=sys.stderr, flush=True)
            if number:
                rates[name].append(rate)
    return rates


def worker_memory(log: Path) -> list[tuple[int, int]]:
    """(messages, MiB) of the Python worker that handled the most messages."""
    workers: dict[int, list[tuple[int, int]]] = {}
    for line in log.read_text().splitlines():
        pid, handled, mib = json.loads(line)
        workers.setdefault(pid, []).append((handled, mib))
    return max(workers.values(), key=len)


def measure_memory(messages: "DataFrame", folder: Path) -> list[tuple[int, int]]:
    """The memory of one worker while one task handles every message."""
    log = folder / "memory.jsonl"
    options = {
        "consumer": "memory",
        "ledger": f"sqlite:///{folder}/memory.db",
        "handler": "bare_loops:handle_and_weigh",
        "handler_path": str(HERE),
    }
    one_task = messages.selectExpr("id", "body", f"'{log}' as source").coalesce(1)
    one_task.write.format("oncely").options(**options).mode("append").save()
    return worker_memory(log)


def measure_concurrency(messages: "DataFrame", folder: Path) -> dict[str, float]:
    """How long one task takes for handlers that wait, by the number that run at a time."""
    took = {}
    few = messages.limit(WAITING).coalesce(1)
    for handler, concurrency in (("wait", 1), ("wait", 8), ("wait_async", 8)):
        name = f"{handler}, {concurrency} at a time"
        options = {
            "consumer": name,
            "ledger": f"sqlite:///{folder}/concurrency.db",
            "handler": f"bare_loops:{handler}",
            "handler_path": str(HERE),
            "concurrency": str(concurrency),
        }
        began = time.perf_counter()
        few.write.format("oncely").options(**options).mode("append").save()
        took[name] = time.perf_counter() - began
    return took


def as_table(rates: dict[str, list[float]]) -> Table:
    """The medians, and the sink's ratios to the other variants."""
    medians = {name: statistics.median(values) for name, values in rates.items()}
    table = Table(title="messages/s, medians", title_justify="left")
    for heading in ("variant", "median", "lowest", "highest", "oncely sink / this"):
        table.add_column(heading, justify="left" if heading == "variant" else "right")
    for name, values in rates.items():
        ratio = medians[SINK] / medians[name]
        table.add_row(
            name,
            f"{medians[name]:,.0f}",
            f"{min(values):,.0f}",
            f"{max(values):,.0f}",
            f"{ratio:.2f}",
        )
    return table


def main() -> int:
    """Measure, print, and say whether the aim is reached."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", choices=["sqlite", "postgresql"], default="sqlite")
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", metavar="FILE", help="write the rates there")
    asked = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="oncely-bench-"))
    # The workers import the bare loops from here.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder)
        places: Places = in_files
        if asked.store == "postgresql":
            places = on_server(stack.enter_context(servers.Postgresql()).url)
        spark = open_session("bench", {"spark.master": "local[2]"})
        stack.callback(spark.stop)
        register(spark)
        messages = generate(spark, asked.rows, folder / "messages")
        rates = measure(variants(places), messages, asked, folder)
        memory = measure_memory(messages, folder)
        took = measure_concurrency(messages, folder)
    Console().print(as_table(rates))
    print("memory of one Python worker: " + ", ".join(f"{mib} MiB at {n:,}" for n, mib in memory))
    shown = ", ".join(f"{name}: {took_s:.1f} s" for name, took_s in took.items())
    print(f"one task, {WAITING:,} handlers that wait for {WAIT_S} s: {shown}")
    if asked.json:
        told = {"rates": rates, "memory": memory, "concurrency": took}
        Path(asked.json).write_text(json.dumps(told, indent=1))
    ratio = statistics.median(rates[SINK]) / statistics.median(rates[BARE])
    print(f"the sink reaches {ratio:.0%} of the bare loop; the aim is {AIM:.0%}")
    again = statistics.median(b / a for a, b in zip(rates[SINK], rates[REPLAY], strict=True))
    print(f"a replay is {again:.2f} times as fast as the first run; the aim is {REPLAY_AIM}")
    return int(ratio < AIM or again < REPLAY_AIM)


if __name__ == "__main__":
    sys.exit(main())
