"""Batches that are larger than a server's limits, and work that is broken off in the middle."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import Connection
from tests.conformance.conftest import SHARED, url_of
from tests.meddling import MeddlingStore
from tests.processes import key_of
from tests.records import granted, record_of

from oncely import open_ledger
from oncely._util import sqlite_files
from oncely.core.commands import Busy, Written
from oncely.core.errors import ReplyLost, StoreError, StoreUnavailable
from oncely.core.record import Key, State
from oncely.ledger.ledger import Ledger
from oncely.stores.sql import SqlStore
from oncely.stores.sql.dialect import Dialect
from oncely.testing import ManualClock


@pytest.mark.parametrize("kind", SHARED)
def test_long_results(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Two thousand results of 10 kB are completed at once, more than a statement may hold."""
    ledger = open_ledger(url_of(kind, request, tmp_path))
    ledger.migrate()
    claims = [granted(o) for o in ledger.claim_many([key_of(n) for n in range(2_000)])]
    outcomes = ledger.complete_many(claims, ["x" * 10_000] * 2_000)
    assert {type(outcome) for outcome in outcomes} == {Written}
    assert ledger.counts() == {(key_of(0).consumer, State.COMPLETED): 2_000}
    ledger.close()


def test_results_of_quotes(mysql_url: str) -> None:
    """Results whose every letter is escaped, and that twice, fit into statements as well."""
    with closing(open_ledger(mysql_url)) as ledger:
        ledger.migrate()
        claims = [granted(o) for o in ledger.claim_many([key_of(n) for n in range(25)])]
        ledger.complete_many(claims, [f'{n}"' + '"' * 200_000 for n in range(25)])
        assert ledger.counts() == {(key_of(0).consumer, State.COMPLETED): 25}


def test_result_that_no_statement_holds(mysql_url: str) -> None:
    """A result longer than the server takes is an error at once, and leaves the claim."""
    with closing(open_ledger(mysql_url)) as ledger:
        ledger.migrate()
        claim = granted(ledger.claim(key_of(0)))
        with pytest.raises(StoreError, match="raise max_allowed_packet") as raised:
            ledger.complete(claim, "x" * 17_000_000)
        assert not isinstance(raised.value, StoreUnavailable)
        ledger.complete(claim, "shorter")


@pytest.mark.parametrize("broken_off_by", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("kind", ["postgresql", "mysql"])
def test_what_is_broken_off_is_undone(
    kind: str,
    broken_off_by: type[BaseException],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A transaction that was open when work was broken off is not the next caller's."""
    url = request.getfixturevalue(f"{kind}_url")
    ledger, other = open_ledger(url), open_ledger(url)
    ledger.migrate()
    store = ledger._store
    assert isinstance(store, SqlStore)
    first, second = (granted(ledger.claim(key_of(n))) for n in range(2))

    def break_off(_: Dialect, connection: Connection, *__: object) -> set[Key]:
        connection.connection.cursor().execute("BEGIN")
        raise broken_off_by

    with monkeypatch.context() as patched:
        patched.setattr(type(store._dialect), "update", break_off)
        with pytest.raises(broken_off_by):
            ledger.complete(first)
    ledger.complete(second)
    assert isinstance(other.claim(first.key), Busy)
    assert other.counts()[second.key.consumer, State.COMPLETED] == 1
    ledger.close()
    other.close()


def test_lease_begins_when_the_lock_is_had(
    open_sqlite: Callable[..., SqlStore], clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On SQLite a claim that waited longer than its lease for the file's lock has all of it."""
    waits = threading.Event()
    is_locked = sqlite_files.is_locked

    def noted(error: Exception) -> bool:
        waits.set()
        return is_locked(error)

    monkeypatch.setattr(sqlite_files, "is_locked", noted)
    store, ledger = open_sqlite(clock), Ledger(open_sqlite(clock))
    with ThreadPoolExecutor(1) as pool:
        with store._engine.connect() as connection, store._dialect.migrating(connection):
            claim = pool.submit(ledger.claim, key_of(0), "60s")
            assert waits.wait(60)
            clock.advance(61)
        granted(claim.result(60))
    assert record_of(ledger, key_of(0)).lease_until == clock.now + 60


def test_connections_that_always_break(meddling: MeddlingStore) -> None:
    """A store whose replies are always lost is away: it is not asked for ever."""

    def lose() -> None:
        raise ReplyLost("gone")

    meddling.meddle = lose
    with pytest.raises(StoreUnavailable, match="gone"):
        Ledger(meddling).claim(key_of(0))
    assert meddling.calls.count("insert") == 3
