"""The servers that tests start: they answer, they come back, and nothing of them is left."""

import subprocess
import sys
from pathlib import Path

import psycopg
import pytest
from tests.conditions import wait_until
from tests.server_fixtures import available
from tests.servers import MariaDb, Postgresql, Rabbitmq, Redis, Server

ROOT = Path(__file__).parents[2]

# Says where the server is, and goes on until it is killed.
OWNER = """
import sys
from tests.servers import Postgresql
server = Postgresql()
server.start()
print(server.folder, server.url, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("kind", [Postgresql, MariaDb, Redis, Rabbitmq])
def test_a_missing_program(kind: type[Server], monkeypatch: pytest.MonkeyPatch) -> None:
    """It skips the test on somebody's machine, and fails it in CI."""
    monkeypatch.setattr("tests.servers.find_program", lambda name: None)
    advice = f"{kind.name} is not installed; type: apt-get install {kind.package}"
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match=advice):
        available(kind)
    monkeypatch.setenv("CI", "True")
    with pytest.raises(pytest.fail.Exception, match=advice):
        available(kind)


def test_nothing_is_left_of_a_server_whose_owner_is_killed() -> None:
    """Nothing answers where it was and its folder goes, though nobody closed it."""
    # Only to see that this machine has it.
    available(Postgresql).close()
    with subprocess.Popen(
        [sys.executable, "-c", OWNER],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as owner:
        assert owner.stdout is not None
        folder, url = owner.stdout.readline().split()
        owner.kill()
    wait_until(lambda: not Path(folder).exists())
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(url)
