"""What is told of Spark's errors, as they come from Spark 4.3."""

import pytest
from py4j.protocol import Py4JNetworkError

from oncely import ConfigError, OncelyError
from oncely.spark.failures import as_own

_PYTHON = """An exception was thrown from the Python worker:
Traceback (most recent call last):
  File "/x/format.py", line 104, in write
    return _run_task(self._options, f"{self._run}-", iterator)
           ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
"""
_STREAM = "[STREAM_FAILED] Query [id = 7ed7, runId = 1567] terminated with exception: "
_PLAN = """
 SQLSTATE: 38000 SQLSTATE: XXKST
=== Streaming Query ===
Identifier: [id = 7ed7, runId = 1567]
Error: is a word of the plan
"""
_LOST = (
    "org.apache.spark.SparkException: Job aborted due to stage failure: Task 1 in stage 11.0 "
    "failed 2 times, most recent failure: Lost task 1.1 in stage 11.0 (TID 28) (10.0.0.7 executor "
    "1): "
)
_PY4J = "An error occurred while calling o273.save.\n: "
_CRASHED = "org.apache.spark.SparkException: Python worker exited unexpectedly (crashed)"
_KILLED = "ExecutorLostFailure (executor 1 exited) Reason: Command exited with code 137"
_SHUT_DOWN = "Job 0 cancelled because SparkContext was shut down"
_JAVA_STACK = "\n\tat org.apache.spark.Some.where(Some.scala:1)"
_WHERE = " (2 times, at last on 10.0.0.7 executor 1)"


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            _PYTHON + "psycopg.errors.UndefinedTable: no t\nLINE 1",
            "psycopg.errors.UndefinedTable: no t",
        ),
        (_PYTHON + "MemoryError\n SQLSTATE: 38000", "MemoryError"),
        (_PYTHON + "oncely.core.errors.StoreUnavailable: pg", "StoreUnavailable: pg"),
        (_PYTHON + "MyOwn: first\n\nThe above:\n\n" + _PYTHON + "Other: last", "Other: last"),
        (_STREAM + _PYTHON + "Bare: Error: x" + _PLAN, "Bare: Error: x"),
        (
            f"{_PY4J}{_LOST}{_CRASHED}. Consider setting 'x'{_JAVA_STACK}",
            f"Python worker exited unexpectedly (crashed){_WHERE}",
        ),
        (f"{_STREAM}{_LOST}{_KILLED}{_PLAN}", f"{_KILLED}{_WHERE}"),
        (
            f"{_PY4J}{_LOST}java.lang.OutOfMemoryError: Java heap space{_JAVA_STACK}",
            f"OutOfMemoryError: Java heap space{_WHERE}",
        ),
        (
            "[PATH_NOT_FOUND] Path does not exist: file:/nope/x. SQLSTATE: 42K03",
            "[PATH_NOT_FOUND] Path does not exist: file:/nope/x",
        ),
        (
            "[UNRESOLVED_COLUMN] no `nope`. SQLSTATE: 42703; line 1 pos 7;\n'Project ['nope]",
            "[UNRESOLVED_COLUMN] no `nope`",
        ),
        (
            f"{_PY4J}org.apache.spark.SparkException: {_SHUT_DOWN}{_JAVA_STACK}",
            f"{_SHUT_DOWN}; out of memory? then set spark.driver.memory",
        ),
        ("", "Exception"),
    ],
)
def test_the_one_line(error: str, told: str) -> None:
    """It is what really happened."""
    assert str(as_own(Exception(error))) == f"Spark gave up: {told}"


def test_own_errors_are_told_as_they_are() -> None:
    """A mistake of the user, and what a commit finds."""
    own = as_own(Exception(f"{_PYTHON}oncely.core.errors.ConfigError: handler: none"))
    assert (type(own), str(own)) == (ConfigError, "handler: none")
    judged = as_own(Exception(f"{_PYTHON}oncely.core.errors.OncelyError: 3 of 3 failed"))
    assert str(judged) == "3 of 3 failed"


def test_spark_runs_a_python_without_oncely() -> None:
    """The line says what to do. That Spark says it in these words: test_submit."""
    for words in (
        f"{_PYTHON}ModuleNotFoundError: No module named 'oncely'\n SQLSTATE: 38000",
        "[DATA_SOURCE_NOT_FOUND] Failed to find the data source: oncely. Make sure the provider",
    ):
        assert "; install oncely in the Python that Spark runs, " in str(as_own(Exception(words)))
    assert "install" not in str(as_own(Exception(words.replace("oncely", "jsn"))))


def test_java_is_gone() -> None:
    """What py4j then says is about sockets."""
    for error in (Py4JNetworkError("Answer from Java side is empty"), ConnectionRefusedError(111)):
        own = as_own(error)
        assert type(own) is OncelyError
        assert str(own) == "Spark gave up: its Java process was killed, or ran out of memory"
