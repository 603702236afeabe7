"""The token of `oncely web`: who has it comes in, everybody else is told where to find it."""

from collections.abc import Mapping
from typing import Any, cast

import pytest
from starlette.testclient import TestClient
from starlette.types import ASGIApp
from tests.records import record_of
from tests.web.conftest import PAGES, SITE, Reader, Trouble, forms, text

from oncely import Key, Ledger
from oncely.web import dashboard
from oncely.web.access import TrustedProxies
from oncely.web.token_gate import TokenGate, token_holder

TOKEN = "the-token-of-these-tests"
BEARER = {"authorization": f"Bearer {TOKEN}"}
COOKIE = "oncely_web_token_testserver"


class NoLedger:
    """A ledger that nothing may be asked of."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"the ledger was asked for {name}")


def guarded(ledger: Ledger, token: str = TOKEN) -> ASGIApp:
    """The dashboard as `oncely web` serves it."""
    return TokenGate(dashboard(ledger, auth=token_holder), token, TrustedProxies())


def stranger(app: ASGIApp, **headers: str) -> TestClient:
    """Somebody who has no cookie yet, and is not led on."""
    return TestClient(app, base_url=SITE, headers=headers, follow_redirects=False)


@pytest.fixture
def closed() -> TestClient:
    """A dashboard whose ledger nobody may reach."""
    return stranger(guarded(cast("Ledger", NoLedger())))


def test_token_in_the_address(filled: Trouble) -> None:
    """It is taken once, kept in a cookie, and gone from the address; the rest of that stays."""
    client = stranger(guarded(filled.ledger))
    answer = client.get(f"/failed?consumer=a%26b&token={TOKEN}&limit=&token={TOKEN}")
    assert answer.status_code == 303
    assert answer.headers["location"] == "/failed?consumer=a%26b&limit="
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["referrer-policy"] == "same-origin"
    assert answer.content == b""
    assert client.get("/").status_code == 200
    assert "token holder (operator)" in client.get("/failed").text
    assert stranger(guarded(filled.ledger)).head(f"/?token={TOKEN}").headers["location"] == "/"


def test_cookie(closed: TestClient) -> None:
    """The cookie is out of scripts' reach, not for other sites' forms, for the pages below the path
    of this dashboard, and for TLS alone where the browser asks over TLS.
    """
    for base, headers, is_secure in (
        (SITE, {}, False),
        ("https://testserver", {}, True),
        (SITE, {"x-forwarded-proto": "https"}, True),
    ):
        client = TestClient(closed.app, base_url=base, root_path="/oncely", client=("127.0.0.1", 1))
        asked = f"/oncely/?token={TOKEN}"
        answer = client.get(asked, headers=headers, follow_redirects=False)
        cookie = answer.headers["set-cookie"].lower().split("; ")
        assert {"httponly", "samesite=lax", "path=/oncely"} <= set(cookie)
        assert ("secure" in cookie) == is_secure


@pytest.mark.parametrize(
    ("host", "root"), [("localhost:8471", ""), ("localhost", ""), ("localhost:8470", "/oncely")]
)
def test_cookies_of_others(closed: TestClient, host: str, root: str) -> None:
    """A dashboard on another port, or below another path, has a cookie of another name."""
    names = set()
    for each, its_root in (("localhost:8470", ""), (host, root)):
        client = TestClient(closed.app, base_url=f"http://{each}", root_path=its_root)
        answer = client.get(f"{its_root}/?token={TOKEN}", follow_redirects=False)
        names.add(answer.headers["set-cookie"].partition("=")[0])
    assert len(names) == 2


WRONG: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "nothing": ("", {}),
    "empty": ("?token=", {}),
    "another": ("?token=another-token-of-a-test", {}),
    "a beginning": (f"?token={TOKEN[:-1]}", {}),
    "longer": (f"?token={TOKEN}x", {}),
    "other letters": (f"?token={TOKEN.upper()}", {}),
    "not ASCII": ("?token=%C3%A9%FF%00", {}),
    "wrong cookie": ("", {"cookie": f"{COOKIE}=another-token-of-a-test"}),
    "empty cookie": ("", {"cookie": f"{COOKIE}="}),
    "cookie not ASCII": ("", {"cookie": f'{COOKIE}="\\351"'}),
    "cookie of another port": ("", {"cookie": f"{COOKIE}-8470={TOKEN}"}),
    "cookie for forms": ("", {"cookie": f"oncely_web={TOKEN}"}),
    "wrong bearer": ("", {"authorization": "Bearer another-token-of-a-test"}),
    "empty bearer": ("", {"authorization": "Bearer "}),
    "no bearer": ("", {"authorization": TOKEN}),
    "basic": ("", {"authorization": f"Basic {TOKEN}"}),
}


@pytest.mark.parametrize(("query", "headers"), WRONG.values(), ids=[*WRONG])
def test_without_the_token(closed: TestClient, query: str, headers: Mapping[str, str]) -> None:
    """Whatever is asked, the answer is the same page: it says where the token is, and nothing of
    the ledger, of who may come in or of which pages there are. No cookie is given.
    """
    answers = [
        closed.request(method, path + query, headers={**headers, "origin": SITE})
        for method in ("GET", "POST", "DELETE")
        for path in (*PAGES, "/nowhere", "/static/oncely.css", "/records/change", "//evil.example/")
    ]
    assert {answer.status_code for answer in answers} == {401}
    [page] = {answer.text for answer in answers}
    assert "open the address that it printed" in text(page)
    assert forms(page) == {}
    assert "href" not in page
    for answer in answers:
        assert "set-cookie" not in answer.headers
        assert answer.headers["www-authenticate"] == 'Bearer realm="oncely"'
        assert answer.headers["x-frame-options"] == "DENY"
        assert answer.headers["cache-control"] == "no-store"


def test_old_token_beside_the_cookie(filled: Trouble) -> None:
    """Who has the cookie is not kept out by an old address."""
    client = stranger(guarded(filled.ledger))
    client.get(f"/?token={TOKEN}")
    assert client.get("/?token=an-old-token-in-a-bookmark").status_code == 200


@pytest.mark.parametrize("kind", ["Bearer", "bearer", "BEARER "])
def test_bearer(filled: Trouble, kind: str) -> None:
    """A program sends the token with each request, and gets no cookie for it; once."""
    header = ("authorization", f"{kind} {TOKEN}")
    client = stranger(guarded(filled.ledger))
    answer = client.get("/", headers=[header])
    assert answer.status_code == 200
    assert COOKIE not in answer.headers["set-cookie"]
    assert client.get("/", headers=[header, header]).status_code == 401


@pytest.mark.parametrize("path", ["//evil.example/", "//evil.example", "///evil.example/a"])
def test_leads_to_no_other_site(closed: TestClient, path: str) -> None:
    """Nobody is led from the address with the token to another site."""
    answer = closed.get(f"{SITE}{path}?token={TOKEN}")
    assert answer.headers["location"] == "/" + path.lstrip("/")
    for odd in ("/%5Cevil.example", "/a%0D%0Ab", "/a%3Fb", "/a%23b", "/%C3%A9"):
        assert closed.get(f"{odd}?token={TOKEN}").headers["location"] == odd


def test_decisions(filled: Trouble) -> None:
    """The token's holder decides, by forms of the dashboard alone; it is noted as theirs. To send
    a form the token is not enough.
    """
    reader = Reader(guarded(filled.ledger))
    reader.get("/", token=TOKEN)
    page = reader.get("/in-doubt")
    fields = {**forms(page)["/records/confirm"], "decision": "not-happened", "every": "yes"}
    program = stranger(reader.app, **BEARER, origin=SITE)
    assert program.post("/records/confirm", data=fields).status_code == 403
    unknown = stranger(reader.app, origin=SITE)
    assert unknown.post(f"/records/confirm?token={TOKEN}", data=fields).status_code == 401
    asking = reader.send(page, "/records/confirm", decision="not-happened", every="yes")
    assert "2 settled" in text(reader.send(asking, "/records/change", why="x"))
    found = record_of(filled.ledger, Key("billing", "order-1"))
    assert (found.metadata or {})["reset"]["by"] == "token holder"
