"""Idempotency keys and webhooks under gunicorn, with Flask, in processes that are forked."""

import hashlib
import hmac
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
from tests.conditions import LIMIT_S, wait_until

from oncely.ledger import open_ledger

ROOT = Path(__file__).parents[2]
COMMAND = "gunicorn --workers 2 --threads 4 --preload tests.http.flask_shop --bind"


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The URL of a server that answers; it is stopped in the end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    (folder / "effects").touch()
    store = f"sqlite:///{folder / 'ledger.db'}"
    ledger = open_ledger(store)
    ledger.migrate()
    ledger.close()
    paths = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    own = {"SHOP_EFFECTS": str(folder / "effects"), "SHOP_LEDGER": store, "PYTHONPATH": paths}
    command = [sys.executable, "-m", *COMMAND.split(), f"127.0.0.1:{port}"]
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(command, env=os.environ | own, stdout=log, stderr=log)
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until(lambda: _answers(url), (folder / "log").read_text)
            yield url
        finally:
            server.terminate()
            server.wait(LIMIT_S)


def _answers(url: str) -> bool:
    try:
        httpx.get(url)
    except httpx.TransportError:
        return False
    return True


def test_under_gunicorn(tmp_path: Path) -> None:
    """Of many equal requests one is made, and all others are told to come back, or given its
    answer. Any framework takes deliveries by a webhook's function, also in forked processes. A
    request that was cut off, which gunicorn hands over as whole, does not block the correct one.
    """
    with served(tmp_path) as url, httpx.Client(timeout=LIMIT_S) as client:

        def post(_: int) -> httpx.Response:
            headers = {"Idempotency-Key": '"k1"'}
            return client.post(f"{url}/orders", json={"number": "o1"}, headers=headers)

        with ThreadPoolExecutor(8) as threads:
            answers = [*threads.map(post, range(40)), post(40)]
        delivered = [deliver(client, f"{url}/hooks") for _ in range(6)]
        body = b'{"number": "o2"}'
        cut_off(url, len(body), body[:9])
        headers = {"Idempotency-Key": "k2", "Content-Type": "application/json"}
        whole = client.post(f"{url}/orders", content=body, headers=headers)
    assert [whole.status_code, "idempotency-replayed" in whole.headers] == [201, False]
    assert (tmp_path / "effects").read_text().split() == ["o1", "o2"]
    assert {answer.status_code for answer in answers} <= {201, 409}
    assert answers[-1].headers["idempotency-replayed"] == "true"
    assert len({answer.content for answer in answers if answer.status_code == 201}) == 1
    assert delivered == [202] + [200] * 5


def cut_off(url: str, length: int, body: bytes) -> None:
    """Be a client that says how long its body is, and ends before."""
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), LIMIT_S) as connection:
        fields = f"Content-Length: {length}\r\nContent-Type: application/json\r\n"
        start = f"POST /orders HTTP/1.1\r\nHost: shop\r\nIdempotency-Key: k2\r\n{fields}\r\n"
        connection.sendall(start.encode() + body)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(65_536):
            pass


def deliver(client: httpx.Client, url: str) -> int:
    """What GitHub is answered."""
    body = b'{"ref": "main"}'
    signature = hmac.new(b"secret", body, hashlib.sha256).hexdigest()
    fields = {"X-GitHub-Delivery": "d-1", "X-Hub-Signature-256": f"sha256={signature}"}
    return client.post(url, content=body, headers=fields).status_code
