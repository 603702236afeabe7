"""The sink on Spark: rows of one id are handled once."""

from pathlib import Path

import oncely
from oncely.spark.session import open_session

Path("billing.py").write_text("def charge(message):\n    message.get('amount')\n")
ledger = f"sqlite:///{Path('oncely.db').absolute()}"
spark = open_session("package", {"spark.master": "local[1]"})
rows = [("o-1", '{"amount": 7}'), ("o-2", '{"amount": 8}'), ("o-1", '{"amount": 7}')]
orders = spark.createDataFrame(rows, "id string, body string")
report = oncely.spark.process(
    orders,
    consumer="billing",
    ledger=ledger,
    handler="billing:charge",
    handler_path=Path.cwd(),
)
assert (report.received, report.handled, report.duplicates) == (3, 2, 1), report
read = spark.read.format("oncely").options(ledger=ledger, consumer="billing").load()
assert read.count() == 2
spark.stop()
