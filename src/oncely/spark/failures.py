"""Spark's errors: the one line that says what happened, without plans and stack traces."""

import re

from py4j.protocol import Py4JNetworkError

from oncely.core.errors import ConfigError, OncelyError

_OWN = f"{OncelyError.__module__}."
_CONFIG_ERROR = f"{_OWN}{ConfigError.__qualname__}: "
_OWN_ERROR = f"{_OWN}{OncelyError.__qualname__}: "
_TRACEBACK = "Traceback (most recent call last):"
_AFTER = re.compile(
    r"^(\s+at |\s*SQLSTATE: |=== Streaming Query|Driver stacktrace:|JVM stacktrace:|Caused by: )"
)
"""The beginnings of lines after the message of an error."""
_SQLSTATE = re.compile(r"\.?( SQLSTATE: \w{5})+\b.*$")
_JAVA_CLASS = re.compile(r"^\(?(?:[a-z]\w*\.)+(?:\w+\$)?(\w+)[):]+ ")
_STREAM = re.compile(r"^\[STREAM_FAILED\] .*? terminated with exception: ")
_TASK = re.compile(r"^Job aborted due to stage failure: .* failed (\d+) times, .*?\(([^()]*)\): ")
_SHUT_DOWN = re.compile(r"^Job \d+ cancelled because SparkContext was shut down")
"""The only message of a driver whose Java process has run out of memory."""
_NOT_THERE = re.compile(
    r"^\[DATA_SOURCE_NOT_FOUND\] .* source: oncely\b|^ModuleNotFoundError: .* 'oncely'$"
)
"""What Spark says where the Python that it runs has no oncely."""
_BRING_IT = (
    "; install oncely in the Python that Spark runs, set PYSPARK_PYTHON to one that has it before "
    "Spark starts, or bring it by --py-files and call oncely.spark.register(spark)"
)
_HINT = re.compile(r"\.? Consider setting .*$")


def first_line(error: Exception) -> str:
    """The message of a Spark error, without its plan and its stack trace."""
    lines = str(error).strip().splitlines()
    return _SQLSTATE.sub("", lines[0]) if lines else type(error).__name__


def cause_of(error: Exception) -> str:
    """The line of a Spark error that says what happened; Python's own line for a Python error."""
    text = str(error)
    # The text below the frames of the last traceback, if there is one.
    _, found, after = text.rpartition(_TRACEBACK)
    told = [line for line in after.splitlines() if line.strip() and not line.startswith("  ")]
    if found and told and not _AFTER.match(told[0]):
        return told[0].strip()
    return _java_says(text) or type(error).__name__


def as_own(error: Exception) -> OncelyError:
    """A Spark error as ours: a ConfigError if one was raised on the driver or in a task."""
    if isinstance(error, ConnectionError | Py4JNetworkError):
        return OncelyError("Spark gave up: its Java process was killed, or ran out of memory")
    cause = cause_of(error)
    if cause.startswith(_CONFIG_ERROR):
        return ConfigError(cause.removeprefix(_CONFIG_ERROR))
    if cause.startswith(_OWN_ERROR):
        return OncelyError(cause.removeprefix(_OWN_ERROR))
    hint = _BRING_IT if _NOT_THERE.match(cause) else ""
    return OncelyError(f"Spark gave up: {cause.removeprefix(_OWN)}{hint}")


def _java_says(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip() and not _AFTER.match(line)]
    # For a Java error py4j has a line of its own first; Java's line begins with ": ".
    lines = [line.removeprefix(": ") for line in lines if line.startswith(": ")] or lines
    said = _STREAM.sub("", lines[0] if lines else "")
    said = _SQLSTATE.sub("", _HINT.sub("", _without_class(said))).strip()
    if _SHUT_DOWN.match(said):
        return f"{said}; out of memory? then set spark.driver.memory"
    task = _TASK.match(said)
    if task is None:
        return said
    times, where = task.groups()
    return f"{_without_class(said[task.end() :])} ({times} times, at last on {where})"


def _without_class(said: str) -> str:
    """The text without the package of a Java class, and without the class if it is Spark's."""
    named = _JAVA_CLASS.match(said)
    if named is None:
        return said
    rest = said[named.end() :]
    return rest if "spark" in named[0] else f"{named[1]}: {rest}"
