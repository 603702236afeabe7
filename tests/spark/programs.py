"""The programs that come with Spark, for tests that run them."""

import sys
from pathlib import Path

QUICK_JAVA = {
    # Short runs: compiling hot code well, or collecting garbage by threads, would take longer than
    # it saves.
    "JDK_JAVA_OPTIONS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "PYSPARK_PYTHON": sys.executable,
    "SPARK_LOCAL_IP": "127.0.0.1",
}
"""What is in the environment of such a program."""


def program(name: str) -> str:
    return str(Path(sys.executable).with_name(name))
