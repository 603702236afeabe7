"""A program that writes payments through the sink, and is killed.

`rows_run.py FOLDER LEDGER SPARK`: payments are in FOLDER as Parquet; the session's temporary files
go under SPARK.
"""

import sys

from oncely.spark.session import open_session


def main(folder: str, ledger: str, temporary: str) -> None:
    """Write what is in the folder."""
    settings = {
        "spark.master": "local[2,4]",
        "spark.local.dir": temporary,
    }
    spark = open_session("rows", settings)
    options = {"mode": "rows", "consumer": "tests", "ledger": ledger, "table": "payments"}
    payments = spark.read.parquet(folder).repartition(4, "id")
    payments.write.format("oncely").options(**options, chunk="1000").mode("append").save()
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
