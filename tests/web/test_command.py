"""`oncely web`: served, refused, stopped."""

import ctypes
import json
import re
import select
import signal
import subprocess
import sys
import urllib.request
from base64 import b64encode
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from html import unescape
from http import HTTPStatus
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import StringIO
from pathlib import Path
from threading import Thread
from urllib.parse import urlsplit

import httpx
import pytest
from tests.cli.conftest import OnFile, ran_here
from tests.web.conftest import forms

from oncely import Key, State
from oncely.web import PasswordAuth, Role, password_line


@pytest.fixture
def at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OnFile]:
    """A ledger with a record in doubt, named by ONCELY_LEDGER."""
    at = OnFile(tmp_path / "ledger.db")
    at.claim("billing", "order-1")
    at.age(7_200)
    monkeypatch.setenv("ONCELY_LEDGER", at.url)
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


def refusal(request: str | urllib.request.Request) -> int:
    """The status of what is not answered otherwise."""
    with (
        pytest.raises(urllib.error.HTTPError) as caught,
        urllib.request.urlopen(request, timeout=60),
    ):
        pass
    with caught.value:
        return caught.value.code


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serves_until_stopped(at: OnFile, number: signal.Signals) -> None:
    """It says where it is, answers there, and ends in good order."""
    with served() as (process, said):
        [url] = re.findall(r"the dashboard is at (http://127\.0\.0\.1:\d+/)$", said)
        with urllib.request.urlopen(url, timeout=60) as answer:
            page = answer.read().decode()
            assert answer.headers["x-frame-options"] == "DENY"
            assert "server" not in {name.lower() for name in answer.headers}
        assert "1 in doubt" in page
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (0, "")


def test_a_signal_to_another_thread(at: OnFile) -> None:
    """It ends also where the system hands the signal to another thread than the main one, as it
    does for a process that was halted meanwhile.
    """
    with served() as (process, said):
        [url] = re.findall(r"(http://\S+)$", said)
        urllib.request.urlopen(url, timeout=60).close()
        thread = max(int(task.name) for task in Path(f"/proc/{process.pid}/task").iterdir())
        assert ctypes.CDLL(None).tgkill(process.pid, thread, signal.SIGTERM) == 0
        _, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (0, "")


def test_keeps_connections(at: OnFile) -> None:
    """A connection stays open for longer than a browser pauses: its next request would be lost."""
    with served() as (_, said):
        [port] = re.findall(r":(\d+)/$", said)
        connection = HTTPConnection("127.0.0.1", int(port), timeout=60)
        with closing(connection):
            connection.request("GET", "/queues")
            with connection.getresponse() as answer:
                assert answer.status == 200
                answer.read()
            # It can be read as soon as the other side closes it.
            closed, _, _ = select.select([connection.sock], [], [], 6.0)
            assert closed == []


@contextmanager
def proxied(port: int, root: str, *, cuts: bool) -> Iterator[int]:
    """A reverse proxy that serves below a path what is at a port; it may cut the path off."""

    class Passing(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._pass_on(None)

        def do_POST(self) -> None:
            self._pass_on(self.rfile.read(int(self.headers["content-length"])))

        def _pass_on(self, body: bytes | None) -> None:
            if not self.path.startswith(f"{root}/"):
                self.send_error(HTTPStatus.BAD_GATEWAY, f"not below {root}: {self.path}")
                return
            path = self.path.removeprefix(root) if cuts else self.path
            with closing(HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
                connection.request(self.command, path, body, dict(self.headers))
                answer = connection.getresponse()
                self.send_response(answer.status)
                for name, value in answer.getheaders():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(answer.read())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Passing) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("cuts", [True, False])
def test_below_a_path(at: OnFile, tmp_path: Path, cuts: bool) -> None:
    """Behind a proxy that serves it below a path, links, files, redirects, forms and the cookie
    stay below it, whether the proxy cuts the path off or not.
    """
    (tmp_path / "passwords").write_text(password_line("anna", "geheim", Role.OPERATOR) + "\n")
    options = ["--root-path", "/ops/oncely", "--passwords", str(tmp_path / "passwords"), "--json"]
    with served(*options) as (_, said):
        own = urlsplit(json.loads(said)["url"])
        assert own.path == "/ops/oncely/"
        with proxied(own.port or 0, "/ops/oncely", cuts=cuts) as port:
            site = f"http://127.0.0.1:{port}"
            client = httpx.Client(base_url=site, auth=("anna", "geheim"), headers={"origin": site})
            with client:
                seen = follow_links(client, "/ops/oncely/")
                assert {"/ops/oncely/failed", "/ops/oncely/message"} <= seen
                moved = client.get("/ops/oncely/failed/")
                assert (moved.status_code, moved.headers["location"]) == (307, "/ops/oncely/failed")
                assert [cookie.path for cookie in client.cookies.jar] == ["/ops/oncely"]
                page = client.get("/ops/oncely/in-doubt").text
                for fields in ({"decision": "happened", "every": "yes"}, {"why": "a test"}):
                    [(to, hidden)] = forms(page).items()
                    page = client.post(to, data={**hidden, **fields}).text
                assert "completed" in page
    found = at.ledger.find(Key("billing", "order-1"))
    assert found is not None
    assert found.state is State.COMPLETED


def follow_links(client: httpx.Client, start: str) -> set[str]:
    """Ask for all that pages refer to, as far as it goes; return the paths."""
    seen, left = set(), [start]
    while left:
        address = left.pop()
        path = urlsplit(address).path
        if path in seen:
            continue
        answer = client.get(address)
        assert answer.status_code == 200, address
        seen.add(path)
        found = re.findall(r'(?:href|src|action|hx-get)="([^"#]*)"', answer.text)
        if "text/html" in answer.headers["content-type"]:
            left += [unescape(each) for each in found if "/confirm" not in each]
    return seen


def test_probes(at: OnFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe that is named by its module is asked about its consumer's messages in doubt."""
    (tmp_path / "own_probes.py").write_text("def asked(message):\n    return 'unknown'\n")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "passwords").write_text(password_line("anna", "geheim", Role.OPERATOR) + "\n")
    with served("--passwords", "passwords", "--probe", "billing=own_probes:asked") as (_, said):
        [url] = re.findall(r"(http://\S+)$", said)
        sign_in = b64encode(b"anna:geheim").decode()
        request = urllib.request.Request(
            f"{url}in-doubt", headers={"authorization": f"Basic {sign_in}"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert "Probe now…" in answer.read().decode()


def test_says_where_as_json(at: OnFile) -> None:
    """For a program that starts it; another name than its own is refused."""
    with served("--json") as (_, said):
        url = json.loads(said)["url"]
        request = urllib.request.Request(url, headers={"host": "evil.example"})
        assert refusal(request) == 421


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--host", "0.0.0.0"], "others can reach 0.0.0.0, .* add --passwords FILE"),
        (["--host", "db.example"], "others can reach db.example"),
        (["--passwords", "nowhere"], "passwords: 'nowhere' cannot be read"),
        (["--passwords", "p", "--user-header", "X-User"], "are two ways; leave one out"),
        (["--operator", "anna"], "--operator needs --user-header NAME"),
        (["--trusted-proxy", "10.0.0.7"], "needs --user-header NAME or --passwords FILE"),
        (["--user-header", "X-User", "--trusted-proxy", "x"], "write an address such as"),
        (["--port", "99999"], "--port: '99999' is not a port: write 8470"),
        (["--ledger", "sqlite:///nowhere.db"], "there is no file 'nowhere.db'"),
        (["--make-password", "a:b"], "'a:b' is not a name"),
        (["--root-path", "oncely"], "--root-path: 'oncely' is not a path of a URL; write /oncely"),
        (["--root-path", "//evil.example"], "is not a path of a URL; write /oncely"),
        (["--probe", "billing"], "--probe: 'billing' names no consumer; write"),
        (["--probe", "billing=nowhere:asked"], "there is no module 'nowhere'"),
        (["--probe", "billing=json:nothing"], "json has no 'nothing'"),
        (["--probe", "billing=json:__name__"], "json:__name__ is not a probe; write a function"),
    ],
)
def test_mistakes(
    at: OnFile, monkeypatch: pytest.MonkeyPatch, arguments: Sequence[str], said: str
) -> None:
    """One line says what is wrong and what to type instead."""
    monkeypatch.setattr(sys, "stdin", StringIO("x\n"))
    ran = ran_here("web", *arguments)
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert re.search(said, ran.err)


def test_port_that_is_taken(at: OnFile) -> None:
    """Somebody else has the port: said in a line."""
    with served() as (_, said):
        [port] = re.findall(r":(\d+)/", said)
        ran = ran_here("web", "--port", port)
    assert ran.code == 2
    assert f"127.0.0.1:{port} cannot be had (Address already in use); name another" in ran.err


def test_address_of_another_machine(at: OnFile, tmp_path: Path) -> None:
    """An address that this machine does not have: said in a line, with the option to change."""
    (tmp_path / "passwords").write_text(
        password_line("anna", "secret", Role.OPERATOR), encoding="utf-8"
    )
    ran = ran_here("web", "--host", "192.0.2.1", "--passwords", str(tmp_path / "passwords"))
    assert ran.code == 2
    assert "192.0.2.1:8470 cannot be had (Cannot assign requested address)" in ran.err
    assert ran.err.endswith("; name an address of this machine with --host\n")


def test_make_password(at: OnFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line that it prints is one that it takes; the password is read from stdin."""
    monkeypatch.setattr(sys, "stdin", StringIO("geheim\n"))
    ran = ran_here("web", "--make-password", "anna", "--role", "operator")
    assert ran.code == 0
    assert ran.out.startswith("anna:operator:scrypt:")
    file = tmp_path / "passwords"
    file.write_text(ran.out)
    PasswordAuth(file)
    with served("--passwords", str(file)) as (_, said):
        url = said.split()[-1]
        assert refusal(url) == 401
