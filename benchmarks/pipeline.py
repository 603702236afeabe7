"""The sink beside what it could be made of: bare loops, no ledger, Parquet, dropDuplicates.

All variants run in one session, in turn, several rounds; the medians and their ratios count.
Run with `make bench-pipeline`; `--rows`, `--rounds` and `--json FILE` change what it does.
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
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from bare_loops import register
from oncely.spark.session import open_session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

HERE = Path(__file__).parent
BODY_BYTES = 200
DUPLICATES = 0.1
PARTITIONS = 4
AIM = 0.60

Variant = Callable[["DataFrame", Path], None]


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
    """As the pipeline does before its sink."""
    return messages.repartition(PARTITIONS, "id")


def sink(messages: "DataFrame", out: Path) -> None:
    """oncely, with a handler that does nothing."""
    options = {
        "consumer": "bench",
        "ledger": f"sqlite:///{out}.db",
        "handler": "bare_loops:handle",
        "handler_path": str(HERE),
        "quarantine": f"{out}-quarantine",
    }
    spread(messages).write.format("oncely").options(**options).mode("append").save()


def bare(name: str) -> Variant:
    """One of the sinks of bare_loops.py."""

    def write(messages: "DataFrame", out: Path) -> None:
        writer = spread(messages).write.format(name).option("database", f"{out}.db")
        writer.mode("append").save()

    return write


def parquet(messages: "DataFrame", out: Path) -> None:
    """Only writing."""
    spread(messages).write.parquet(str(out))


def drop_duplicates(messages: "DataFrame", out: Path) -> None:
    """What Spark has for duplicates within one batch."""
    messages.dropDuplicates(["id"]).write.parquet(str(out))


VARIANTS: dict[str, Variant] = {
    "oncely sink": sink,
    "same sink, bare sqlite3 for a ledger": bare("bare_ledger"),
    "Arrow loop, bare sqlite3": bare("bare_loop"),
    "same sink, no ledger": bare("no_ledger"),
    "dropDuplicates + Parquet": drop_duplicates,
    "Parquet": parquet,
}


def measure(messages: "DataFrame", rows: int, rounds: int, folder: Path) -> dict[str, list[float]]:
    """Messages a second of every variant in every round; one more round first, not counted."""
    rates: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for number in range(rounds + 1):
        for name, variant in VARIANTS.items():
            out = folder / f"{number}-{len(rates)}-{list(VARIANTS).index(name)}"
            began = time.perf_counter()
            variant(messages, out)
            rate = rows / (time.perf_counter() - began)
            print(f"round {number}  {name:38} {rate:10,.0f}/s", file=sys.stderr, flush=True)
            if number:
                rates[name].append(rate)
    return rates


def worker_memory(log: Path) -> list[tuple[int, int]]:
    """(messages handled, MiB) of the Python worker that handled the most."""
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


def as_table(rates: dict[str, list[float]]) -> Table:
    """The medians, and what they are of the others."""
    medians = {name: statistics.median(values) for name, values in rates.items()}
    table = Table(title="messages/s, medians", title_justify="left")
    for heading in ("variant", "median", "lowest", "highest", "oncely sink / this"):
        table.add_column(heading, justify="left" if heading == "variant" else "right")
    for name, values in rates.items():
        ratio = medians["oncely sink"] / medians[name]
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
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", metavar="FILE", help="write the rates there")
    parsed = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="oncely-bench-"))
    # The workers import the bare loops from here.
    os.environ["PYTHONPATH"] = str(HERE)
    spark = open_session("bench", {"spark.master": "local[2]"})
    try:
        register(spark)
        messages = generate(spark, parsed.rows, folder / "messages")
        rates = measure(messages, parsed.rows, parsed.rounds, folder)
        memory = measure_memory(messages, folder)
    finally:
        spark.stop()
        shutil.rmtree(folder)
    Console().print(as_table(rates))
    print("memory of one Python worker: " + ", ".join(f"{mib} MiB at {n:,}" for n, mib in memory))
    if parsed.json:
        Path(parsed.json).write_text(json.dumps({"rates": rates, "memory": memory}, indent=1))
    ratio = statistics.median(rates["oncely sink"]) / statistics.median(
        rates["same sink, bare sqlite3 for a ledger"]
    )
    print(f"the sink reaches {ratio:.0%} of the bare loop; the aim is {AIM:.0%}")
    return int(ratio < AIM)


if __name__ == "__main__":
    sys.exit(main())
