"""What spark-submit is given: a pipeline, and what a cluster's tasks cannot share is refused."""

import json
import os
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from oncely import ConfigError
from oncely.cli import main
from oncely.spark import process
from oncely.spark.session import open_session

_OPTIONS: dict[str, Any] = {
    "consumer": "refused",
    "handler": "handlers:handle",
    "quarantine": "quarantine",
}
_SETTINGS = ("spark.master", "spark.sql.session.timeZone", "spark.sql.ansi.enabled")


def told_by_pipeline() -> dict[str, object]:
    with redirect_stdout(StringIO()) as out:
        code = main(["pipeline", "run", "pipeline.toml", "--json"])
    return {"code": code, **json.loads(out.getvalue())}


def said_of_a_file() -> tuple[int, str]:
    with redirect_stderr(StringIO()) as err:
        code = main(["pipeline", "run", "pipeline.toml", "--ledger", "sqlite:///relative.db"])
    return code, err.getvalue()


def refused(spark: SparkSession, work: Callable[[], object]) -> tuple[str, int]:
    """What is said, and how many jobs there were before."""
    spark.sparkContext.setJobGroup("refused", "")
    before = len(spark.sparkContext.statusTracker().getJobIdsForGroup("refused"))
    try:
        work()
    except (ConfigError, PySparkException) as error:
        after = spark.sparkContext.statusTracker().getJobIdsForGroup("refused")
        return str(error), len(after) - before
    return "nothing", 0


def write(messages: DataFrame, **options: str) -> None:
    messages.write.format("oncely").options(**_OPTIONS | options).mode("append").save()


def run(folder: str) -> dict[str, object]:
    # Another working directory than that of the JVM, which spark-submit has started.
    os.chdir(folder)
    told: dict[str, object] = {"pipeline": told_by_pipeline(), "file": said_of_a_file()}
    spark = open_session("refused", {"spark.master": "local[1]"})
    told["settings"] = {name: spark.conf.get(name) for name in _SETTINGS}
    messages = spark.createDataFrame([("a",), ("b",)], "id string")
    here = {**_OPTIONS, "handler_path": folder}
    told["process"] = refused(
        spark, lambda: process(messages, ledger="sqlite:///relative.db", **here)
    )
    told["write"], _ = refused(
        spark, lambda: write(messages, ledger="sqlite:///relative.db", handler_path=folder)
    )
    return told


if __name__ == "__main__":
    sys.stdout.write(json.dumps(run(sys.argv[1])))
