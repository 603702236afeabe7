"""The pytest plugin, which pytest loads by itself: the fixtures `ledger` and `ledger_url`.

Every run of pytest loads it if oncely is installed, so it does not import oncely before a test
asks for a fixture.
"""

import sys
from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from oncely import Ledger


@pytest.fixture
def ledger_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The URL of `ledger`: a SQLite file of this test. Define your own fixture to change it."""
    return f"sqlite:///{tmp_path_factory.mktemp('oncely') / 'ledger.db'}"


@pytest.fixture
def ledger(ledger_url: str) -> "Iterator[Ledger]":
    """A ledger at `ledger_url`, with its tables; closed after the test."""
    import oncely

    with closing(oncely.open_ledger(ledger_url)) as opened:
        opened.migrate()
        yield opened


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Iterator[None]:
    """Undo the time that a test has let pass, when the test ends."""
    try:
        return (yield)
    finally:
        if clock := sys.modules.get("oncely._util.clock"):
            clock.undo_passing()
