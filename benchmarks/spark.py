"""Mode `rows` beside COPY without a ledger, dropDuplicates, and one insert for each row.

All variants run in one session on one PostgreSQL, in turn, several rounds, each into empty tables;
the medians and their ratios count. Then mode `rows` again while the ledger grows.
Run with `make bench-spark`; `--rows`, `--rounds`, `--grow` and `--json FILE` change what it does.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from tests.servers import Postgresql

from bare_copies import COLUMNS, ArrowCopy, copy, execute, insert
from oncely import open_ledger
from oncely.spark.session import open_session
from oncely.spark.sink.spreading import spread

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

HERE = Path(__file__).parent
PARTITIONS = 4
DUPLICATES = 0.1
LIMIT = "COPY, no dedupe"
ROWS = "mode rows"
REPLAY = "mode rows, the same rows again"
AIM, GOAL, REPLAY_AIM = 0.60, 0.40, 1.5
FLAT = 0.25
SETTINGS = {"shared_buffers": "2GB", "max_wal_size": "8GB", "wal_compression": "on"}
"""Of a server that much is written to. PostgreSQL's own are for a small machine: what they do to a
large index hides what the ledger does (`--plain`)."""
FEWER = 20
"""The variant with a statement for each row gets a so many times smaller part."""

Variant = Callable[["DataFrame", str], None]


def generate(spark: "SparkSession", rows: int, folder: Path, first: int = 0) -> "DataFrame":
    """Payments with random ids, a tenth of them copies, as Parquet."""
    unique = int(rows * (1 - DUPLICATES))
    numbered = spark.range(first, first + rows, 1, PARTITIONS).selectExpr(
        f"CASE WHEN id - {first} < {unique} THEN id"
        f" ELSE {first} + xxhash64(id) % {unique // 2} + {unique // 2} END AS n"
    )
    payments = numbered.selectExpr(
        "md5(cast(n AS STRING)) AS id",
        "concat('account-', n % 10000) AS account",
        "cast(n % 100000 / 100 AS DECIMAL(12, 2)) AS amount",
        "timestamp_seconds(1700000000 + n) AS paid_at",
        "repeat('x', 100) AS note",
    )
    payments.repartition(PARTITIONS).write.parquet(str(folder))
    return spark.read.parquet(str(folder))


def without_ledger(payments: "DataFrame", url: str) -> None:
    """The limit."""
    payments.foreachPartition(copy(url))


def arrow_without_ledger(payments: "DataFrame", url: str) -> None:
    """What the sink does without its ledger."""
    spread(payments).write.format("arrow_copy").option("url", url).mode("append").save()


def drop_duplicates(payments: "DataFrame", url: str) -> None:
    """Spark's own way against duplicates within one batch."""
    payments.dropDuplicates(["id"]).foreachPartition(copy(url))


def one_by_one(payments: "DataFrame", url: str) -> None:
    """As teams often write it in foreachBatch."""
    payments.foreachPartition(insert(url))


def rows(payments: "DataFrame", url: str) -> None:
    """The variant that is measured: mode `rows`."""
    options = {"mode": "rows", "consumer": "bench", "ledger": url, "table": "payments"}
    spread(payments).write.format("oncely").options(**options).mode("append").save()


VARIANTS: dict[str, Variant] = {
    LIMIT: without_ledger,
    ROWS: rows,
    REPLAY: rows,
    "dropDuplicates + COPY": drop_duplicates,
    "mode rows, no ledger": arrow_without_ledger,
    "an INSERT for each row": one_by_one,
}


def set_up(server: Postgresql) -> None:
    """Give the server the settings."""
    execute(server.url, *(f"ALTER SYSTEM SET {each} = '{SETTINGS[each]}'" for each in SETTINGS))
    server.restart()


def empty(url: str) -> None:
    """New tables, and a ledger without records."""
    execute(
        url,
        "DROP TABLE IF EXISTS payments, keyed",
        f"CREATE TABLE payments ({COLUMNS})",
        f"CREATE TABLE keyed ({COLUMNS}, PRIMARY KEY (id))",
    )
    ledger = open_ledger(url)
    ledger.migrate()
    ledger.close()
    execute(url, "TRUNCATE processed_messages", "CHECKPOINT")


def measure(payments: "DataFrame", url: str, rounds: int) -> dict[str, list[float]]:
    """Rows a second of every variant in every round, after one round that does not count."""
    count = payments.count()
    few = payments.limit(count // FEWER).repartition(PARTITIONS).cache()
    few_count = few.count()
    rates: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for number in range(rounds + 1):
        for name, variant in VARIANTS.items():
            if name != REPLAY:
                empty(url)
            given, size = (few, few_count) if variant is one_by_one else (payments, count)
            began = time.perf_counter()
            variant(given, url)
            rate = size / (time.perf_counter() - began)
            print(f"round {number}  {name:30} {rate:10,.0f}/s", file=sys.stderr, flush=True)
            if number:
                rates[name].append(rate)
    return rates


def grow(url: str, size: int) -> None:
    """Fill the ledger up to that many completed records, with random ids."""
    [[there]] = execute(url, "SELECT count(*) FROM processed_messages")
    execute(
        url,
        "INSERT INTO processed_messages (message_id, provider, status, attempts, fence, version,"
        " first_processed_at, last_processed_at) SELECT md5('grown ' || n), 'bench', 'sent', 1, 1,"
        f" 1, now(), now() FROM generate_series({there + 1}, {size}) AS n",
        "VACUUM ANALYZE processed_messages",
        "CHECKPOINT",
    )


def measure_growth(
    spark: "SparkSession", url: str, batch: int, sizes: list[int], folder: Path
) -> dict[int, list[float]]:
    """Seconds for a batch of new payments, three of them, at each size of the ledger."""
    empty(url)
    took: dict[int, list[float]] = {}
    for size in sizes:
        grow(url, size)
        took[size] = []
        for number in range(3):
            first = 10**9 * (1 + len(took)) + 10**8 * number
            payments = generate(spark, batch, folder / f"{size}-{number}", first)
            payments.count()
            began = time.perf_counter()
            rows(payments, url)
            took[size].append(time.perf_counter() - began)
            print(f"ledger of {size:,}: {took[size][-1]:.2f} s", file=sys.stderr, flush=True)
    return took


def as_table(rates: dict[str, list[float]]) -> Table:
    """The medians, and their ratios to the limit."""
    medians = {name: statistics.median(values) for name, values in rates.items()}
    table = Table(title="rows/s, medians", title_justify="left")
    for heading in ("variant", "median", "lowest", "highest", "of the limit", "mode rows / this"):
        table.add_column(heading, justify="left" if heading == "variant" else "right")
    for name, values in rates.items():
        table.add_row(
            name,
            f"{medians[name]:,.0f}",
            f"{min(values):,.0f}",
            f"{max(values):,.0f}",
            f"{_ratio(rates, name, LIMIT):.2f}",
            f"{_ratio(rates, ROWS, name):.2f}",
        )
    return table


def _ratio(rates: dict[str, list[float]], one: str, other: str) -> float:
    """The median of the ratios within a round: other work on the machine slows both."""
    return statistics.median(a / b for a, b in zip(rates[one], rates[other], strict=True))


def main() -> int:
    """Measure, print, and say whether the goal is reached."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=500_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--grow", type=int, nargs="*", default=[0, 1_000_000, 2_500_000, 5_000_000])
    parser.add_argument("--batch", type=int, default=500_000, help="rows, while the ledger grows")
    parser.add_argument("--plain", action="store_true", help="PostgreSQL with its own settings")
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    parsed = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="oncely-bench-"))
    # The workers import the bare copies from here.
    os.environ["PYTHONPATH"] = str(HERE)
    os.chdir(folder)
    with Postgresql() as server:
        if not parsed.plain:
            set_up(server)
        spark = open_session("bench", {"spark.master": "local[2]"})
        try:
            spark.dataSource.register(ArrowCopy)
            payments = generate(spark, parsed.rows, folder / "payments")
            rates = measure(payments, server.url, parsed.rounds)
            took = measure_growth(spark, server.url, parsed.batch, parsed.grow, folder)
        finally:
            spark.stop()
            shutil.rmtree(folder)
    Console().print(as_table(rates))
    medians = {size: statistics.median(values) for size, values in took.items()}
    for size, seconds in medians.items():
        print(f"a batch of {parsed.batch:,} rows, ledger of {size:,}: {seconds:.2f} s")
    if parsed.json:
        Path(parsed.json).write_text(json.dumps({"rates": rates, "growth": took}, indent=1))
    ratio = _ratio(rates, ROWS, LIMIT)
    print(f"mode rows reaches {ratio:.0%} of COPY; the goal is {GOAL:.0%}, the aim {AIM:.0%}")
    again = _ratio(rates, REPLAY, ROWS)
    print(f"a replay is {again:.2f} times as fast as the first run; the aim is {REPLAY_AIM}")
    spread_out = max(medians.values()) / min(medians.values()) - 1 if medians else 0.0
    print(f"its batches take within {spread_out:.0%} of each other; the goal is {FLAT:.0%}")
    return int(ratio < GOAL or again < REPLAY_AIM or spread_out > FLAT)


if __name__ == "__main__":
    sys.exit(main())
