"""Plain connections to the databases of tests, as operators and other programs have them."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
from tests.integration.callers import KINDS, Place, opened
from tests.integration.drivers import Psycopg, PyMysql, connect_mysql, connect_postgresql
from tests.integration.lines import Line, line_to
from tests.integration.others import Other, OtherOnMysql, OtherOnPostgresql


@pytest.fixture
def psql(postgresql_url: str) -> Iterator[Psycopg]:
    """A plain connection to the test's database on PostgreSQL."""
    with closing(connect_postgresql(postgresql_url)) as connection:
        yield connection


@pytest.fixture
def mysql(mysql_url: str) -> Iterator[PyMysql]:
    """A plain connection to the test's database on MariaDB."""
    with closing(connect_mysql(mysql_url)) as connection:
        yield connection


@pytest.fixture(params=["postgresql", "mysql"])
def other(request: pytest.FixtureRequest) -> Other:
    """Another program on the test's database, on each kind of server."""
    if request.param == "postgresql":
        return OtherOnPostgresql(request.getfixturevalue("psql"))
    return OtherOnMysql(request.getfixturevalue("mysql"))


@pytest.fixture
def bank(request: pytest.FixtureRequest) -> Iterator[Place]:
    """A place on PostgreSQL, for the handlers of adapters."""
    with opened("postgresql", request) as bank:
        yield bank


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    """A ledger and business rows in one database, of each kind."""
    with opened(request.param, request) as place:
        yield place


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    """Threads for those who race."""
    with ThreadPoolExecutor(8) as pool:
        yield pool


@pytest.fixture(params=["postgresql", "mysql"])
def line(request: pytest.FixtureRequest) -> Iterator[Line]:
    """A line to a ledger without a row on each kind of server."""
    with line_to(request.getfixturevalue(f"{request.param}_ledger_url")) as line:
        yield line


@pytest.fixture(params=[True, False], ids=["reply lost", "request lost"])
def delivers(request: pytest.FixtureRequest) -> bool:
    """Whether the server gets the request, and only its reply is lost."""
    return bool(request.param)
