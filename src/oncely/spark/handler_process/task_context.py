"""Spark's TaskContext in a process that Spark did not start.

The names of pyspark here are private; tests/spark/test_handler_process.py fails if they change.
"""

from collections.abc import Mapping
from typing import Any

from pyspark import TaskContext

_FIELDS = ("_stageId", "_partitionId", "_attemptNumber", "_taskAttemptId", "_localProperties")


def context_of_task() -> Mapping[str, Any] | None:
    """The fields of the task that this process runs, as JSON; None outside of a task."""
    context = TaskContext.get()
    return None if context is None else {name: getattr(context, name) for name in _FIELDS}


def enter_task(fields: Mapping[str, Any] | None) -> None:
    """Let `TaskContext.get()` return that task from now on."""
    TaskContext._setTaskContext(None)
    if fields is not None:
        context = TaskContext._getOrCreate()
        for name, value in fields.items():
            setattr(context, name, value)
