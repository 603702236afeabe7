"""Spark Connect: the fronts from a client that is another process than the driver."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from tests.spark.conftest import HERE, Effects, environment
from tests.spark.programs import QUICK_JAVA, program

from oncely import State, open_ledger

_SERVER = "org.apache.spark.sql.connect.service.SparkConnectServer"


@pytest.fixture
def remote(tmp_path: Path) -> Iterator[str]:
    """The URL of a Spark Connect server."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = {
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": port,
        "spark.ui.enabled": "false",
        "spark.python.daemon.module": "tests.spark_daemon",
        "spark.sql.shuffle.partitions": "2",
    }
    pairs = [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
    log = tmp_path / "server.log"
    with log.open("w") as written:
        server = subprocess.Popen(
            [
                *(program("spark-submit"), "--class", _SERVER, "--master", "local[2,4]", *pairs),
                "spark-internal",
            ],
            cwd=tmp_path,
            env=environment(**QUICK_JAVA),
            stdout=written,
            stderr=written,
            start_new_session=True,
        )
    try:
        wait_for(port, server, log)
        yield f"sc://127.0.0.1:{port}"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait(30)


def wait_for(port: int, server: "subprocess.Popen[bytes]", log: Path) -> None:
    """Return when the server answers."""
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline and server.poll() is None:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.1)
    pytest.fail(f"the server does not answer:\n{log.read_text()}")


def test_every_front_through_a_server(remote: str, tmp_path: Path) -> None:
    """The report comes back from the driver; what was handled one way is a duplicate in others of
    the same consumer; a mistake is one line.
    """
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "0.json").write_text('{"id": "a"}\n{"id": "b"}\n{"id": "a"}\n')
    client = subprocess.run(
        [sys.executable, "-W", "error", str(HERE / "connect_client.py"), remote, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=500,
        cwd=tmp_path,
        env=environment(),
    )
    assert client.returncode == 0, client.stderr
    told = json.loads(client.stdout)
    first, again = told["first"], told["again"]
    assert (first["handled"], first["duplicates"]) == (2, {"input": 1, "ledger": 0})
    assert (again["handled"], again["duplicates"]) == (0, {"input": 0, "ledger": 3})
    assert first["quarantined"] == again["quarantined"] == {"missing id": 1}
    assert told["mistake"] == "option handlerr: there is no such key; did you mean 'handler'?"
    batch = json.loads((tmp_path / "batch.json").read_text())
    assert (batch["handled"], batch["duplicates"]) == (2, {"input": 1, "ledger": 0})
    ledger = open_ledger(f"sqlite:///{tmp_path}/ledger.db")
    counts = ledger.counts()
    ledger.close()
    done = State.COMPLETED
    assert counts == {("process", done): 3, ("batches", done): 2, ("stream", done): 2}
    assert Effects(tmp_path / "effects.jsonl").per_message() == {"a": 3, "b": 3, "c": 1}
