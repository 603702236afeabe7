"""Spark's process from which Python workers are forked, with what their tasks import imported.

Else each worker of each driver spends seconds on that, and drivers here live for seconds.
"""

from pyspark.daemon import manager

import oncely.spark.format
import oncely.spark.modes.leased
import oncely.spark.modes.table_rows
import oncely.spark.modes.transactional
import oncely.stores.sql.postgresql  # noqa: F401 - imported for its children.

if __name__ == "__main__":
    manager()
