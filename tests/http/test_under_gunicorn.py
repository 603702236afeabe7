"""Idempotency keys and webhooks under gunicorn, with Flask, in processes that are forked; and under
Granian.
"""

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
import pytest
from tests.conditions import LIMIT_S, wait_until

from oncely.ledger.ledger import open_ledger

ROOT = Path(__file__).parents[2]
COMMANDS = {
    "gunicorn": "gunicorn --workers 2 --threads 4 --preload tests.http.flask_shop -b 127.0.0.1:{}",
    "wsgi": "granian --interface wsgi tests.http.flask_shop:application --port {}",
    "asgi": "granian --interface asgi --factory tests.http.shop:application --port {}",
}


@contextmanager
def served(folder: Path, server: str = "gunicorn") -> Iterator[str]:
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
    command = [sys.executable, "-m", *COMMANDS[server].format(port).split()]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, env=os.environ | own, stdout=log, stderr=log)
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until(lambda: _answers(url), (folder / "log").read_text)
            yield url
        finally:
            process.terminate()
            process.wait(LIMIT_S)


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
        # What has come reads as a whole body.
        refused = cut_off(url, f"Content-Length: {len(body) + 2}", body)
        headers = {"Idempotency-Key": "k2", "Content-Type": "application/json"}
        whole = client.post(f"{url}/orders", content=body, headers=headers)
    assert [refused, whole.status_code, "idempotency-replayed" in whole.headers] == [
        400,
        201,
        False,
    ]
    assert (tmp_path / "effects").read_text().split() == ["o1", "o2"]
    assert {answer.status_code for answer in answers} <= {201, 409}
    assert answers[-1].headers["idempotency-replayed"] == "true"
    assert len({answer.content for answer in answers if answer.status_code == 201}) == 1
    assert delivered == [202] + [200] * 5


@pytest.mark.parametrize("interface", ["wsgi", "asgi"])
def test_cut_off_under_granian(tmp_path: Path, interface: str) -> None:
    """A request that was cut off, by its length or in a chunk, even behind what reads as a whole
    body, is refused; nothing of it is left that would block the correct one.
    """
    body = b'{"number": "o1"}'
    with served(tmp_path, interface) as url, httpx.Client(timeout=LIMIT_S) as client:
        refused = [
            cut_off(url, f"Content-Length: {len(body)}", body[:9]),
            cut_off(url, f"Content-Length: {len(body) + 2}", body),
            cut_off(url, "Transfer-Encoding: chunked", b"20\r\n" + body),
        ]
        headers = {"Idempotency-Key": "k2", "Content-Type": "application/json"}
        whole = [client.post(f"{url}/orders", content=body, headers=headers) for _ in range(2)]
    # Under WSGI it does not tell a whole chunked body from one that was cut off.
    assert refused == [400, 400, 411 if interface == "wsgi" else 400]
    assert [("idempotency-replayed" in each.headers, each.status_code) for each in whole] == [
        (False, 201),
        (True, 201),
    ]
    assert (tmp_path / "effects").read_text().split() == ["o1"]


def cut_off(url: str, length: str, body: bytes) -> int:
    """Be a client that says how long its body is, and ends before; the status of the answer."""
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), LIMIT_S) as connection:
        fields = f"{length}\r\nContent-Type: application/json\r\n"
        start = f"POST /orders HTTP/1.1\r\nHost: shop\r\nIdempotency-Key: k2\r\n{fields}\r\n"
        connection.sendall(start.encode() + body)
        connection.shutdown(socket.SHUT_WR)
        with connection.makefile("rb") as answer:
            return int((answer.read().split() or [b"", b"0"])[1])


def deliver(client: httpx.Client, url: str) -> int:
    """What GitHub is answered."""
    body = b'{"ref": "main"}'
    signature = hmac.new(b"secret", body, hashlib.sha256).hexdigest()
    fields = {"X-GitHub-Delivery": "d-1", "X-Hub-Signature-256": f"sha256={signature}"}
    return client.post(url, content=body, headers=fields).status_code
