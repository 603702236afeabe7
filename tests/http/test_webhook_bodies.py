"""Webhooks: what bodies come, and what becomes of a delivery whose sender waits in vain."""

import hashlib
import hmac
import sqlite3
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import httpx
import pytest
from tests.conditions import wait_until
from tests.http.test_webhooks import by_asgi, by_function, by_github, by_slack, queued

from oncely import http
from oncely.core.message import Message
from oncely.http.answers import HttpAnswer
from oncely.ledger.ledger import Ledger, open_ledger

SECRET = "a secret that both know"
BODY = b'{"ref": "main"}'


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The ledger's database."""
    return tmp_path / "ledger.db"


@pytest.fixture
def ledger(file: Path) -> Iterator[Ledger]:
    with closing(open_ledger(f"sqlite:///{file}")) as ledger:
        ledger.migrate()
        yield ledger


def github_hook(ledger: Ledger, **how: Any) -> http.Webhook:
    """An endpoint for GitHub."""
    return http.webhook(ledger, queue="hooks", verify=http.github(SECRET), **how)


# ---- WSGI ----------------------------------------------------------------------------------------


def answered(hook: http.Webhook, **environ: Any) -> str:
    """The status that is answered to a request of WSGI."""
    signature = hmac.new(SECRET.encode(), BODY, hashlib.sha256).hexdigest()
    own = {"HTTP_X_GITHUB_DELIVERY": "d-1", "HTTP_X_HUB_SIGNATURE_256": f"sha256={signature}"}
    lines: list[str] = []

    def start(line: str, _: object) -> Callable[[bytes], object]:
        lines.append(line)
        return lambda _: None

    body = hook.wsgi({"REQUEST_METHOD": "POST", **own, **environ}, start)
    assert b"".join(body).endswith(b"\n")
    return lines[0][:3]


class Incoming:
    """A body as a server hands it over; `rest` is what comes where it is over."""

    def __init__(self, body: bytes, rest: Callable[[], bytes]) -> None:
        self._body, self._rest, self.given = body, rest, 0

    def read(self, size: int) -> bytes:
        """What has come of it, at most `size` bytes."""
        assert size >= 0
        piece, self._body = self._body[:size], self._body[size:]
        piece = piece or self._rest()
        self.given += len(piece)
        return piece


def waits_for_ever() -> bytes:
    raise AssertionError("read beyond the end: it would wait for the client")


def test_a_body_is_not_read_beyond_its_end(ledger: Ledger) -> None:
    """Servers that hand over the connection itself would wait there."""
    body = Incoming(BODY, waits_for_ever)
    answer = answered(github_hook(ledger), **{"wsgi.input": body, "CONTENT_LENGTH": str(len(BODY))})
    assert answer == "202"


@pytest.mark.parametrize("length", ["abc", "-5", "1e3", str(len(BODY) + 1)])
def test_a_length_that_lies(ledger: Ledger, length: str) -> None:
    """What has not come as a whole is refused: its signature would say nothing."""
    body = Incoming(BODY, lambda: b"")
    answer = answered(github_hook(ledger), **{"wsgi.input": body, "CONTENT_LENGTH": length})
    assert answer == "400"


@pytest.mark.parametrize("told", [{"wsgi.input_terminated": True}, {"CONTENT_LENGTH": "9" * 12}])
def test_a_body_without_end(ledger: Ledger, told: dict[str, Any]) -> None:
    """It is refused as soon as it is too large, and no more of it is read."""
    body = Incoming(b"", lambda: b"x" * 1000)
    answer = answered(github_hook(ledger, max_body="10KB"), **{"wsgi.input": body, **told})
    assert answer == "413"
    assert body.given <= 12_000


# ---- Forms ---------------------------------------------------------------------------------------


def test_a_form_of_github(ledger: Ledger) -> None:
    """GitHub sends JSON within a form, unless it is told otherwise: a handler sees the JSON."""
    hook = github_hook(ledger)
    json = '{"action": "öffnen & mehr"}'
    form = urlencode({"payload": json}).encode()
    kind = {"Content-Type": "application/x-www-form-urlencoded"}
    answer = by_asgi(hook, {**by_github(form, "d-1", 0), **kind}, form)
    assert answer.status_code == 202
    [message] = queued(ledger)
    assert (message.body, message.content_type) == (json.encode(), "application/json")
    assert message.get("action") == "öffnen & mehr"
    for body in (b"", b"other=1", b"payload=1&payload=2", b"payload=%FF", b"\xff"):
        answer = by_asgi(hook, {**by_github(body, "d-2", 0), **kind}, body)
        assert (answer.status_code, "payload" in answer.text) == (400, True), body


def test_a_form_of_slack(ledger: Ledger) -> None:
    """A command of Slack is not JSON: it is a message as soon as something tells it apart."""
    slack = http.slack(SECRET)
    hook = http.webhook(
        ledger, queue="hooks", verify=slack, message_id=http.header_id("X-Request-Id")
    )
    body = f"command={quote('/deploy')}&trigger_id=1".encode()
    fields = {**by_slack(body, "", time.time()), "X-Request-Id": "r-1"}
    assert by_function(hook, fields, body).status_code == 202
    assert [message.body for message in queued(ledger)] == [body]


# ---- A store that is slow ------------------------------------------------------------------------


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Nothing can be stored in the meantime."""
    with closing(sqlite3.connect(file, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        yield
        connection.execute("COMMIT")


def delivered(hook: http.Webhook, message_id: str) -> HttpAnswer:
    """What a delivery is answered."""
    return hook.receive("POST", by_github(BODY, message_id, 0), BODY)


def test_what_is_stored_after_its_answer(ledger: Ledger, file: Path) -> None:
    """A sender that was told to come again, though its delivery was stored a moment later, is told
    so then, and nothing is handled twice.
    """
    hook = github_hook(ledger, timeout="100ms")
    with locked(file):
        answer = delivered(hook, "d-1")
        assert (answer.status, answer.value_of("Retry-After")) == (503, "5")
    wait_until(lambda: queued(ledger) != [])
    assert delivered(github_hook(ledger), "d-1").status == 200
    assert [message.id for message in queued(ledger)] == ["d-1"]


@pytest.mark.parametrize("post", [by_asgi, by_function])
def test_what_nobody_waits_for_is_dropped(
    ledger: Ledger, file: Path, post: Callable[..., httpx.Response]
) -> None:
    """While the store is away no more deliveries are kept in memory than threads have begun."""
    hook = github_hook(ledger, timeout="200ms")

    def deliver(number: int) -> int:
        return post(hook, by_github(BODY, f"d-{number}", 0), BODY).status_code

    with ThreadPoolExecutor(30) as threads:
        with locked(file):
            assert {*threads.map(deliver, range(30))} == {503}
        wait_until(lambda: deliver(99) != 503)
        known = {message.id for message in queued(ledger)}
        assert len(known) <= 10
        patient = github_hook(ledger, timeout="2m")
        for number in range(30):
            assert delivered(patient, f"d-{number}").status in (200, 202)
    ids = [message.id for message in queued(ledger)]
    assert len(ids) == len(set(ids)) == 31


def test_own_verifier(ledger: Ledger) -> None:
    """A scheme that is not among these is a Verifier of the user's own."""

    def check(headers: Any, body: bytes, now: float) -> None:
        if headers.get("x-token") != "t":
            raise http.SignatureError("the token is wrong")

    verify = http.Verifier("own", check, http.body_id("id"), http.body_id("type"))
    hook = http.webhook(ledger, queue="hooks", verify=verify)
    body = b'{"id": "1", "type": "t"}'
    assert by_function(hook, {"X-Token": "t"}, body).status_code == 202
    assert by_function(hook, {"X-Token": "x"}, body).status_code == 401
    assert queued(ledger) == [
        Message("1", body, type="t", headers={"x-token": "t"}, source="own", content_type="")
    ]
