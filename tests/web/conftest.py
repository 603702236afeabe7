"""A ledger in trouble, and whoever looks at its dashboard, with a browser that has no script."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient
from starlette.types import ASGIApp
from tests.cli.conftest import Shop
from tests.records import granted

from oncely import Key, Ledger, Message
from oncely.core.waiting import WaitingMessage
from oncely.stores.sql import SqlStore
from oncely.stores.sql.dialect import SqlConnection
from oncely.stores.sql.engines import sqlite_engine
from oncely.stores.sql.sqlite import Sqlite
from oncely.stores.store import Store
from oncely.testing import ManualClock
from oncely.web import Role, Scope, User, app, dashboard

HOSTILE = "</script><script>alert('1')</script><img src=x onerror=alert(2)>\u202e"
"""An id, a body, an error, a name: neither markup, nor what turns a line around."""
SITE = "http://testserver"
PAGES = (
    *("/", "/in-doubt", "/failed", "/waiting", "/outbox", "/queues", "/consumers", "/messages"),
    *("/workers", "/runs", "/audit"),
)
_FORM = re.compile(r'<form method="post" action="(?P<to>[^"]*)".*?</form>', re.DOTALL)
_HIDDEN = re.compile(r'<input type="hidden" name="(?P<name>[^"]*)" value="(?P<value>[^"]*)">')


class Trouble(Shop):
    """A ledger in which everything is wrong that can be."""

    def __init__(self, store: Store, clock: ManualClock) -> None:
        super().__init__(Ledger(store))
        # Else pages may change by what this process tells of itself meanwhile.
        self.ledger.recorder.is_silent = True
        self.clock = clock

    def doubt(self, *ids: str, consumer: str = "billing") -> None:
        """Workers claim these and die; their leases run out."""
        for id_ in ids:
            granted(self.ledger.claim(Key(consumer, id_), "60s"))
        self.clock.advance(3_660)

    def wait(self, message: Message, delay: str = "10m", error: str = "the bank is away") -> None:
        super().wait(message, delay, error)

    def defer(self, id_: str, destination: str = "mails") -> None:
        """A handler has sent one message; no relay runs."""
        claim = granted(self.ledger.claim(Key("shop", id_)))
        self.ledger.keep_step(claim, "charge", {"receipt": id_})
        receipt = WaitingMessage(f"{id_}-receipt", destination, Message("receipt"), claim.key)
        self.ledger.handled(claim, None, [receipt])


@pytest.fixture
def shares_pages() -> None:
    """Pages are shared between visits, as they are in earnest, but for as long as a test may take;
    see `reads_anew`.
    """


@pytest.fixture(autouse=True)
def reads_anew(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each visit reads what it shows: most tests change a ledger behind the dashboard's back."""
    shares = "shares_pages" in request.fixturenames
    monkeypatch.setattr(app, "PAGES_FOR_S", 600.0 if shares else -1.0)


@pytest.fixture
def trouble(sqlite_ledger_url: str, clock: ManualClock) -> Iterator[Trouble]:
    """A ledger in a file, with a clock that is moved by hand."""
    file = Path(sqlite_ledger_url.removeprefix("sqlite:///"))
    found = Trouble(SqlStore(sqlite_engine(file), clock=clock), clock)
    with closing(found.ledger):
        yield found


@pytest.fixture
def filled(trouble: Trouble) -> Trouble:
    """Something on every page."""
    trouble.doubt("order-1", "order-2")
    trouble.fail(Message("order-3", b'{"to": "anna"}', "order", {"trace": "on"}))
    trouble.wait(Message("order-4", b"{}", "order"))
    trouble.defer("order-5")
    granted(trouble.ledger.claim(Key("billing", "live")))
    return trouble


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The statements that SQLite has been asked since."""
    asked, run = list[str](), Sqlite.run

    def noted(database: Sqlite, link: SqlConnection, statement: str, *values: Any) -> Any:
        asked.append(statement)
        return run(database, link, statement, *values)

    monkeypatch.setattr(Sqlite, "run", noted)
    return asked


class Reader:
    """A person with a browser that runs no script: reads pages, and sends the forms on them."""

    def __init__(self, app: ASGIApp, prefix: str = "", root: str = "") -> None:
        headers = {"origin": SITE}
        self.app = app
        self.client = TestClient(app, base_url=SITE, headers=headers, root_path=root)
        self.prefix = prefix

    def get(self, path: str, status: int = 200, /, **query: str) -> str:
        """The page at that path."""
        answer = self.client.get(f"{self.prefix}{path}", params=query or None)
        assert answer.status_code == status, answer.text
        return answer.text

    def send(self, page: str, form: str, status: int = 200, **fields: str | Sequence[str]) -> str:
        """Send the form of a page that goes to that path, its fields filled in so."""
        found = forms(page)[f"{self.prefix}{form}"]
        answer = self.client.post(f"{self.prefix}{form}", data={**found, **fields})
        assert answer.status_code == status, answer.text
        return answer.text


def forms(page: str) -> Mapping[str, dict[str, Any]]:
    """Where each form of a page goes, and its hidden fields."""
    found: dict[str, dict[str, Any]] = {}
    for form in _FORM.finditer(page):
        fields: dict[str, Any] = {}
        for field in _HIDDEN.finditer(form[0]):
            fields.setdefault(field["name"], []).append(unescape(field["value"]))
        found[form["to"]] = fields
    return found


def text(page: str) -> str:
    """What a page says, without its markup."""
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", page)).split())


def as_user(role: Role = Role.OPERATOR, name: str = "anna") -> Any:
    """An auth hook that takes everybody for that user."""

    def auth(_: Scope) -> User | None:
        return User(name, role)

    return auth


@pytest.fixture
def operator(filled: Trouble) -> Reader:
    """Somebody who may decide."""
    return Reader(dashboard(filled.ledger, auth=as_user()))


@pytest.fixture
def viewer(filled: Trouble) -> Reader:
    """Somebody who may look."""
    return Reader(dashboard(filled.ledger, auth=as_user(Role.VIEWER)))
