"""Spark's process from which Python workers are forked, with what their tasks import imported.

Else each of the many workers of a short run spends its time on that.
"""

import pyspark.worker  # noqa: F401 - what its workers are for, imported for them as the rest is.
from pyspark.daemon import manager

import oncely.spark.format
import oncely.spark.modes.leased
import oncely.spark.modes.table_rows
import oncely.spark.modes.transactional
import oncely.stores.sql.postgresql  # noqa: F401

if __name__ == "__main__":
    manager()
