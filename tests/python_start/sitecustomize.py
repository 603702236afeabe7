"""Run by every Python that tests start, before anything else.

Spark has PySpark in archives, of which nothing is kept compiled: each of its Pythons would compile
for a second. The same is installed here.

Spark forks the Python workers of a session from one process for each kind of worker. What they
import is imported there once; else each of the many workers of a short run spends its time on that.
"""

import sys

_IN_TASKS = (
    # The first array that a worker makes of Python's values imports it.
    "pandas",
    "oncely.spark.format",
    "oncely.spark.modes.leased",
    "oncely.spark.modes.table_rows",
    "oncely.spark.modes.transactional",
    "oncely.stores.sql.postgresql",
)
_IN_PLANNERS = ("oncely.spark.format",)
_ALSO = {"pyspark.worker": _IN_TASKS, "pyspark.sql.worker.lookup_data_sources": ()}
"""What workers of these kinds import besides; the others are planners, too."""


def _import_what_workers_import(worker: str) -> None:
    import gc
    from importlib import import_module

    for module in (worker, *_ALSO.get(worker, _IN_PLANNERS)):
        import_module(module)
    # A worker collects garbage after each task: all of this would be gone through each time.
    gc.collect()
    gc.freeze()


sys.path[:] = [path for path in sys.path if not path.endswith(("pyspark.zip", "-src.zip"))]
if sys.orig_argv[1:3] == ["-m", "pyspark.daemon"]:
    _import_what_workers_import(sys.orig_argv[3])
