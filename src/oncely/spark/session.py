"""A Spark session as oncely wants it: this Python on the workers, quiet, retrying tasks."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from py4j.protocol import Py4JError
from pyspark import StorageLevel
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from oncely.core.errors import OncelyError
from oncely.spark.failures import as_own
from oncely.spark.java import ensure_java

_LOOPBACK = "127.0.0.1"
_DEFAULTS = {
    # A task that fails is tried again, four times in all; plain local[*] would not.
    "spark.master": "local[*,4]",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.session.timeZone": "UTC",
    # A value that cannot be cast is a NULL in its row, and does not end the query.
    "spark.sql.ansi.enabled": "false",
    # Interval and availableNow batches are short; a second of polling would be most of them.
    "spark.sql.streaming.pollingDelay": "10ms",
}


@contextmanager
def session(
    name: str, settings: Mapping[str, str], told: Callable[[Exception], OncelyError] = as_own
) -> Iterator[SparkSession]:
    """One beside the session that there is, with its Spark, which is left running; else one as
    `open_session` opens it, which is stopped in the end. What Spark raises meanwhile is `told`.
    """
    active = _active()
    spark = open_session(name, settings) if active is None else _beside(active, settings)
    try:
        yield spark
    except (PySparkException, Py4JError, OSError) as error:
        raise told(error) from error
    finally:
        # Spark may be what has died.
        with suppress(Py4JError, OSError):
            spark.stop() if active is None else make_active(active)


def open_session(name: str, settings: Mapping[str, str]) -> SparkSession:
    """A session with our defaults and, over them, `settings`.

    Raises ConfigError without Java, and OncelyError when Spark cannot be started.
    """
    ensure_java()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    chosen = {**_DEFAULTS, **_submitted(), **settings}
    if chosen["spark.master"].startswith("local"):
        # Spark looks up the machine's own name otherwise, and that need not resolve.
        os.environ.setdefault("SPARK_LOCAL_IP", _LOOPBACK)
        chosen.setdefault("spark.driver.host", _LOOPBACK)
        chosen.setdefault("spark.driver.bindAddress", _LOOPBACK)
    quiet = Path(__file__).with_name("log4j2.properties")
    java = chosen.get("spark.driver.extraJavaOptions", "")
    chosen["spark.driver.extraJavaOptions"] = f"-Dlog4j2.configurationFile=file:{quiet} {java}"
    builder = SparkSession.builder.appName(name)
    for key, value in chosen.items():
        builder = builder.config(key, value)
    try:
        return builder.getOrCreate()
    except (PySparkException, Py4JError, OSError) as error:
        raise OncelyError(f"Spark cannot be started: {str(error).splitlines()[0]}") from error


def _active() -> SparkSession | None:
    """The session of this thread, or else the one that there is."""
    try:
        return SparkSession.active()
    except PySparkException:
        return None


def _beside(active: SparkSession, settings: Mapping[str, str]) -> SparkSession:
    """What was said when that Spark was started holds over our defaults, but not `settings`."""
    said = active.sparkContext.getConf()
    defaults = {name: value for name, value in _DEFAULTS.items() if not said.contains(name)}
    spark = active.newSession()
    for name, value in {**defaults, **settings}.items():
        if spark.conf.isModifiable(name):
            spark.conf.set(name, value)
    make_active(spark)
    return spark


def make_active(spark: SparkSession) -> None:
    """Make it the thread's own, in which Spark looks formats up: only the thread that has opened
    one has any.
    """
    # Of the calls that do so, and say nothing else, the one that is nobody's private name.
    spark.createDataFrame([], "nothing INT")


@contextmanager
def on_disk(frame: DataFrame) -> Iterator[DataFrame]:
    """What is worked out once, and kept for the length of the block."""
    kept = frame.persist(StorageLevel.DISK_ONLY)
    try:
        yield kept
    finally:
        with suppress(Py4JError, OSError):
            kept.unpersist()


def _submitted() -> dict[str, str]:
    """The master that spark-submit was given, which then is not ours to choose."""
    arguments = os.environ.get("PYSPARK_SUBMIT_ARGS", "").split()
    if "--master" in arguments[:-1]:
        return {"spark.master": arguments[arguments.index("--master") + 1]}
    return {}
