"""Registers the Spark format "oncely-rabbitmq".

Spark imports every top-level module whose name starts with `pyspark_`, in every session of a
Python that has it, and takes its `DefaultSource`. So this must be quick and must never raise.
"""

import contextlib

with contextlib.suppress(ImportError):
    from oncely.spark.rabbitmq.rabbitmq_source import RabbitmqDataSource as DefaultSource

__all__ = ["DefaultSource"]
