"""The plugin for pytest, which finds it by itself: the fixtures `ledger` and `ledger_url`.

Every run of pytest where oncely is installed loads this, so it imports nothing of oncely before a
test asks for a fixture.
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
    """Where `ledger` is: an SQLite file of this test. Define a fixture of this name for another."""
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
    """The time that a test has let pass ends with it."""
    try:
        return (yield)
    finally:
        if clock := sys.modules.get("oncely._util.clock"):
            clock.undo_passing()
