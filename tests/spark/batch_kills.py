"""A program whose children are drivers that are killed.

`batch_kills.py REMOTE TARGET COUNT POINT...`

Each child opens a session of a Spark Connect server, and lets a batch handler have all messages
published so far: `COUNT` more than the one before. It is killed at its point; the last is not.
Prints a line of JSON for each: whether it was killed, and its report.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import psycopg
import pyspark.sql.connect.session
from pyspark.sql import SparkSession
from tests.kills import killed_at
from tests.spark import batch_targets
from tests.spark.batch_targets import DATABASE, FOLDER, POLICIES

from oncely.spark import process

IMPORTED = (pyspark.sql.connect.session, batch_targets)
"""Here once, and not by each child."""
HERE = Path(__file__).parent
_REPORT = "report.json"
_RUN_OUT = (
    "UPDATE processed_messages SET lease_until = now() - interval '1 second'"
    " WHERE provider = %s AND status = 'processing'"
)


def ids(count: int) -> list[str]:
    return [f"m{number:05}" for number in range(count)]


def run(remote: str, target: str, count: int) -> None:
    """Let the handler have so many messages, a tenth of them twice."""
    spark = SparkSession.builder.remote(remote).getOrCreate()
    rows = [(id_, f'{{"n": "{id_}"}}') for id_ in [*ids(count), *ids(count)[::10]]]
    options: dict[str, Any] = {**POLICIES[target]}
    report = process(
        spark.createDataFrame(rows, "id string, body string").repartition(3),
        consumer=target,
        ledger=os.environ[DATABASE],
        handler_path=HERE,
        quarantine=Path(os.environ[FOLDER], "quarantine"),
        partitions=2,
        lease="60s",
        tries=100,
        **options,
    )
    Path(os.environ[FOLDER], _REPORT).write_text(json.dumps(report.as_dict()))


def let_leases_run_out(target: str) -> None:
    """Those of a killed driver, sooner than they would."""
    with psycopg.connect(os.environ[DATABASE]) as connection:
        connection.execute(_RUN_OUT, [f"{target}/batches"])


def main(remote: str, target: str, count: int, *points: str) -> None:
    """Kill one driver at each point, and let the last come to its end."""
    report = Path(os.environ[FOLDER], _REPORT)
    for number, point in enumerate([*points, "nowhere"], 1):
        report.unlink(missing_ok=True)
        is_killed = killed_at(point, lambda: run(remote, target, count * number))  # noqa: B023
        let_leases_run_out(target)
        counts = json.loads(report.read_text()) if report.exists() else None
        sys.stdout.write(json.dumps({"point": point, "killed": is_killed, "report": counts}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), *sys.argv[4:])
