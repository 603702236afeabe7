"""A client of Spark Connect: uses every front, and prints what it was told."""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING
from zipfile import ZipFile

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from oncely import ConfigError
from oncely.spark import Report, foreach_batch, process, sink_options

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

HERE = Path(__file__).parent


def main(remote: str, folder: Path) -> None:
    spark = SparkSession.builder.remote(remote).getOrCreate()
    # What a server hands over on its own machine is out of a client's reach.
    tempfile.tempdir = "/nowhere"
    spark.conf.set("spark.oncely.ledger", f"sqlite:///{folder}/ledger.db")
    spark.conf.set("spark.oncely.handler", "handlers:work")
    spark.conf.set("spark.oncely.handler_path", str(HERE))
    spark.conf.set("spark.oncely.quarantine", f"{folder}/quarantine")
    messages = made_up(spark, folder, "a", "b", "b", None)
    told = {
        "first": process(messages, consumer="process").as_dict(),
        "again": process(messages, consumer="process").as_dict(),
        "mistake": mistake(messages),
    }
    more = made_up(spark, folder, "b", "c")
    zipped = folder / "zipped.zip"
    with ZipFile(zipped, "w") as archive:
        archive.write(HERE / "handlers.py", "zipped_for_client.py")
    spark.addArtifacts(str(zipped), pyfile=True)
    own = sink_options(spark, consumer="process", handler="zipped_for_client:work")
    more.write.format("oncely").options(**own | {"handler_path": ""}).mode("append").save()
    each_batch(spark, folder)
    straight(spark, folder)
    sys.stdout.write(json.dumps(told))


def made_up(spark: SparkSession, folder: Path, *ids: str | None) -> "DataFrame":
    rows = [(id_, "{}", f"{folder}/effects.jsonl") for id_ in ids]
    return spark.createDataFrame(rows, "id string, body string, source string")


def mistake(messages: "DataFrame") -> str:
    try:
        process(messages, consumer="process", handlerr="a:b")
    except ConfigError as error:
        return str(error)
    return "nothing"


def stream(spark: SparkSession, folder: Path) -> "DataFrame":
    rows = spark.readStream.schema("id string, body string").json(str(folder / "in"))
    return rows.selectExpr("id", "body", f"'{folder}/effects.jsonl' as source")


def each_batch(spark: SparkSession, folder: Path) -> None:
    """By a function that runs on the server."""
    file = folder / "batch.json"

    def keep(report: Report, batch: int) -> None:
        file.write_text(json.dumps(report.as_dict()))

    started(
        stream(spark, folder)
        .writeStream.foreachBatch(foreach_batch(consumer="batches", on_report=keep, partitions=2))
        .option("checkpointLocation", str(folder / "batches"))
        .trigger(availableNow=True)
    ).awaitTermination(240)


def started(writer: "DataStreamWriter") -> "StreamingQuery":
    """The query. Spark gives its worker ten seconds to come up, which a busy machine may need."""
    deadline = time.monotonic() + 120
    while True:
        try:
            return writer.start()
        except PySparkException as error:
            if "failed to connect back" not in str(error) or time.monotonic() > deadline:
                raise


def straight(spark: SparkSession, folder: Path) -> None:
    query = (
        stream(spark, folder)
        .writeStream.format("oncely")
        .options(**sink_options(spark, consumer="stream"))
        .option("checkpointLocation", str(folder / "stream"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination(240)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
