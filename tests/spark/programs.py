"""The programs that come with Spark, for tests that run them."""

import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from tests.conditions import LIMIT_S, wait_until
from tests.servers import free_port

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


def environment(**more: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "ONCELY_LEDGER"} | more


_CONNECT = "org.apache.spark.sql.connect.service.SparkConnectServer"


class ConnectServer:
    """A Spark Connect server, which can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._server: subprocess.Popen[bytes] | None = None
        self._url = ""

    def start(self) -> str:
        """The URL of the server, which is started unless it runs."""
        if self._server is not None:
            return self._url
        port = free_port()
        settings = {
            "spark.connect.grpc.binding.address": "127.0.0.1",
            "spark.connect.grpc.binding.port": port,
            "spark.ui.enabled": "false",
            "spark.log.level": "ERROR",
            "spark.sql.shuffle.partitions": "2",
        }
        pairs = [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
        submit = (program("spark-submit"), "--class", _CONNECT, "--master", "local[2,4]")
        log = self._folder / "server.log"
        with log.open("w") as written:
            self._server = subprocess.Popen(
                [*submit, *pairs, "spark-internal"],
                cwd=self._folder,
                env=environment(**QUICK_JAVA),
                stdout=written,
                stderr=written,
                start_new_session=True,
            )

        def answers() -> bool:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                return True
            return False

        self._url = f"sc://127.0.0.1:{port}"
        wait_until(answers, log.read_text, limit_s=300, programs=[self._server])
        return self._url

    def kill(self) -> None:
        """Kill the server, by SIGKILL, if it runs."""
        if self._server is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._server.pid, signal.SIGKILL)
            self._server.wait(LIMIT_S)
            self._server = None
