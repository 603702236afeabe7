"""`oncely demo`: real workers, one of them killed; what is left in doubt is decided by somebody."""

import os
import pty
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from tests.cli.conftest import InProcess
from tests.conditions import LIMIT_S, wait_until
from tests.web.conftest import forms
from tests.web.test_command import client_of

from oncely import State, open_ledger

ONCE_EACH = {f"order-{n}": 1 for n in range(1, 31)}
BROWSER = '#!/bin/sh\necho "$1" > opened.new\nmv opened.new opened\n'


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """An environment with a screen; the demo's folder is in `folders`."""
    (tmp_path / "folders").mkdir()
    (tmp_path / "browser").write_text(BROWSER)
    (tmp_path / "browser").chmod(0o755)
    own = {"TMPDIR": f"{tmp_path}/folders", "BROWSER": f"{tmp_path}/browser", "DISPLAY": ":0"}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    kept = {name: value for name, value in os.environ.items() if name != "CI"}
    return {**kept, **own, "PATH": path}


def completed(folder: Path) -> int:
    """How many orders the ledger has as completed."""
    with closing(open_ledger(f"sqlite:///{folder}/ledger.db")) as ledger:
        return ledger.counts()["billing", State.COMPLETED]


def charged(folder: Path) -> Counter[str]:
    """How often the bank has charged each order."""
    return Counter(line.split()[0] for line in (folder / "bank.txt").read_text().splitlines())


def read(terminal: int) -> Iterator[bytes]:
    """What a program writes on a terminal, until it has ended."""
    try:
        while part := os.read(terminal, 4096):
            yield part
    except OSError:
        os.close(terminal)


def test_decided_by_the_command_line(
    in_process: InProcess, tmp_path: Path, env: dict[str, str]
) -> None:
    """Without a terminal it ends by itself and opens nothing; what it says to type runs the
    message again.
    """
    ran = in_process("demo", env=env, timeout=LIMIT_S)
    assert ran.returncode == 0, ran.stderr
    said = dict(re.findall(r"^(ledger|killed|decide|then) +(.*)$", ran.stdout, re.MULTILINE))
    assert said["ledger"].endswith(": 0 in the queue, 29 completed, 25 duplicates")
    assert re.fullmatch(r"worker \d+, by kill -9, while it charged order-21", said["killed"])
    assert not (tmp_path / "opened").exists()
    [folder] = (tmp_path / "folders").iterdir()
    assert (completed(folder), charged(folder)) == (29, ONCE_EACH)
    typed = f"{said['decide']} && {said['then']}"
    subprocess.run(["bash", "-c", typed], env=env, check=True, capture_output=True, timeout=LIMIT_S)
    assert (completed(folder), charged(folder)) == (30, ONCE_EACH | {"order-21": 2})


def test_decided_in_the_dashboard(tmp_path: Path, env: dict[str, str]) -> None:
    """In a terminal it opens the dashboard, and ends when somebody has decided there."""
    terminal, inner = pty.openpty()
    command, no_log = [sys.executable, "-m", "oncely", "demo"], subprocess.DEVNULL
    demo = subprocess.Popen(command, stdout=inner, stderr=no_log, cwd=tmp_path, env=env)
    os.close(inner)
    with demo:
        try:
            wait_until((tmp_path / "opened").exists, programs=[demo])
            address = (tmp_path / "opened").read_text().strip()
            with client_of(address.partition("/in-doubt")[0]) as browser:
                page = browser.get(address).text
                for fields in ({"decision": "happened", "every": "yes"}, {"why": "on the bill"}):
                    [(to, hidden)] = forms(page).items()
                    page = browser.post(to, data={**hidden, **fields}).text
            shown = b"".join(read(terminal)).decode()
            assert demo.wait(LIMIT_S) == 0
        finally:
            demo.kill()
    assert ": 0 in the queue, 30 completed, 25 duplicates" in shown
    [folder] = (tmp_path / "folders").iterdir()
    assert (completed(folder), charged(folder)) == (30, ONCE_EACH)
