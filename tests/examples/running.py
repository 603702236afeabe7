"""What tests of the starters share: a starter in a folder of its own, run by its own Makefile."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.conditions import LIMIT_S, wait_until
from tests.servers import HOST, free_port

EXAMPLES = Path(__file__).parents[2] / "examples"


class Starter:
    """A copy of a starter, for what it writes beside itself."""

    def __init__(self, name: str, folder: Path) -> None:
        not_ours = shutil.ignore_patterns("out", "__pycache__")
        self.folder = shutil.copytree(EXAMPLES / name, folder / name, ignore=not_ours)
        self.url = ""
        """Where its server is, while it runs."""

    def make(self, *words: str, **variables: str) -> str:
        """What `make` prints. Raises CalledProcessError where it fails."""
        done = subprocess.run(
            self._command(*words, **variables), stdout=subprocess.PIPE, text=True, check=True
        )
        return done.stdout

    def lines(self, name: str) -> list[str]:
        """What stands in a file that it has written."""
        return (self.folder / "out" / name).read_text().splitlines()

    @contextmanager
    def running(self, *words: str, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
        """While this is entered, `make` runs; all that it started ends with it."""
        started = subprocess.Popen(self._command(*words, **variables), start_new_session=True)
        try:
            yield started
            os.killpg(started.pid, signal.SIGTERM)
            started.wait(LIMIT_S)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)
            started.wait(LIMIT_S)

    @contextmanager
    def serving(self) -> Iterator[str]:
        """While this is entered, its server runs at the URL."""
        port = free_port()
        with self.running(PORT=str(port)) as server:
            wait_until(lambda: _listens(port), "it does not listen", programs=[server])
            self.url = f"http://{HOST}:{port}"
            yield self.url

    def _command(self, *words: str, **variables: str) -> list[str]:
        variables = {"PYTHON": sys.executable, **variables}
        given = [f"{name}={value}" for name, value in variables.items()]
        return ["make", "--no-print-directory", "-C", str(self.folder), *words, *given]


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((HOST, port)) == 0
