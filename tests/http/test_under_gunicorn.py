"""Idempotency keys and webhooks under gunicorn, with Flask, in processes that are forked; and under
Granian.
"""

import hashlib
import hmac
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from tests.conditions import LIMIT_S
from tests.http.conftest import served


def test_under_gunicorn(tmp_path: Path) -> None:
    """Of many equal requests one is made, and all others are told to come back, or given its
    answer. Any framework takes deliveries by a webhook's function, also in forked processes. A
    request that was cut off, which gunicorn hands over as whole, does not block the correct one.
    """
    with (
        served(tmp_path, "gunicorn") as shop,
        httpx.Client(base_url=shop.url, timeout=LIMIT_S) as client,
    ):

        def post(_: int) -> httpx.Response:
            headers = {"Idempotency-Key": '"k1"'}
            return client.post("/orders", json={"number": "o1"}, headers=headers)

        with ThreadPoolExecutor(8) as threads:
            answers = [*threads.map(post, range(40)), post(40)]
        delivered = [deliver(client, "/hooks") for _ in range(6)]
        body = b'{"number": "o2"}'
        # What has come reads as a whole body.
        refused = cut_off(shop.url, f"Content-Length: {len(body) + 2}", body)
        headers = {"Idempotency-Key": "k2", "Content-Type": "application/json"}
        whole = client.post("/orders", content=body, headers=headers)
    assert [refused, whole.status_code, "idempotency-replayed" in whole.headers] == [
        400,
        201,
        False,
    ]
    assert shop.ordered == ["o1", "o2"]
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
    with (
        served(tmp_path, interface) as shop,
        httpx.Client(base_url=shop.url, timeout=LIMIT_S) as client,
    ):
        refused = [
            cut_off(shop.url, f"Content-Length: {len(body)}", body[:9]),
            cut_off(shop.url, f"Content-Length: {len(body) + 2}", body),
            cut_off(shop.url, "Transfer-Encoding: chunked", b"20\r\n" + body),
        ]
        headers = {"Idempotency-Key": "k2", "Content-Type": "application/json"}
        whole = [client.post("/orders", content=body, headers=headers) for _ in range(2)]
    # Under WSGI it does not tell a whole chunked body from one that was cut off.
    assert refused == [400, 400, 411 if interface == "wsgi" else 400]
    assert [("idempotency-replayed" in each.headers, each.status_code) for each in whole] == [
        (False, 201),
        (True, 201),
    ]
    assert shop.ordered == ["o1"]


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
