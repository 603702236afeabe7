"""What is struck: a Spark program that streams a folder of messages through the sink.

Once its stream has come to its end, it writes all of them once more, and leaves what that counted.
"""

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.spark_faults.check import (
    AUDIT,
    BATCHES,
    HELD,
    MODES,
    REPEATED,
    ROWS,
    TRANSACTIONAL,
)
from tests.spark_faults.handlers import BEGUN, DATABASE_VARIABLE

from oncely.spark import foreach_batch, process
from oncely.spark.session import open_session
from oncely.spark.sink.channel import DriverChannel

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

LEASE_S = 3.0
PARTITIONS = 2
_SCHEMA = "id string"
_CHUNK = 20
_AGAIN_S = 0.5
_SETTINGS = {
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    # What is slow to come is handed over as it comes, and not in one piece at the end.
    "spark.sql.execution.arrow.maxRecordsPerBatch": str(_CHUNK),
    # Strikes hit one task again and again.
    "spark.task.maxFailures": "10",
    "spark.sql.shuffle.partitions": str(PARTITIONS),
}
_AT_MOST_ONCE = {"mode": "leased", "on_in_doubt": "hold", "on_failed": "skip"}
_AT_LEAST_ONCE = {"mode": "leased", "on_in_doubt": "retry", "tries": "1000"}
_OPTIONS: Mapping[str, Mapping[str, str]] = {
    HELD: {**_AT_MOST_ONCE, "handler": "handlers:append"},
    REPEATED: {**_AT_LEAST_ONCE, "handler": "handlers:append"},
    TRANSACTIONAL: {"mode": "transactional", "handler": "handlers:insert"},
    ROWS: {"mode": "rows", "table": ROWS},
    BATCHES: {
        "handler_batch": "handlers:insert_batch",
        "on_in_doubt": "handlers:asked",
        "tries": "1000",
    },
}


class Task(NamedTuple):
    """What a driver is told."""

    folder: str
    ledger_url: str
    checkpoint: str
    settings: Mapping[str, str]
    """Of its session."""
    modes: Sequence[str] = MODES
    """All at the same time."""
    slow_ms: int = 0
    """How long the source takes over a row of the first partition."""
    lease_s: float = LEASE_S

    @property
    def messages(self) -> str:
        return f"{self.folder}/messages"


def _options(task: Task, mode: str) -> dict[str, str]:
    return {
        "consumer": mode,
        "ledger": task.ledger_url,
        "handler_path": str(Path(__file__).parent),
        "quarantine": f"{task.folder}/quarantine-{mode}",
        "lease": f"{task.lease_s}s",
        "backoff": "200ms",
        "chunk": str(_CHUNK),
        **_OPTIONS[mode],
    }


def _messages(rows: "DataFrame", mode: str, slowest_ms: int) -> "DataFrame":
    """Dealt out, so that copies meet in different tasks; slow to come where that is asked."""
    # No handler takes its time over rows that are only written.
    slow_ms = 10 if mode == ROWS else 0
    sleep = f"if(spark_partition_id() = 0, {max(slowest_ms, slow_ms)}L, {slow_ms}L)"
    dealt = rows.repartition(PARTITIONS)
    if slowest_ms or slow_ms:
        dealt = dealt.where(f"java_method('java.lang.Thread', 'sleep', {sleep}) = 'null'")
    if mode == ROWS:
        return dealt.selectExpr("id", "id as message_id", "0L as fence")
    return dealt.selectExpr("id", "id as body")


def _stream(spark: "SparkSession", task: Task, mode: str) -> "StreamingQuery":
    rows = spark.readStream.schema(_SCHEMA).option("maxFilesPerTrigger", 1).json(task.messages)
    stream = _messages(rows, mode, task.slow_ms).writeStream
    options: dict[str, Any] = _options(task, mode)
    if mode == BATCHES:
        writer = stream.foreachBatch(foreach_batch(**options, partitions=PARTITIONS))
    else:
        writer = stream.format("oncely").options(**options)
    writer = writer.option("checkpointLocation", f"{task.checkpoint}/{mode}")
    return writer.trigger(availableNow=True).start()


def _look_again(spark: "SparkSession", task: Task, mode: str) -> None:
    """Write all once more, and leave what that counted."""
    if mode == BATCHES:
        counts = _process_again(spark, task)
        Path(task.folder, f"{AUDIT}{mode}").write_text(json.dumps(counts))
        return
    channel = DriverChannel("127.0.0.1")
    told = {"channel": channel.address, "channel_token": channel.token}
    rows = _messages(spark.read.schema(_SCHEMA).json(task.messages), mode, 0)
    options = _options(task, mode) | told
    rows.write.format("oncely").options(**options).mode("append").save()
    Path(task.folder, f"{AUDIT}{mode}").write_text(json.dumps(channel.committed().as_dict()))
    channel.close()


def _process_again(spark: "SparkSession", task: Task) -> dict[str, Any]:
    """What a batch counts once no earlier one waits to be tried again."""
    options: dict[str, Any] = _options(task, BATCHES)
    rows = _messages(spark.read.schema(_SCHEMA).json(task.messages), BATCHES, 0)
    while True:
        report = process(rows, **options, partitions=PARTITIONS)
        if report.received == report.duplicates + report.in_doubt:
            return report.as_dict()
        time.sleep(_AGAIN_S)


def main(task: Task) -> None:
    """Stream all modes to their end, and look once more at each."""
    begun = Path(task.folder, BEGUN)
    begun.unlink(missing_ok=True)
    os.environ[DATABASE_VARIABLE] = task.ledger_url
    spark = open_session("faults", {**_SETTINGS, **task.settings})
    queries = [_stream(spark, task, mode) for mode in task.modes]
    begun.touch()
    for query in queries:
        query.awaitTermination()
    for mode in task.modes:
        _look_again(spark, task, mode)
    spark.stop()


if __name__ == "__main__":
    main(Task(*json.loads(sys.argv[1])))
