"""A ledger, and business rows in one database, as applications behind HTTP have them."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.http.drivers import Answering, Drive, by_asgi, by_django, by_wsgi
from tests.integration.callers import KINDS, Place, opened


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """A ledger and business rows in one database, of each kind."""
    with opened(request.param, request, tmp_path) as place:
        yield place


@pytest.fixture
def sqlite_place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """The same on SQLite."""
    with opened("sqlite", request, tmp_path) as place:
        yield place


@pytest.fixture
def app() -> Answering:
    """An application."""
    return Answering()


@pytest.fixture(params=[by_asgi, by_wsgi, by_django])
def drive(request: pytest.FixtureRequest) -> Drive:
    """A framework."""
    driven: Drive = request.param
    return driven
