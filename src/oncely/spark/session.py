"""A Spark session as oncely wants it, as far as its user has not said otherwise: quiet, retrying
tasks, this Python on the workers.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

from py4j.protocol import Py4JError
from pyspark import SparkConf, SparkContext, StorageLevel
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from oncely.core.errors import OncelyError
from oncely.spark.failures import as_own
from oncely.spark.jvm import MASTER, is_local, is_submitted, local_defaults, start_jvm

_CONSOLE = "spark.ui.showConsoleProgress"
_DEFAULTS = {
    "spark.ui.enabled": "false",
    _CONSOLE: "false",
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
    """A session with `settings`, over what Spark's own configuration says, over our defaults; with
    SPARK_REMOTE, or `spark.remote`, a client of that server. The master is spark-submit's, where
    that has started this program.

    Raises ConfigError without Java, and OncelyError when Spark cannot be started.
    """
    try:
        if "SPARK_REMOTE" in os.environ or "spark.remote" in settings:
            return _connected(name, settings)
        return _started(name, settings)
    except (PySparkException, Py4JError, OSError) as error:
        raise OncelyError(f"Spark cannot be started: {str(error).splitlines()[0]}") from error


def _started(name: str, settings: Mapping[str, str]) -> SparkSession:
    gateway = start_jvm(settings)
    said = SparkConf() if gateway is None else gateway.jvm.SparkConf()
    chosen = dict(settings)
    if gateway is not None or is_submitted():
        # The JVM has weighed all who say something of it.
        chosen.pop(MASTER, None)
    master = str(chosen.get(MASTER) or said.get(MASTER))
    defaults = _DEFAULTS | (local_defaults() if is_local(master) else {})
    unsaid = {key: value for key, value in defaults.items() if not said.contains(key)}
    if not is_submitted():
        # What PySpark starts is taken for a shell, which is told to show it.
        unsaid |= {_CONSOLE: _DEFAULTS[_CONSOLE]}
    conf = SparkConf().setAppName(name).setAll(list((unsaid | chosen).items()))
    if gateway is not None:
        SparkContext(conf=conf, gateway=gateway)
    return SparkSession.builder.config(conf=conf).getOrCreate()


def _connected(name: str, settings: Mapping[str, str]) -> SparkSession:
    url = os.environ.get("SPARK_REMOTE") or settings["spark.remote"]
    spark = SparkSession.builder.appName(name).remote(url).getOrCreate()
    _set(spark, _unsaid_in(spark) | dict(settings))
    return spark


def _active() -> SparkSession | None:
    """The session of this thread, or else the one that there is."""
    try:
        return SparkSession.active()
    except PySparkException:
        return None


def _beside(active: SparkSession, settings: Mapping[str, str]) -> SparkSession:
    """What that session was told holds over our defaults, but not over `settings`."""
    spark = active.newSession()
    _set(spark, _unsaid_in(active) | active.conf.getAll | dict(settings))
    make_active(spark)
    return spark


def _unsaid_in(spark: SparkSession) -> dict[str, str]:
    """Our defaults, as far as nobody has said otherwise."""
    said = spark.conf.getAll
    return {name: value for name, value in _DEFAULTS.items() if name not in said}


def _set(spark: SparkSession, settings: Mapping[str, str]) -> None:
    """As far as they can be set in a session that there is."""
    for name, value in settings.items():
        if spark.conf.isModifiable(name):
            spark.conf.set(name, value)


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
