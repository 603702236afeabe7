"""`oncely demo`: real workers, one of them killed; what is left in doubt is decided by somebody."""

import os
import pty
import re
import subprocess
import sys
from collections import Counter
from contextlib import closing, suppress
from pathlib import Path

import pytest
from tests.cli.conftest import InProcess
from tests.conditions import LIMIT_S, wait_until
from tests.web.conftest import forms
from tests.web.test_command import client_of

from oncely import State, open_ledger

ONCE_EACH = {f"order-{n}": 1 for n in range(1, 31)}
BROWSER = "sh -c 'echo $0 > new && mv new opened' %s"


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """An environment with a screen; the demo's folder is in `folders`."""
    (tmp_path / "folders").mkdir()
    own = {"TMPDIR": f"{tmp_path}/folders", "BROWSER": BROWSER, "DISPLAY": ":0"}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, **own, "PATH": path}


def found(folder: Path) -> tuple[int, Counter[str]]:
    """How many orders the ledger has as completed, and how often the bank has charged each."""
    with closing(open_ledger(f"sqlite:///{folder}/ledger.db")) as ledger:
        completed = ledger.counts()["billing", State.COMPLETED]
    bank = (folder / "bank.txt").read_text().splitlines()
    return completed, Counter(line.split()[0] for line in bank)


@pytest.mark.in_turn("demos")
def test_decided_by_the_command_line(
    in_process: InProcess, tmp_path: Path, env: dict[str, str]
) -> None:
    """Without a terminal it ends by itself and opens nothing; what it says to type runs the
    message again.
    """
    ran = in_process("demo", env=env, timeout=LIMIT_S)
    assert ran.returncode == 0, ran.stderr
    said = dict(re.findall(r"^(ledger|dead|decide|then) +(.*)$", ran.stdout, re.MULTILINE))
    assert said["ledger"].endswith(": 0 in the queue, 29 completed, 25 duplicates")
    assert re.fullmatch(r"worker \d+: killed by kill -9, after it charged order-21", said["dead"])
    assert not (tmp_path / "opened").exists()
    [folder] = (tmp_path / "folders").iterdir()
    assert found(folder) == (29, ONCE_EACH)
    typed = f"{said['decide']} && {said['then']}"
    subprocess.run(["bash", "-c", typed], env=env, check=True, capture_output=True, timeout=LIMIT_S)
    assert found(folder) == (30, ONCE_EACH | {"order-21": 2})


@pytest.mark.in_turn("demos")
def test_decided_in_the_dashboard(tmp_path: Path, env: dict[str, str]) -> None:
    """In a terminal it opens the dashboard, and ends when somebody has decided there."""
    terminal, inner = pty.openpty()
    env.pop("CI", None)
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
            shown = b""
            with suppress(OSError):  # So ends a terminal whose last program has ended.
                while part := os.read(terminal, 4096):
                    shown += part
            assert demo.wait(LIMIT_S) == 0
        finally:
            demo.kill()
    os.close(terminal)
    assert ": 0 in the queue, 30 completed, 25 duplicates" in shown.decode()
    [folder] = (tmp_path / "folders").iterdir()
    assert found(folder) == (30, ONCE_EACH)
