"""The sink on Spark Connect, with a server of its own; and Declarative Pipelines can be said."""

from pathlib import Path

from pyspark import pipelines
from pyspark.sql import SparkSession

import oncely

Path("billing.py").write_text("def charge(message):\n    message.get('amount')\n")
spark = SparkSession.builder.remote("local[1]").getOrCreate()
rows = [("o-1", '{"amount": 7}'), ("o-1", '{"amount": 7}')]
report = oncely.spark.process(
    spark.createDataFrame(rows, "id string, body string"),
    consumer="billing",
    ledger=f"sqlite:///{Path('oncely.db').absolute()}",
    handler="billing:charge",
    handler_path=Path.cwd(),
)
assert (report.received, report.handled, report.duplicates) == (2, 1, 1), report
assert callable(pipelines.create_sink)
spark.stop()
