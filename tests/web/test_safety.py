"""Who may come in, who may change, and what browsers are kept from."""

import hashlib
import re
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient
from tests.web.conftest import PAGES, SITE, Reader, Trouble, as_user, forms, text

from oncely import Key, Ledger
from oncely.core.errors import ConfigError
from oncely.stores.memory_store import MemoryStore
from oncely.web import ProxyAuth, Role, Scope, User, dashboard
from oncely.web.rendering import STATIC

HTMX = "d6fdc75f204e6bdefa99b69bf1e6d4ac69b8a364f77929f45c13476b4000f717"
"""The SHA-256 of dist/htmx.min.js in htmx.org 2.0.11."""
FORMS = ("/records/confirm", "/records/change", "/letters/confirm", "/letters/change")
MOST_BYTES = 150_000


def posted(reader: Reader, to: str = "/records/confirm", **changes: str) -> int:
    """Send a form that is right but for these headers, or fields; return the status."""
    fields = forms(reader.get("/in-doubt"))["/records/confirm"]
    headers = {name.replace("_", "-"): changes.pop(name) for name in [*changes] if name != "csrf"}
    data = {**fields, "decision": "not-happened", "every": "yes", **changes}
    return reader.client.post(to, data=data, headers=headers).status_code


# ---- Read-only ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("auth", "said"),
    [
        (None, "Read-only: this dashboard asks nobody who they are"),
        (as_user(Role.VIEWER), "you are a viewer"),
    ],
)
def test_who_may_not_change_sees_no_buttons(filled: Trouble, auth: Any, said: str) -> None:
    """A viewer, and anybody where nobody is asked who they are: each page says so, and has nothing
    to press.
    """
    reader = Reader(dashboard(filled.ledger, auth=auth))
    for path in PAGES:
        page = reader.get(path)
        assert said in page
        assert 'method="post"' not in page
    assert 'name="decision"' not in reader.get("/message", id="order-1", consumer="billing")


@pytest.mark.parametrize("to", FORMS)
@pytest.mark.parametrize("auth", [None, as_user(Role.VIEWER)])
def test_only_operators_change(filled: Trouble, to: str, auth: object) -> None:
    """Neither a viewer nor somebody unknown changes anything, whatever they send."""
    client = TestClient(dashboard(filled.ledger, auth=auth), base_url=SITE)  # type: ignore[arg-type]
    before = filled.ledger.find(Key("billing", "order-1"))
    answer = client.post(
        to, data={"decision": "not-happened", "every": "yes"}, headers={"origin": SITE}
    )
    assert answer.status_code == 403
    assert "Only operators may change anything" in answer.text
    assert filled.ledger.find(Key("billing", "order-1")) == before


# ---- Forms of other sites ----------------------------------------------------------------------


OF_OTHERS = [
    *({"csrf": each} for each in ("", "0" * 64, "é")),
    *({"origin": f"http{each}"} for each in ("s://evil.example", "://testserver.evil.example")),
    *({"origin": each} for each in ("http://testserver:81", "null", "http://[")),
    *({"sec_fetch_site": each} for each in ("cross-site", "same-site")),
    *({"cookie": f"oncely_web={each}"} for each in ("another", "")),
]


def test_forms_of_others(operator: Reader) -> None:
    """A token that is missing or another's, an origin or site that is not ours: 403."""
    assert [posted(operator), posted(operator, sec_fetch_site="same-origin")] == [200, 200]
    for changes in OF_OTHERS:
        assert posted(operator, **changes) == 403, changes


def test_without_origin(operator: Reader) -> None:
    """A form of which nobody says where it is from is refused."""
    page = operator.get("/in-doubt")
    del operator.client.headers["origin"]
    operator.send(page, "/records/confirm", 403, decision="not-happened", every="yes")


def test_token_of_another_user(filled: Trouble) -> None:
    """A token belongs to a user: one that signs in after another sends no form of theirs."""
    names = iter(["anna", "ben"])

    def auth(_: Scope) -> User:
        return User(next(names), Role.OPERATOR)

    reader = Reader(dashboard(filled.ledger, auth=auth))
    reader.send(
        reader.get("/in-doubt"), "/records/confirm", 403, decision="not-happened", every="yes"
    )


@pytest.mark.parametrize(("secret", "status"), [(None, 403), ("the same", 200)])
def test_several_processes(filled: Trouble, secret: str | None, status: int) -> None:
    """A form of one process is taken by another where both have the same secret; a blank one is
    refused.
    """
    makes, takes = (
        Reader(dashboard(filled.ledger, auth=as_user(), secret=secret)) for _ in range(2)
    )
    page = makes.get("/in-doubt")
    takes.client.cookies = makes.client.cookies
    takes.send(page, "/records/confirm", status, decision="not-happened", every="yes")
    with pytest.raises(ConfigError, match="secret: it is empty"):
        dashboard(filled.ledger, secret=" ")


@pytest.mark.parametrize(
    ("kind", "body", "status"),
    [
        ("application/json", b"{}", 415),
        ("text/plain", b"csrf=1", 415),
        ("application/x-www-form-urlencoded", b"a=%ff", 400),
        ("application/x-www-form-urlencoded", b"\xff", 400),
        ("application/x-www-form-urlencoded", b"a=1&" * 5_000, 400),
        ("application/x-www-form-urlencoded", b"a" * (8 * 2**20 + 1), 413),
    ],
)
def test_what_is_not_a_form(operator: Reader, kind: str, body: bytes, status: int) -> None:
    """Anything else is refused, and not read for longer than a form can be."""
    answer = operator.client.post("/records/confirm", content=body, headers={"content-type": kind})
    assert answer.status_code == status


def test_cookie(filled: Trouble) -> None:
    """It is for this site alone, out of scripts' reach, of the mount's path, and over TLS where
    the page is; only who can send a form has one.
    """
    app = FastAPI()
    app.mount("/oncely", dashboard(filled.ledger, auth=as_user()))
    for scheme in ("http", "https"):
        client = TestClient(app, base_url=f"{scheme}://testserver")
        cookie = client.get("/oncely/in-doubt").headers["set-cookie"].lower()
        assert {"httponly", "samesite=strict", "path=/oncely"} <= set(cookie.split("; "))
        assert ("secure" in cookie.split("; ")) == (scheme == "https")
    alone = TestClient(dashboard(filled.ledger), base_url=SITE)
    assert "set-cookie" not in alone.get("/").headers


@pytest.mark.parametrize(
    ("peer", "said", "is_secure"),
    [
        ("10.0.0.7", ["https"], True),
        ("10.0.0.7", ["HTTPS, http"], True),
        ("10.0.0.7", ["http"], False),
        ("10.0.0.7", ["http, https"], False),
        ("10.0.0.7", ["http", "https"], False),
        ("10.0.0.7", [], False),
        ("10.9.0.7", ["https"], False),
    ],
)
@pytest.mark.parametrize("kind", ["named", "by its auth"])
def test_cookie_behind_a_proxy(
    filled: Trouble, kind: str, peer: str, said: list[str], is_secure: bool
) -> None:
    """Where a proxy that is trusted says that the browser asks over TLS, the cookie is for TLS."""
    trusted = ["10.0.0.0/24"]
    by_proxy = ProxyAuth("X-Forwarded-User", trusted=["10.0.0.0/16", "10.9.0.7"], operators="*")
    app = (
        dashboard(filled.ledger, auth=by_proxy, proxies=trusted)
        if kind == "named"
        else dashboard(
            filled.ledger, auth=ProxyAuth("X-Forwarded-User", trusted=trusted, operators="*")
        )
    )
    client = TestClient(app, base_url=SITE, client=(peer, 1))
    headers = [("x-forwarded-user", "anna"), *(("x-forwarded-proto", each) for each in said)]
    answer = client.get("/in-doubt", headers=headers)
    cookie = answer.headers.get("set-cookie", "").lower()
    assert ("secure" in cookie.split("; ")) == is_secure
    assert bool(cookie) == (kind == "named" or peer == "10.0.0.7")


def test_cookie_behind_a_local_proxy(filled: Trouble) -> None:
    """Where nothing is said of proxies, one on this machine is believed."""
    for peer, is_secure in (("127.0.0.1", True), ("10.0.0.7", False)):
        app = dashboard(filled.ledger, auth=as_user())
        client = TestClient(app, base_url=SITE, client=(peer, 1))
        answer = client.get("/in-doubt", headers={"x-forwarded-proto": "https"})
        assert ("secure" in answer.headers["set-cookie"].lower().split("; ")) is is_secure


# ---- What browsers are told --------------------------------------------------------------------


@pytest.mark.parametrize("path", [*PAGES, "/nowhere", "/static/oncely.css", "/static/nowhere"])
def test_headers(operator: Reader, path: str) -> None:
    """No frame, no script but ours, no sniffing, no copy, on whatever is answered."""
    headers = operator.client.get(path).headers
    policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["base-uri"] == policy["frame-ancestors"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["form-action"] == "'self'"
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["x-frame-options"] == "DENY"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "same-origin"
    kept = "no-store" if path != "/static/oncely.css" else "public, max-age=31536000, immutable"
    assert headers["cache-control"] == kept


def test_headers_of_refusals(filled: Trouble) -> None:
    """So it is for who may not come in, and for a page that fails."""

    def broken(_: Scope) -> User:
        raise LookupError("geheim")

    for auth, status in ((lambda _: None, 403), (broken, 500)):
        app = dashboard(filled.ledger, auth=auth)
        answer = TestClient(app, base_url=SITE, raise_server_exceptions=False).get("/")
        assert (answer.status_code, answer.headers["x-frame-options"]) == (status, "DENY")
        assert "geheim" not in answer.text
        assert "order-1" not in answer.text


@pytest.mark.parametrize("path", PAGES)
def test_nothing_inline(operator: Reader, path: str) -> None:
    """No page needs what the policy forbids: scripts and styles in it, handlers, other sites."""
    page = operator.get(path)
    assert re.search(r"<script(?! src)|<style|\sstyle=|\son\w+=|javascript:", page) is None
    assert re.findall(r'(?:src|href|action|hx-get)="(?!/)([^"]*)"', page) == ["#main"]


def test_htmx_is_the_one_that_was_published() -> None:
    """The vendored file is that of npm, byte by byte; its licence is beside it."""
    [file] = STATIC.glob("htmx*.js")
    assert hashlib.sha256(file.read_bytes()).hexdigest() == HTMX
    assert "Zero-Clause BSD" in (STATIC / "htmx-LICENSE.txt").read_text()


def test_first_visit_is_light(operator: Reader) -> None:
    """The overview and all that it loads are at most 150 KB."""
    page = operator.get("/")
    files = set(re.findall(r'(?:src|href)="(/static/[^"]*)"', page))
    assert len(files) == 3
    sizes = [len(operator.client.get(file).content) for file in files]
    assert len(page.encode()) + sum(sizes) <= MOST_BYTES


# ---- Who asks ----------------------------------------------------------------------------------


def asked_by(client: tuple[str, int] | None, *headers: tuple[bytes, bytes]) -> Scope:
    """What a server knows of a request from there."""
    return {"type": "http", "client": client, "headers": [*headers]}


ANNA = (b"x-forwarded-user", b"anna")


@pytest.mark.parametrize(
    ("scope", "user"),
    [
        (asked_by(("10.0.0.7", 1), ANNA), User("anna", Role.OPERATOR)),
        (asked_by(("::ffff:10.0.0.7", 1), ANNA), User("anna", Role.OPERATOR)),
        (asked_by(("10.0.0.7", 1), (b"x-forwarded-user", b"ben")), User("ben", Role.VIEWER)),
        (asked_by(("10.1.0.7", 1), ANNA), None),
        (asked_by(("127.0.0.1", 1), ANNA), None),
        (asked_by(("testclient", 1), ANNA), None),
        (asked_by(None, ANNA), None),
        (asked_by(("10.0.0.7", 1)), None),
        (asked_by(("10.0.0.7", 1), ANNA, (b"X-Forwarded-User", b"ben")), None),
        (asked_by(("10.0.0.7", 1), (b"x-forwarded-user", b" ")), None),
    ],
)
def test_proxy(scope: Scope, user: User | None) -> None:
    """The header is believed of the proxy alone, and where it stands once."""
    auth = ProxyAuth("X-Forwarded-User", trusted=["10.0.0.0/24"], operators=["anna"])
    assert auth(scope) == user


def test_proxy_for_all() -> None:
    """A star lets everybody decide; what is not an address is refused."""
    auth = ProxyAuth("X-Forwarded-User", operators="*")
    assert auth(asked_by(("127.0.0.1", 1), ANNA)) == User("anna", Role.OPERATOR)
    with pytest.raises(ConfigError, match="write an address such as"):
        ProxyAuth("X-Forwarded-User", trusted=["proxy.example"])


def test_async_auth(filled: Trouble) -> None:
    """The hook may be a coroutine, and sees the scope."""

    async def auth(scope: Scope) -> User | None:
        return User("anna") if scope["path"] == "/" else None

    reader = Reader(dashboard(filled.ledger, auth=auth))
    assert "anna (viewer)" in reader.get("/")
    reader.get("/failed", 403)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:8470", 200),
        ("[::1]:8470", 200),
        ("LOCALHOST", 200),
        ("evil.example", 421),
        ("[", 421),
    ],
)
def test_names_by_which_it_is_asked(host: str, status: int) -> None:
    """A name that somebody else has made to point here is refused."""
    app = dashboard(Ledger(MemoryStore()), hosts={"localhost", "::1"})
    assert TestClient(app, base_url=SITE).get("/", headers={"host": host}).status_code == status


# ---- Mounted -----------------------------------------------------------------------------------


@pytest.mark.parametrize("root", ["", "/proxied"])
def test_mounted(filled: Trouble, root: str) -> None:
    """Under a prefix, also of a proxy, every link, file and form is right, and works."""
    app = FastAPI()
    app.mount("/oncely", dashboard(filled.ledger, auth=as_user()))
    prefix = f"{root}/oncely"
    reader = Reader(app, prefix, root)
    seen: set[str] = set()
    paths = ["/"]
    while paths:
        path = paths.pop()
        seen.add(path)
        answer = reader.client.get(f"{prefix}{path}")
        assert answer.status_code == 200, path
        if not path.startswith("/static"):
            targets = re.findall(r'(?:href|src|action|hx-get)="(/[^"]*)"', answer.text)
            assert [target for target in targets if not target.startswith(f"{prefix}/")] == []
            links = re.findall(r'(?:href|src)="(/[^"]*)"', answer.text.replace("&amp;", "&"))
            new = {link.removeprefix(prefix) for link in links} - seen
            seen |= new
            paths += new
    assert len(seen) > 20
    asking = reader.send(
        reader.get("/in-doubt"), "/records/confirm", decision="not-happened", every="y"
    )
    assert "2 settled" in text(reader.send(asking, "/records/change", why="x"))


def test_page_that_is_here(operator: Reader) -> None:
    """The page that is shown is marked among the links."""
    for path in PAGES:
        marked = re.findall(r'<a href="([^"]*)" aria-current="page">', operator.get(path))
        assert marked == [path]


def test_a_slash_too_many(filled: Trouble) -> None:
    """A page with a slash at its end leads to the page, by whatever scheme and name a proxy in
    front was asked; nothing leads to another site.
    """
    client = Reader(dashboard(filled.ledger)).client
    for path, at in {
        "/failed/": "/failed",
        "/failed/?consumer=shop": "/failed?consumer=shop",
    }.items():
        answer = client.get(path, follow_redirects=False)
        assert (answer.status_code, answer.headers["location"]) == (307, at)
    for path in ("//evil.example/", "//evil.example/failed/", "/nothing/", "/static"):
        assert client.get(f"{SITE}{path}", follow_redirects=False).status_code == 404
