"""What many visits share: a page that is made once, and anew when something is changed."""

import re
import threading
from collections import Counter
from typing import Any

import pytest
from tests.forwarding import ForwardingStore
from tests.web.conftest import PAGES, Reader, Trouble, as_user, forms, text

from oncely import Ledger
from oncely.core.errors import StoreUnavailable
from oncely.stores.store import Store
from oncely.testing import at_once
from oncely.web import Role, Scope, User, dashboard


class CountingStore(ForwardingStore):
    """Counts what it is asked, and takes a moment for each."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.asked: Counter[str] = Counter()

    def forward(self, name: str, /, *arguments: Any, **named: Any) -> Any:
        """Forward the call, late."""
        self.asked[name] += 1
        threading.Event().wait(0.02)
        return super().forward(name, *arguments, **named)


@pytest.mark.parametrize("path", [*PAGES, "/message?id=order-1", "/letter?id=1"])
def test_a_page_is_read_once_for_all(filled: Trouble, shares_pages: None, path: str) -> None:
    """Twenty who ask for a page at the same time cost the ledger what one costs."""
    # What was done so far is on the first page as on the others.
    filled.ledger.recorder.tell()
    stores = [CountingStore(filled.ledger._store) for _ in range(2)]
    one, many = (dashboard(Ledger(store), auth=as_user()) for store in stores)
    page = Reader(one).get(path)
    readers = [Reader(many) for _ in range(20)]
    pages = at_once(20, lambda number: readers[number].get(path))
    assert stores[0].asked.total() > 0
    assert stores[1].asked == stores[0].asked
    [shown] = {text(each) for each in pages}
    # They tell how long ago things were.
    assert re.sub(r"\d", "", shown) == re.sub(r"\d", "", text(page))


@pytest.fixture
def both(filled: Trouble, shares_pages: None) -> tuple[Reader, Reader]:
    """Anna, who may decide, and Ben, who may look, at the same dashboard."""

    def auth(scope: Scope) -> User:
        name = dict(scope["headers"])[b"name"].decode()
        return User(name, Role.OPERATOR if name == "<anna>" else Role.VIEWER)

    app = dashboard(filled.ledger, auth=auth)
    anna, ben = Reader(app), Reader(app)
    anna.client.headers["name"], ben.client.headers["name"] = "<anna>", "ben"
    return anna, ben


def test_a_change_is_seen_at_once(both: tuple[Reader, Reader]) -> None:
    """What somebody changes here is on the next page that anybody is shown."""
    for reader in both:
        assert "2 in doubt" in text(reader.get("/"))
        assert "order-1" in reader.get("/in-doubt")
    anna, _ = both
    confirm = anna.send(anna.get("/in-doubt"), "/records/confirm", decision="happened", every="yes")
    anna.get("/workers")
    done = anna.send(confirm, "/records/change", why="seen at the bank")
    assert "In doubt Failed 1" in text(done)
    for reader in both:
        assert "2 in doubt" not in text(reader.get("/"))
        assert "Nothing is in doubt." in reader.get("/in-doubt")


class CutStore(ForwardingStore):
    """Carries out a change, and then is away, once."""

    is_cut = False

    def forward(self, name: str, /, *arguments: Any, **named: Any) -> Any:
        """Forward the call; of the next change nobody hears."""
        found = super().forward(name, *arguments, **named)
        if self.is_cut and name in ("update", "transaction"):
            self.is_cut = False
            raise StoreUnavailable("away")
        return found


def test_a_change_that_fails_is_seen_at_once(trouble: Trouble, shares_pages: None) -> None:
    """It may have been made in part: pages are made again."""
    trouble.doubt("order-1")
    store = CutStore(trouble.ledger._store)
    anna = Reader(dashboard(Ledger(store), auth=as_user()))
    page = anna.get("/in-doubt")
    confirm = anna.send(page, "/records/confirm", decision="happened", every="yes")
    assert "order-1" in anna.get("/in-doubt")
    store.is_cut = True
    anna.send(confirm, "/records/change", 503, why="a test")
    assert "Nothing is in doubt." in anna.get("/in-doubt")


def test_each_has_their_own_name_and_forms(both: tuple[Reader, Reader]) -> None:
    """A page that is shared has the name of whoever looks, their token, and the forms of their
    role.
    """
    anna, ben = both
    anna.get("/in-doubt")
    assert "&lt;anna&gt; (operator)" in anna.get("/in-doubt")
    assert "ben (viewer)" in ben.get("/in-doubt")
    assert forms(ben.get("/in-doubt")) == {}
    again = Reader(anna.app)
    again.client.headers["name"] = "<anna>"
    tokens = [forms(each.get("/in-doubt"))["/records/confirm"]["csrf"] for each in (anna, again)]
    assert tokens[0] != tokens[1]
    for each in (anna, again):
        page = each.get("/in-doubt")
        each.send(page, "/records/confirm", decision="happened", every="yes")
