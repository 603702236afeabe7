"""Registers the Spark format "oncely".

Spark imports every top-level module whose name starts with `pyspark_`, in every session of a
Python that has it, and takes its `DefaultSource`. So this must be quick and must never raise.
"""

import contextlib

with contextlib.suppress(ImportError):
    from oncely.spark.format import OncelyDataSource as DefaultSource

__all__ = ["DefaultSource"]
