"""What a pipeline has: a sink that hands each message to a handler once, and what flows into it."""

from pathlib import Path

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession

from oncely.spark import sink_options

HERE = Path(__file__).parents[1]
spark = SparkSession.active()

dp.create_sink(
    "notifications",
    "oncely",
    # Consumer and tries come from the configuration in spark-pipeline.yml.
    sink_options(
        spark,
        ledger=f"sqlite:///{HERE}/ledger.db",
        handler="handlers:notify",
        handler_path=HERE,
        quarantine=HERE / "quarantine",
    ),
)


@dp.append_flow(target="notifications")
def asked() -> DataFrame:
    """The messages of the folder, as JSON lines."""
    rows = spark.readStream.schema("id STRING, to STRING, text STRING").json(str(HERE / "messages"))
    # Copies of an id meet in one task, where they cost least.
    return rows.selectExpr("id", "to_json(struct(to, text)) AS body").repartition(4, "id")
