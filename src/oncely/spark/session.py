"""A Spark session as oncely wants it: this Python on the workers, quiet, retrying tasks."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from oncely.core.errors import OncelyError
from oncely.spark.java import ensure_java

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

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


def open_session(name: str, settings: Mapping[str, str]) -> "SparkSession":
    """A session with our defaults and, over them, `settings`.

    Raises ConfigError without Java, and OncelyError when Spark cannot be started.
    """
    ensure_java()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

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


def _submitted() -> dict[str, str]:
    """The master that spark-submit was given, which then is not ours to choose."""
    arguments = os.environ.get("PYSPARK_SUBMIT_ARGS", "").split()
    if "--master" in arguments[:-1]:
        return {"spark.master": arguments[arguments.index("--master") + 1]}
    return {}
