"""A handler behind each middleware; and rows beside a ledger, as applications have them."""

from collections.abc import Iterator

import pytest
from tests.http.drivers import DRIVES, Drive, Shop, drive_by
from tests.integration.callers import KINDS, Place, opened
from tests.turns import in_turn

from oncely.ledger.ledger import Ledger


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    """A ledger and business rows in one database, in a file: see also `on_a_server_too`."""
    with opened(getattr(request, "param", "sqlite"), request) as place:
        yield place


on_a_server_too = pytest.mark.parametrize(
    "place", ["sqlite", *in_turn("http", KINDS[1:])], indirect=True
)
"""For tests whose statements differ with the database."""


@pytest.fixture
def shop() -> Shop:
    """The handler of a site."""
    return Shop()


@pytest.fixture(params=sorted(DRIVES))
def drive(request: pytest.FixtureRequest, ledger: Ledger, shop: Shop) -> Drive:
    """Makes a site of `shop`, or of another handler, behind each middleware in turn."""
    return drive_by(request.param, ledger, shop)
