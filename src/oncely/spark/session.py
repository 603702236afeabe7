"""A Spark session with oncely's defaults, which the user's settings override: quiet, with task
retries, and with this Python on the workers.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

from py4j.protocol import Py4JError
from pyspark import SparkConf, SparkContext
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from oncely.core.errors import OncelyError
from oncely.spark.failures import as_own
from oncely.spark.jvm import MASTER, is_local, is_submitted, local_defaults, start_jvm

_CONSOLE = "spark.ui.showConsoleProgress"
_DEFAULTS = {
    "spark.ui.enabled": "false",
    _CONSOLE: "false",
    "spark.sql.session.timeZone": "UTC",
    # A value that cannot be cast becomes NULL in its row, and does not end the query.
    "spark.sql.ansi.enabled": "false",
    # Interval and availableNow batches are short; a second of polling would be most of them.
    "spark.sql.streaming.pollingDelay": "10ms",
}


@contextmanager
def session(
    name: str, settings: Mapping[str, str], told: Callable[[Exception], OncelyError] = as_own
) -> Iterator[SparkSession]:
    """A new session of the active Spark, which is left running: `settings` win over the active
    session's, which win over our defaults. Without one, a session of `open_session`, which is
    stopped at the end. Spark's errors in the block go through `told`.
    """
    try:
        # That of this thread, or else the default session.
        active: SparkSession | None = SparkSession.active()
    except PySparkException:
        active = None
    if active is None:
        spark = open_session(name, settings)
    else:
        spark = active.newSession()
        _set(spark, _unsaid_in(active) | active.conf.getAll | dict(settings))
        make_active(spark)
    try:
        yield spark
    except (PySparkException, Py4JError, OSError) as error:
        raise told(error) from error
    finally:
        # Spark itself may have died.
        with suppress(Py4JError, OSError):
            spark.stop() if active is None else make_active(active)


def open_session(name: str, settings: Mapping[str, str]) -> SparkSession:
    """A session: `settings` win over Spark's own configuration, which wins over our defaults. With
    SPARK_REMOTE, or `spark.remote`, it is a client of that server. If spark-submit has started this
    program, the master is spark-submit's.

    Raises ConfigError without Java, and OncelyError if Spark cannot be started.
    """
    try:
        if "SPARK_REMOTE" in os.environ or "spark.remote" in settings:
            url = os.environ.get("SPARK_REMOTE") or settings["spark.remote"]
            spark = SparkSession.builder.appName(name).remote(url).getOrCreate()
            _set(spark, _unsaid_in(spark) | dict(settings))
            return spark
        return _started(name, settings)
    except (PySparkException, Py4JError, OSError) as error:
        raise OncelyError(f"Spark cannot be started: {str(error).splitlines()[0]}") from error


def _started(name: str, settings: Mapping[str, str]) -> SparkSession:
    gateway = start_jvm(settings)
    said = SparkConf() if gateway is None else gateway.jvm.SparkConf()
    chosen = dict(settings)
    if gateway is not None or is_submitted():
        # The JVM has merged all configuration.
        chosen.pop(MASTER, None)
    master = str(chosen.get(MASTER) or said.get(MASTER))
    defaults = _DEFAULTS | (local_defaults() if is_local(master) else {})
    unsaid = {key: value for key, value in defaults.items() if not said.contains(key)}
    if not is_submitted():
        # Spark takes a JVM that PySpark starts for a shell, which shows progress bars.
        unsaid |= {_CONSOLE: _DEFAULTS[_CONSOLE]}
    conf = SparkConf().setAppName(name).setAll(list((unsaid | chosen).items()))
    if gateway is not None:
        SparkContext(conf=conf, gateway=gateway)
    return SparkSession.builder.config(conf=conf).getOrCreate()


def _unsaid_in(spark: SparkSession) -> dict[str, str]:
    """Our defaults for settings that the user has not made."""
    said = spark.conf.getAll
    return {name: value for name, value in _DEFAULTS.items() if name not in said}


def _set(spark: SparkSession, settings: Mapping[str, str]) -> None:
    """Set those that can be changed in an existing session."""
    for name, value in settings.items():
        if spark.conf.isModifiable(name):
            spark.conf.set(name, value)


def make_active(spark: SparkSession) -> None:
    """Make the session active in this thread: Spark looks formats up in the active session, and
    only the thread that has opened a session has one.
    """
    # This public call has that effect, and no other.
    spark.createDataFrame([], "nothing INT")
