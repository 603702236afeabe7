"""The demo of the dashboard: it ends with all that it started."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from tests.conditions import wait_until
from tests.examples.running import EXAMPLES
from tests.servers import free_port

WORKERS = 4
"""Two for invoices, one for mails, and the relay."""


def processes_of(session: int) -> list[int]:
    """The processes of a session that have not ended, but its leader."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state, _, _, its_session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(its_session) == session and state != "Z" and int(folder.name) != session:
                found.append(int(folder.name))
    return found


def state_of(pid: int) -> str:
    """The letter for what a process is doing."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def words_of(pid: int) -> list[str]:
    """What a process was started with."""
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """The demo in a session of its own, whose dashboard and workers have begun."""
    port = str(free_port())
    demo = subprocess.Popen(
        [sys.executable, EXAMPLES / "trouble" / "demo.py", "--port", port, "--folder", tmp_path],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert demo.stdout is not None
        for line in demo.stdout:
            if f":{port}/" in line:
                break
        # It answers, so signals do not simply kill it any more.
        httpx.get(f"http://127.0.0.1:{port}/", timeout=60)
        wait_until(lambda: len(processes_of(demo.pid)) > WORKERS)
        yield demo
    finally:
        with suppress(ProcessLookupError):
            os.killpg(demo.pid, signal.SIGKILL)
        demo.wait(60)
        assert demo.stdout is not None
        demo.stdout.close()


@pytest.mark.in_turn("demos")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_no_worker_outlives_it(demo: subprocess.Popen[str], number: signal.Signals) -> None:
    """A signal to the demo alone ends its workers, its relay and its dashboard."""
    demo.send_signal(number)
    assert demo.wait(60) == 0
    assert processes_of(demo.pid) == []


@pytest.mark.in_turn("demos")
def test_it_waits_for_a_slow_end(demo: subprocess.Popen[str]) -> None:
    """The demo ends after the slowest of what it has started."""
    [web] = [pid for pid in processes_of(demo.pid) if "web" in words_of(pid)]
    os.kill(web, signal.SIGSTOP)
    wait_until(lambda: state_of(web) == "T")
    demo.send_signal(signal.SIGTERM)
    wait_until(lambda: processes_of(demo.pid) == [web])
    assert demo.poll() is None
    os.kill(web, signal.SIGCONT)
    assert demo.wait(60) == 0
    assert processes_of(demo.pid) == []
