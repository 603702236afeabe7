"""A handler behind each middleware; and rows beside a ledger, as applications have them."""

from collections.abc import Iterator
from typing import Any

import pytest
from tests.http.drivers import DRIVES, Drive, Shop, Site
from tests.integration.callers import KINDS, Place, opened

from oncely.ledger import Ledger


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    """A ledger and business rows in one database, of each kind."""
    with opened(request.param, request) as place:
        yield place


@pytest.fixture
def sqlite_place(request: pytest.FixtureRequest) -> Iterator[Place]:
    """The same on SQLite."""
    with opened("sqlite", request) as place:
        yield place


@pytest.fixture
def shop() -> Shop:
    """The handler of a site."""
    return Shop()


@pytest.fixture(params=sorted(DRIVES))
def drive(request: pytest.FixtureRequest, ledger: Ledger, shop: Shop) -> Drive:
    """Makes a site of `shop`, or of another handler, behind each middleware in turn."""

    def site(handler: Any = shop, **options: Any) -> Site:
        return DRIVES[request.param](handler, ledger, **{"consumer": "api", **options})

    return site
