"""A handler behind each middleware; rows beside a ledger, as applications have them; servers."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
from tests.conditions import LIMIT_S, wait_until
from tests.http.drivers import DRIVES, Drive, Shop, drive_by
from tests.integration.callers import KINDS, Place, opened
from tests.servers import free_port
from tests.turns import in_turn

from oncely.ledger.ledger import Ledger, open_ledger

ROOT = Path(__file__).parents[2]
COMMANDS = {
    "uvicorn": "uvicorn --factory tests.http.shop:application --port {} --workers 2",
    "gunicorn": "gunicorn --workers 2 --threads 4 --preload tests.http.flask_shop -b 127.0.0.1:{}",
    "wsgi": "granian --interface wsgi tests.http.flask_shop:application --port {}",
    "asgi": "granian --interface asgi --factory tests.http.shop:application --port {}",
}


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    """A ledger and business rows in one database, in a file: see also `on_a_server_too`."""
    with opened(getattr(request, "param", "sqlite"), request) as place:
        yield place


on_a_server_too = pytest.mark.parametrize(
    "place", ["sqlite", *in_turn("http", KINDS[1:])], indirect=True
)
"""For tests whose statements differ with the database."""


@pytest.fixture
def shop() -> Shop:
    """The handler of a site."""
    return Shop()


@pytest.fixture(params=sorted(DRIVES))
def drive(request: pytest.FixtureRequest, ledger: Ledger, shop: Shop) -> Drive:
    """Makes a site of `shop`, or of another handler, behind each middleware in turn."""
    return drive_by(request.param, ledger, shop)


class Served(NamedTuple):
    """A server of a shop, and the file with a line for each order that was made."""

    url: str
    pid: int
    effects: Path

    @property
    def ordered(self) -> list[str]:
        """The orders that were made."""
        return self.effects.read_text().split()


@contextmanager
def served(folder: Path, server: str, store: str = "", **environment: str) -> Iterator[Served]:
    """A shop that answers; it is stopped in the end. Its ledger is in the folder by default."""
    store = store or f"sqlite:///{folder / 'ledger.db'}"
    with closing(open_ledger(store)) as ledger:
        ledger.migrate()
    effects = folder / "effects"
    effects.touch()
    paths = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    own = {"SHOP_EFFECTS": str(effects), "SHOP_LEDGER": store, "PYTHONPATH": paths}
    port = free_port()
    command = [sys.executable, "-m", *COMMANDS[server].format(port).split()]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command, env=os.environ | own | environment, stdout=log, stderr=log
        )
        url = f"http://127.0.0.1:{port}"
        try:
            wait_until(lambda: _answers(url), (folder / "log").read_text)
            yield Served(url, process.pid, effects)
        finally:
            process.terminate()
            process.wait(LIMIT_S)


def _answers(url: str) -> bool:
    try:
        httpx.get(url)
    except httpx.TransportError:
        return False
    return True
