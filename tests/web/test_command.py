"""`oncely web`: served, refused, stopped."""

import ctypes
import json
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from html import unescape
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from tests.cli.conftest import OnFile, ran_here
from tests.records import record_of
from tests.web.conftest import forms

from oncely import Key, State

TOKEN = "a-token-of-the-tests"


@pytest.fixture
def at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OnFile]:
    """A ledger with a record in doubt, named by ONCELY_LEDGER."""
    at = OnFile(tmp_path / "ledger.db")
    at.claim("billing", "order-1")
    at.age(7_200)
    monkeypatch.setenv("ONCELY_LEDGER", at.url)
    monkeypatch.delenv("ONCELY_WEB_TOKEN", raising=False)
    yield at
    at.ledger.close()


@contextmanager
def served(*arguments: str) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """The command, and what it says first."""
    command = [sys.executable, "-m", "oncely", "web", "--port", "0", *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline()
        finally:
            process.kill()


@contextmanager
def client_of(
    site: str, token: str | None = None, transport: httpx.BaseTransport | None = None
) -> Iterator[httpx.Client]:
    """A browser, or a program that sends the token with each request."""
    headers = {"origin": site} | ({"authorization": f"Bearer {token}"} if token else {})
    with httpx.Client(
        base_url=site, headers=headers, timeout=60, follow_redirects=True, transport=transport
    ) as client:
        yield client


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serves_until_stopped(at: OnFile, number: signal.Signals) -> None:
    """It says where it is, answers there, and ends in good order."""
    with served() as (process, said):
        found = r"the dashboard is at ((http://127\.0\.0\.1:\d+)/\?token=[\w-]{43})$"
        [(url, site)] = re.findall(found, said)
        with client_of(site) as browser:
            answer = browser.get(url)
            assert answer.url == f"{site}/"
            assert answer.headers["x-frame-options"] == "DENY"
            assert "server" not in answer.headers
            assert "1 in doubt" in answer.text
            assert "order-1" in browser.get("/in-doubt").text
            assert browser.get("/?token=wrong-wrong-wrong").status_code == 200
        assert httpx.get(f"{site}/?token=wrong-wrong-wrong", timeout=60).status_code == 401
        process.send_signal(number)
        # The token is in no log.
        assert process.communicate(timeout=60) == ("", "")
        assert process.returncode == 0


def test_a_signal_to_another_thread(at: OnFile) -> None:
    """It ends also where the system hands the signal to another thread than the main one, as it
    does for a process that was halted meanwhile.
    """
    with served() as (process, said):
        # It answers, so a signal does not simply kill it any more.
        httpx.get(said.split()[-1], timeout=60)
        thread = max(int(task.name) for task in Path(f"/proc/{process.pid}/task").iterdir())
        assert ctypes.CDLL(None).tgkill(process.pid, thread, signal.SIGTERM) == 0
        _, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (0, "")


@pytest.mark.in_turn("long")
def test_keeps_connections(at: OnFile) -> None:
    """A connection stays open for longer than a browser pauses: its next request would be lost."""
    with served() as (_, said):
        own = urlsplit(said.split()[-1])
        connection = HTTPConnection("127.0.0.1", own.port or 0, timeout=60)
        with closing(connection):
            connection.request("GET", f"/queues?{own.query}")
            with connection.getresponse() as answer:
                assert answer.status == 303
                answer.read()
            # It can be read as soon as the other side closes it.
            closed, _, _ = select.select([connection.sock], [], [], 6.0)
            assert closed == []


class Proxied(httpx.HTTPTransport):
    """A reverse proxy that serves below a path what it asks; it may cut the path off."""

    def __init__(self, root: str, *, cuts: bool) -> None:
        super().__init__()
        self._root, self._cut = root, root.encode() if cuts else b""

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        assert request.url.path.startswith(f"{self._root}/"), f"not below it: {request.url}"
        url = request.url.copy_with(raw_path=request.url.raw_path.removeprefix(self._cut))
        asked = httpx.Request(request.method, url, headers=request.headers, stream=request.stream)
        return super().handle_request(asked)


@pytest.mark.parametrize("cuts", [True, False])
def test_below_a_path(at: OnFile, cuts: bool) -> None:
    """Behind a proxy that serves it below a path, links, files, redirects, forms and the cookies
    stay below it, whether the proxy cuts the path off or not.
    """
    with served("--root-path", "/ops/oncely", "--json") as (_, said):
        own = urlsplit(json.loads(said)["url"])
        assert own.path == "/ops/oncely/"
        proxy = Proxied("/ops/oncely", cuts=cuts)
        with client_of(f"http://{own.netloc}", transport=proxy) as client:
            came = client.get(f"/ops/oncely/failed?{own.query}")
            assert (came.status_code, came.url.path) == (200, "/ops/oncely/failed")
            links = re.findall(r'(?:href|src|action|hx-get)="([^"#]*)"', came.text)
            assert {client.get(unescape(each)).status_code for each in links} == {200}
            assert "/ops/oncely/in-doubt" in links
            moved = client.get("/ops/oncely/failed/", follow_redirects=False)
            assert (moved.status_code, moved.headers["location"]) == (307, "/ops/oncely/failed")
            assert [cookie.path for cookie in client.cookies.jar] == ["/ops/oncely"] * 2
            page = client.get("/ops/oncely/in-doubt").text
            for fields in ({"decision": "happened", "every": "yes"}, {"why": "a test"}):
                [(to, hidden)] = forms(page).items()
                page = client.post(to, data={**hidden, **fields}).text
            assert "completed" in page
    assert record_of(at.ledger, Key("billing", "order-1")).state is State.COMPLETED


def test_probes(at: OnFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe that is named by its module is asked about its consumer's messages in doubt."""
    (tmp_path / "own_probes.py").write_text("def asked(message):\n    return 'unknown'\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ONCELY_WEB_TOKEN", TOKEN)
    with (
        served("--probe", "billing=own_probes:asked") as (_, said),
        client_of(said.split()[-1], TOKEN) as client,
    ):
        assert "Probe now…" in client.get("/in-doubt").text


def test_token_of_the_environment(at: OnFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked for, and is not printed; a program sends it with each request."""
    monkeypatch.setenv("ONCELY_WEB_TOKEN", TOKEN)
    with served("--json") as (_, said):
        url = json.loads(said)["url"]
        assert urlsplit(url).query == ""
        with client_of(url, TOKEN) as program:
            assert "1 in doubt" in program.get("/").text
        for wrong in (None, TOKEN.upper()):
            with client_of(url, wrong) as program:
                assert program.get("/").status_code == 401


def test_a_new_token_at_each_start(at: OnFile) -> None:
    """The token of one start, and the cookie that a browser got for it, open no other."""
    with served("--json") as (_, said):
        first = urlsplit(json.loads(said)["url"])
        with client_of(f"http://{first.netloc}") as browser:
            assert browser.get(f"/?{first.query}").status_code == 200
            with served("--json") as (_, says):
                second = urlsplit(json.loads(says)["url"])
                assert second.query != first.query
                site = f"http://{second.netloc}"
                assert browser.get(f"{site}/").status_code == 401
                assert browser.get(f"{site}/?{first.query}").status_code == 401
                assert browser.get(f"{site}/?{second.query}").status_code == 200
            # The cookies of two ports are beside one another.
            assert browser.get("/").status_code == 200


def test_a_proxy_says_who(at: OnFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a proxy names the user no token is asked for, nor taken."""
    monkeypatch.setenv("ONCELY_WEB_TOKEN", "")
    with served("--user-header", "X-User", "--operator", "anna") as (_, said):
        url = said.split()[-1]
        assert urlsplit(url).query == ""
        with client_of(url) as proxy:
            for name, role in (("anna", "operator"), ("ben", "viewer")):
                assert f"{name} ({role})" in proxy.get("/", headers={"x-user": name}).text
            assert proxy.get("/").status_code == 403


def test_no_websocket(at: OnFile) -> None:
    """Whoever asks for a websocket needs the token as well."""
    upgrade = {
        "connection": "Upgrade",
        "upgrade": "websocket",
        "sec-websocket-version": "13",
        "sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ==",
    }
    with served() as (_, said):
        url = said.split()[-1].partition("?")[0]
        assert httpx.get(f"{url}static/x", headers=upgrade, timeout=60).status_code == 401


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--operator", "anna"], "--operator needs --user-header NAME"),
        (["--user-header", "X-User", "--trusted-proxy", "x"], "write an address such as"),
        (["--trusted-proxy", "x"], "write an address such as"),
        (["--port", "99999"], "--port: '99999' is not a port: write 8470"),
        (["--ledger", "sqlite:///nowhere.db"], "there is no file 'nowhere.db'"),
        (["--root-path", "oncely"], "--root-path: 'oncely' is not a path of a URL; write /oncely"),
        (["--root-path", "//evil.example"], "is not a path of a URL; write /oncely"),
        (["--probe", "billing"], "--probe: 'billing' names no consumer; write"),
        (["--probe", "billing=nowhere:asked"], "there is no module 'nowhere'"),
        (["--probe", "billing=json:nothing"], "json has no 'nothing'"),
        (["--probe", "billing=json:__name__"], "json:__name__ is not a probe; write a function"),
    ],
)
def test_mistakes(at: OnFile, arguments: Sequence[str], said: str) -> None:
    """One line says what is wrong and what to type instead."""
    ran = ran_here("web", *arguments)
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert re.search(said, ran.err)


@pytest.mark.parametrize("token", ["", " " * 20, "x" * 15, "geheim&geheim&geheim", f"{TOKEN}\n"])
def test_tokens_that_can_be_guessed(
    at: OnFile, monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    """A blank or short token, or one that an address cannot hold, is refused and not printed."""
    monkeypatch.setenv("ONCELY_WEB_TOKEN", token)
    # A token that is taken would serve the dashboard for ever, were there a ledger.
    ran = ran_here("web", "--ledger", "sqlite:///nowhere.db")
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert "the value of ONCELY_WEB_TOKEN is not a token of at least 16 letters" in ran.err
    assert "openssl rand -hex 32" in ran.err
    assert "geheim" not in ran.err


def test_port_that_is_taken(at: OnFile) -> None:
    """Somebody else has the port, or another machine the address: a line says what to change."""
    with served() as (_, said):
        [port] = re.findall(r":(\d+)/", said)
        ran = ran_here("web", "--port", port)
    assert ran.code == 2
    assert f"127.0.0.1:{port} cannot be had (Address already in use); name another" in ran.err
    ran = ran_here("web", "--host", "192.0.2.1")
    assert ran.code == 2
    assert "192.0.2.1:8470 cannot be had (Cannot assign requested address)" in ran.err
    assert ran.err.endswith("; name an address of this machine with --host\n")
