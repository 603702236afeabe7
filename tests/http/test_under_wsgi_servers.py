"""Idempotency keys under gunicorn, with Flask, and under Django's runserver."""

import hashlib
import hmac
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from oncely.ledger import open_ledger

ROOT = Path(__file__).parents[2]
_GUNICORN = "gunicorn --workers 2 --threads 4 --preload --bind 127.0.0.1:{port}"
SERVERS = {
    "gunicorn": [*_GUNICORN.split(), "tests.http.flask_shop"],
    "runserver": ["tests.http.django_shop", "runserver", "--noreload", "{port}"],
}


@contextmanager
def served(command: Sequence[str], folder: Path) -> Iterator[str]:
    """The URL of a server that answers; it is stopped in the end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    (folder / "effects").touch()
    url = f"sqlite:///{folder / 'ledger.db'}"
    ledger = open_ledger(url)
    ledger.migrate()
    ledger.close()
    paths = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    own = {"SHOP_EFFECTS": str(folder / "effects"), "SHOP_LEDGER": url, "PYTHONPATH": paths}
    parts = [part.format(port=port) for part in command]
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", *parts], env=os.environ | own, stdout=log, stderr=log
        )
        try:
            _await(f"http://127.0.0.1:{port}/", folder / "log")
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()
            server.wait(30)


def _await(url: str, log: Path) -> None:
    deadline = time.monotonic() + 30
    with httpx.Client() as client:
        while True:
            try:
                client.get(url)
                return
            except httpx.TransportError:
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.05)


@pytest.mark.parametrize("name", SERVERS)
def test_many_at_once(tmp_path: Path, name: str) -> None:
    """Of many equal requests one is made, and all others are told to come back, or given its
    answer.
    """
    with served(SERVERS[name], tmp_path) as url, httpx.Client() as client:

        def post(_: int) -> httpx.Response:
            headers = {"Idempotency-Key": '"k1"'}
            return client.post(f"{url}/orders", json={"number": "o1"}, headers=headers)

        with ThreadPoolExecutor(8) as threads:
            answers = [*threads.map(post, range(40)), post(40)]
    assert (tmp_path / "effects").read_text().split() == ["o1"]
    assert {answer.status_code for answer in answers} <= {201, 409}
    assert answers[-1].headers["idempotency-replayed"] == "true"
    assert len({answer.content for answer in answers if answer.status_code == 201}) == 1


@pytest.mark.parametrize("name", SERVERS)
def test_a_webhook_by_its_function(tmp_path: Path, name: str) -> None:
    """Any framework takes deliveries by the endpoint's function, also in forked processes."""
    body = b'{"ref": "main"}'
    fields = {
        "X-GitHub-Delivery": "d-1",
        "X-Hub-Signature-256": f"sha256={hmac.new(b'secret', body, hashlib.sha256).hexdigest()}",
    }
    with served(SERVERS[name], tmp_path) as url, httpx.Client() as client:
        answers = [client.post(f"{url}/hooks", content=body, headers=fields) for _ in range(6)]
    assert [answer.status_code for answer in answers] == [202] + [200] * 5
